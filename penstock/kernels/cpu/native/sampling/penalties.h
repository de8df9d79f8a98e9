// The changes to a row's logits before sampling: mask, bias and penalties, in the order of kernels/sampling.py.
#pragma once

#include <cstdint>

#include "context.h"

namespace penstock {

// Groups (row, id) pairs, which come in any order, by row. Within a row they keep their order.
class PairsByRow {
  public:
    PairsByRow(const std::int64_t* pairs, std::int64_t count, std::int64_t rows, BumpAllocator& memory)
        : pairs_(pairs), count_(pairs == nullptr ? 0 : count), rows_(rows) {
        if (count_ == 0) return;
        begin_ = memory.allocate<std::int64_t>(rows + 2);
        order_ = memory.allocate<std::int64_t>(count_);
    }

    // A counting sort by row, into the memory given to the constructor.
    void sort() {
        if (count_ == 0) return;
        std::int64_t* const next = begin_ + 1;  // next[r]: place of row r's next pair; begin_[r + 1] at the end
        for (std::int64_t row = 0; row < rows_ + 2; ++row) begin_[row] = 0;
        for (std::int64_t i = 0; i < count_; ++i) ++next[pairs_[2 * i] + 1];
        for (std::int64_t row = 0; row < rows_; ++row) next[row + 1] += next[row];
        for (std::int64_t i = 0; i < count_; ++i) order_[next[pairs_[2 * i]]++] = i;
    }

    bool any(std::int64_t row) const { return count_ > 0 && begin_[row] < begin_[row + 1]; }

    // Call change(id, index of the pair) for all pairs of the row.
    template <class Change>
    void each(std::int64_t row, const Change& change) const {
        if (count_ == 0) return;
        for (std::int64_t i = begin_[row]; i < begin_[row + 1]; ++i) change(pairs_[2 * order_[i] + 1], order_[i]);
    }

  private:
    const std::int64_t* pairs_;
    std::int64_t count_, rows_;
    std::int64_t* begin_ = nullptr;  // [rows + 2]: row r's pairs are order_[begin_[r]] .. order_[begin_[r + 1] - 1]
    std::int64_t* order_ = nullptr;  // [count]
};

class Penalties {
  public:
    Penalties(const PenstockSampling& params, std::int64_t rows, BumpAllocator memory)
        : params_(params),
          masked_(params.masked, params.num_masked, rows, memory),
          bias_(params.bias_pairs, params.num_bias, rows, memory),
          repetition_(params.repetition_pairs, params.num_repetition, rows, memory),
          counts_(params.count_pairs, params.num_counts, rows, memory),
          bytes_(memory.bytes()) {}

    // Bytes of memory that sort() writes.
    std::int64_t bytes() const { return bytes_; }

    // Must be called once before `any` and `apply`.
    void sort() {
        masked_.sort();
        bias_.sort();
        repetition_.sort();
        counts_.sort();
    }

    bool any(std::int64_t row) const {
        return masked_.any(row) || bias_.any(row) || repetition_.any(row) || counts_.any(row);
    }

    void apply(std::int64_t row, float* logits) const {
        masked_.each(row, [&](std::int64_t id, std::int64_t) { logits[id] = -__builtin_inff(); });
        bias_.each(row, [&](std::int64_t id, std::int64_t i) { logits[id] += params_.bias_values[i]; });
        repetition_.each(row, [&, penalty = params_.repetition](std::int64_t id, std::int64_t) {
            logits[id] = logits[id] > 0.0f ? logits[id] / penalty[row] : logits[id] * penalty[row];
        });
        counts_.each(row, [&](std::int64_t id, std::int64_t i) {
            logits[id] -= params_.frequency[row] * params_.count_values[i];
            logits[id] -= params_.presence[row];
        });
    }

  private:
    const PenstockSampling& params_;
    PairsByRow masked_, bias_, repetition_, counts_;
    std::int64_t bytes_;
};

}  // namespace penstock

// Log-probabilities, and the choice of a token for each row. The steps and their order are those of
// kernels/sampling.py.
//
// Threads take whole rows: one row's work is small beside the product that made its logits.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "sampling/penalties.h"
#include "context.h"
#include "sampling/sampler_kernels.h"
#include "sampling/selection.h"

namespace penstock {
namespace {

constexpr std::int64_t NO_TOKEN = -1;
constexpr float LOWEST = -FLT_MAX;  // what lies below is -inf, which nobody draws

std::int64_t num_maxima(std::int64_t vocab) { return (vocab + SCAN_BLOCK - 1) / SCAN_BLOCK * SCAN_LANES; }

// What a thread needs for one row of a vocabulary. Only a row that is drawn uses more than the first two.
struct RowMemory {
    float* maxima;           // [num_maxima]
    float* logits;           // [vocab], after penalties and temperature
    Candidates candidates;   // [vocab]
    float* weights;          // [vocab], of the candidates
    std::int32_t* open;      // [vocab or num_maxima], for last_within

    RowMemory(Carver& carver, std::int64_t vocab)
        : maxima(carver.cut<float>(num_maxima(vocab))),
          logits(carver.cut<float>(vocab)),
          candidates{0, carver.cut<std::int32_t>(vocab), carver.cut<float>(vocab)},
          weights(carver.cut<float>(vocab)),
          open(carver.cut<std::int32_t>(std::max(vocab, num_maxima(vocab)))) {}

    static std::int64_t bytes(std::int64_t vocab) {
        Carver counted(nullptr);
        RowMemory(counted, vocab);
        return counted.bytes();
    }
};

// min_p, top_k and top_p, which are called in this order, and a draw from what they leave of one row. The row is not
// changed: what is left is a cut in the order of its values, and candidates are copied.
class Distribution {
  public:
    // x [vocab] after the temperature; maxima as scan gives them for x times `temperature`; max the greatest of x.
    Distribution(const SamplerKernels& kernels, RowMemory& memory, const float* x, std::int64_t vocab, float max,
                 float temperature)
        : kernels_(kernels), memory_(memory), x_(x), vocab_(vocab), max_(max), temperature_(temperature) {}

    // Drops x < max + log(min_p), which is exp(x - max) < min_p.
    void min_p(float share) {
        if (share > 0.0f) cut_.value = std::max(LOWEST, kernels_.floor(max_, share));
    }

    void top_k(std::int64_t k) {
        if (k >= vocab_) return;
        k = std::max<std::int64_t>(k, 1);
        collect(std::max(cut_.value, at_most_kth(k)));
        end_at(last_within(memory_.candidates, static_cast<std::uint64_t>(k), memory_.open,
                           [](std::int32_t) { return std::uint64_t{1}; }));
        memory_.candidates.keep(cut_);
    }

    void top_p(float share) {
        if (!(share < 1.0f)) return;
        if (!collected_ && cut_.value == LOWEST) return top_p_of_all(share);
        if (!collected_) collect(cut_.value);
        weigh();
        std::uint64_t total = 0;
        for (std::int64_t i = 0; i < memory_.candidates.count; ++i) total += units(memory_.weights[i]);
        end_at(last_of_mass(share * static_cast<double>(total)));
    }

    // One by one, an entry takes about four times as long as among neighbours, which share a block of noise.
    std::int64_t draw(NoiseKey key) const {
        Candidates& few = memory_.candidates;
        if (!collected_ || few.count > vocab_ / 4) return kernels_.draw(x_, vocab_, max_, cut_, key);
        few.keep(cut_);
        return kernels_.draw_of(few.ids, few.values, few.count, max_, key);
    }

  private:
    // Probabilities as integers: in these units the most likely token has UNITS.
    static constexpr float UNITS = 0x1p40f;
    static std::uint64_t units(float weight) {
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(weight * UNITS));  // signed: one instruction
    }

    // The whole row takes part, but most of it lies behind the cut: only entries that are likely enough to hold the
    // share are looked at. The sums that say so are rounded, the cut itself is exact.
    void top_p_of_all(float share) {
        const Masses masses = kernels_.masses(x_, vocab_, max_);
        float floor = LOWEST;
        for (int i = NUM_STEPS - 1; i >= 0; --i)
            if (masses.above[i] > masses.total * share * 1.0001f) floor = max_ - STEPS[i];
        const double mass = static_cast<double>(share) * masses.total * UNITS;
        for (;; floor = LOWEST) {
            collect(floor);
            weigh();
            const std::int64_t last = last_of_mass(mass);
            if (last < 0 && floor != LOWEST) continue;  // never seen: the sums were much too great
            return end_at(last);
        }
    }

    // The last entry with less than this mass before it; the first entry in any case.
    std::int64_t last_of_mass(double mass) const {
        const std::uint64_t limit = mass >= 1.0 && mass < 0x1p63 ? static_cast<std::uint64_t>(std::ceil(mass)) : 1;
        return last_within(memory_.candidates, limit, memory_.open,
                           [weights = memory_.weights](std::int32_t i) { return units(weights[i]); });
    }

    // A value that at least k entries reach: the k-th greatest of maxima of disjoint parts of the row.
    float at_most_kth(std::int64_t k) const {
        const Candidates maxima = {num_maxima(vocab_), nullptr, memory_.maxima};
        const std::int64_t last = last_within(maxima, static_cast<std::uint64_t>(k), memory_.open,
                                              [](std::int32_t) { return std::uint64_t{1}; });
        return last < 0 ? LOWEST : memory_.maxima[last] / temperature_;
    }

    void collect(float floor) {
        memory_.candidates.count =
            kernels_.collect(x_, vocab_, floor, memory_.candidates.ids, memory_.candidates.values);
        collected_ = true;
    }

    void weigh() { kernels_.weights(memory_.candidates.values, memory_.candidates.count, max_, memory_.weights); }

    // Cuts behind a candidate; -1: all stay.
    void end_at(std::int64_t last) {
        if (last >= 0) cut_ = {memory_.candidates.values[last], memory_.candidates.ids[last]};
    }

    const SamplerKernels& kernels_;
    RowMemory& memory_;
    const float* const x_;
    const std::int64_t vocab_;
    const float max_, temperature_;
    Cut cut_ = {LOWEST, INT32_MAX};
    bool collected_ = false;  // what the cut leaves is among the candidates
};

// Chooses one token a row.
class TokenSampler {
  public:
    TokenSampler(const SamplerKernels& kernels, const float* logits, std::int64_t vocab, const PenstockSampling& params,
                 const Adjustments& adjustments)
        : kernels_(kernels), logits_(logits), vocab_(vocab), params_(params), adjustments_(adjustments) {}

    std::int64_t choose(std::int64_t row, RowMemory memory) const {
        const float* x = logits_ + row * vocab_;
        if (adjustments_.any(row)) {
            std::memcpy(memory.logits, x, static_cast<std::size_t>(vocab_) * sizeof(float));
            adjustments_.apply(row, memory.logits);
            x = memory.logits;
        }
        const float max = kernels_.scan(x, vocab_, memory.maxima);
        if (max == -INFINITY) return NO_TOKEN;
        const float temperature = params_.temperature[row];
        const bool drawn = temperature > 0.0f && params_.noise_key != nullptr;
        // A temperature so small that the greatest value overflows is greedy.
        if (!drawn || !std::isfinite(max / temperature)) return first_greatest(x, max, memory.maxima);
        return draw(row, x, max, memory);
    }

  private:
    std::int64_t first_greatest(const float* x, float max, const float* maxima) const {
        const std::int64_t index = kernels_.find(maxima, num_maxima(vocab_), max);
        if (index < 0) return NO_TOKEN;  // only where there are NaN
        const std::int64_t begin = index / SCAN_LANES * SCAN_BLOCK;
        return begin + kernels_.find(x + begin, std::min<std::int64_t>(SCAN_BLOCK, vocab_ - begin), max);
    }

    std::int64_t draw(std::int64_t row, const float* x, float max, RowMemory& memory) const {
        const float temperature = params_.temperature[row];
        if (temperature != 1.0f) {
            kernels_.divide(x, vocab_, temperature, memory.logits);
            x = memory.logits;
            max /= temperature;  // rounded division keeps the order
        }
        Distribution distribution(kernels_, memory, x, vocab_, max, temperature);
        if (params_.min_p != nullptr) distribution.min_p(params_.min_p[row]);
        if (params_.top_k != nullptr) distribution.top_k(params_.top_k[row]);
        if (params_.top_p != nullptr) distribution.top_p(params_.top_p[row]);
        return distribution.draw(noise_key(row));
    }

    NoiseKey noise_key(std::int64_t row) const {
        const std::int64_t* const key = params_.noise_key + 3 * row;
        const std::uint64_t seed = static_cast<std::uint64_t>(key[0]);
        return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                static_cast<std::uint32_t>(key[1]), static_cast<std::uint32_t>(key[2])};
    }

    const SamplerKernels& kernels_;
    const float* const logits_;
    const std::int64_t vocab_;
    const PenstockSampling& params_;
    const Adjustments& adjustments_;
};

void log_softmax(Context& context, const float* logits, std::int64_t rows, std::int64_t vocab, float* out) {
    const SamplerKernels& kernels = context.sampler;
    const std::int64_t bytes = num_maxima(vocab) * static_cast<std::int64_t>(sizeof(float));
    for (int thread = 0; thread < context.pool.threads(); ++thread) context.per_thread[thread].take(bytes);
    context.pool.run(rows, [&](std::int64_t row, int thread) {
        const float* const x = logits + row * vocab;
        const float max = kernels.scan(x, vocab, static_cast<float*>(context.per_thread[thread].take(bytes)));
        kernels.log_softmax(x, vocab, max, out + row * vocab);
    });
}

void sample(Context& context, const float* logits, std::int64_t rows, std::int64_t vocab,
            const PenstockSampling& params, std::int64_t* out) {
    const SamplerKernels& kernels = context.sampler;
    const std::int64_t sorting = Adjustments(params, rows, Carver(nullptr)).bytes();
    Adjustments adjustments(params, rows, Carver(context.workspace.take(sorting)));
    adjustments.sort();
    const std::int64_t bytes = RowMemory::bytes(vocab);
    for (int thread = 0; thread < context.pool.threads(); ++thread) context.per_thread[thread].take(bytes);
    const TokenSampler sampler(kernels, logits, vocab, params, adjustments);
    context.pool.run(rows, [&](std::int64_t row, int thread) {
        Carver carver(context.per_thread[thread].take(bytes));
        out[row] = sampler.choose(row, RowMemory(carver, vocab));
    });
}

}  // namespace
}  // namespace penstock

using penstock::Context;

// logits [rows, vocab] -> out [rows, vocab]: the logarithms of their softmax. `out` may be `logits`.
PENSTOCK_EXPORT std::int32_t penstock_log_softmax(Context* context, const float* logits, std::int64_t rows,
                                                  std::int64_t vocab, float* out) {
    const penstock::Turn turn(context);
    try {
        penstock::log_softmax(*context, logits, rows, vocab, out);
        return 0;
    } catch (...) {
        return -1;
    }
}

// logits [rows, vocab] -> out [rows]: 1 where no value is NaN or +inf and some value is above -inf, else 0.
PENSTOCK_EXPORT std::int32_t penstock_finite_rows(Context* context, const float* logits, std::int64_t rows,
                                                  std::int64_t vocab, std::uint8_t* out) {
    const penstock::Turn turn(context);
    const penstock::SamplerKernels& kernels = context->sampler;
    context->pool.run(rows, [&](std::int64_t row, int) { out[row] = kernels.finite(logits + row * vocab, vocab); });
    return 0;
}

// logits [rows, vocab] -> out [rows]: the chosen ids, -1 where no id may be chosen.
PENSTOCK_EXPORT std::int32_t penstock_sample(Context* context, const float* logits, std::int64_t rows,
                                             std::int64_t vocab, const PenstockSampling* params, std::int64_t* out) {
    const penstock::Turn turn(context);
    try {
        penstock::sample(*context, logits, rows, vocab, *params, out);
        return 0;
    } catch (...) {
        return -1;
    }
}

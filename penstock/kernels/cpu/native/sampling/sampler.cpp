// Log-probabilities and sampling, with the steps and order of kernels/sampling.py. Each row is processed by one thread,
// because its work is small compared with the product that computed its logits.
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
constexpr float LOWEST = -FLT_MAX;  // only -inf is lower, and it is never drawn

std::int64_t num_maxima(std::int64_t vocab) { return divide_up(vocab, SCAN_BLOCK) * SCAN_LANES; }

// Scratch memory for one row. Only sampled rows use more than the first two arrays.
struct RowMemory {
    float* maxima;           // [num_maxima]
    float* logits;           // [vocab], after penalties and temperature
    Candidates candidates;   // [vocab]
    float* weights;          // [vocab], weights of the candidates
    std::int32_t* open;      // [vocab or num_maxima], for last_within

    RowMemory(BumpAllocator& memory, std::int64_t vocab)
        : maxima(memory.allocate<float>(num_maxima(vocab))),
          logits(memory.allocate<float>(vocab)),
          candidates{0, memory.allocate<std::int32_t>(vocab), memory.allocate<float>(vocab)},
          weights(memory.allocate<float>(vocab)),
          open(memory.allocate<std::int32_t>(std::max(vocab, num_maxima(vocab)))) {}

    static std::int64_t bytes(std::int64_t vocab) {
        BumpAllocator counter(nullptr);
        RowMemory(counter, vocab);
        return counter.bytes();
    }
};

// The distribution of one row, and a draw from it. min_p, top_k and top_p restrict it and are called in this order. The
// row is not changed: the restriction is a cut in the order of its values, and candidates are copied.
class Distribution {
  public:
    // x [vocab] is divided by the temperature; memory has the maxima of x times `temperature`, from scan; max is that
    // of x.
    Distribution(const SamplerKernels& kernels, RowMemory& memory, const float* x, std::int64_t vocab, float max,
                 float temperature)
        : kernels_(kernels), memory_(memory), x_(x), vocab_(vocab), max_(max), temperature_(temperature) {}

    // Drop entries with x < max + log(share), which means exp(x - max) < share.
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

    // Per entry, drawing from a list takes about four times as long as drawing from neighbours, which share blocks of
    // noise.
    std::int64_t draw(NoiseKey key) const {
        Candidates& list = memory_.candidates;
        if (!collected_ || list.count > vocab_ / 4) return kernels_.draw(x_, vocab_, max_, cut_, key);
        list.keep(cut_);
        return kernels_.draw_of(list.ids, list.values, list.count, max_, key);
    }

  private:
    // Probabilities as integers: the most likely token has UNITS.
    static constexpr float UNITS = 0x1p40f;
    static std::uint64_t units(float weight) {
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(weight * UNITS));  // signed: one instruction
    }

    // top_p without an earlier cut. Most of the row is dropped, so only entries above a floor are collected. The sums
    // that choose the floor are rounded; the cut itself is exact.
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
            if (last < 0 && floor != LOWEST) continue;  // rounding made the sums too large
            return end_at(last);
        }
    }

    // The last entry with less than `mass` before it; at least the first entry.
    std::int64_t last_of_mass(double mass) const {
        const std::uint64_t limit = mass >= 1.0 && mass < 0x1p63 ? static_cast<std::uint64_t>(std::ceil(mass)) : 1;
        return last_within(memory_.candidates, limit, memory_.open,
                           [weights = memory_.weights](std::int32_t i) { return units(weights[i]); });
    }

    // A value that at least k entries reach: the k-th largest maximum of disjoint parts of the row.
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

    // Cut after candidate `last`; -1 keeps all candidates.
    void end_at(std::int64_t last) {
        if (last >= 0) cut_ = {memory_.candidates.values[last], memory_.candidates.ids[last]};
    }

    const SamplerKernels& kernels_;
    RowMemory& memory_;
    const float* const x_;
    const std::int64_t vocab_;
    const float max_, temperature_;
    Cut cut_ = {LOWEST, INT32_MAX};
    bool collected_ = false;  // the candidates include every entry that the cut keeps
};

// Chooses one token per row.
struct TokenSampler {
    const SamplerKernels& kernels;
    const float* const logits;
    const std::int64_t vocab;
    const PenstockSampling& params;
    const Penalties& penalties;

    std::int64_t choose(std::int64_t row, RowMemory memory) const {
        const float* x = logits + row * vocab;
        if (penalties.any(row)) {
            std::memcpy(memory.logits, x, static_cast<std::size_t>(vocab) * sizeof(float));
            penalties.apply(row, memory.logits);
            x = memory.logits;
        }
        const float max = kernels.scan(x, vocab, memory.maxima);
        if (max == -INFINITY) return NO_TOKEN;
        const float temperature = params.temperature[row];
        const bool drawn = temperature > 0.0f && params.noise_key != nullptr;
        // A temperature so small that the maximum overflows is treated as greedy.
        if (!drawn || !std::isfinite(max / temperature)) return argmax(x, max, memory.maxima);
        return draw(row, x, max, memory);
    }

  private:
    std::int64_t argmax(const float* x, float max, const float* maxima) const {
        const std::int64_t index = kernels.find(maxima, num_maxima(vocab), max);
        if (index < 0) return NO_TOKEN;  // happens only if there are NaN
        const std::int64_t begin = index / SCAN_LANES * SCAN_BLOCK;
        return begin + kernels.find(x + begin, std::min<std::int64_t>(SCAN_BLOCK, vocab - begin), max);
    }

    std::int64_t draw(std::int64_t row, const float* x, float max, RowMemory& memory) const {
        const float temperature = params.temperature[row];
        if (temperature != 1.0f) {
            kernels.divide(x, vocab, temperature, memory.logits);
            x = memory.logits;
            max /= temperature;  // rounded division is monotone
        }
        Distribution distribution(kernels, memory, x, vocab, max, temperature);
        if (params.min_p != nullptr) distribution.min_p(params.min_p[row]);
        if (params.top_k != nullptr) distribution.top_k(params.top_k[row]);
        if (params.top_p != nullptr) distribution.top_p(params.top_p[row]);
        return distribution.draw(noise_key(row));
    }

    NoiseKey noise_key(std::int64_t row) const {
        const std::int64_t* const key = params.noise_key + 3 * row;
        const std::uint64_t seed = static_cast<std::uint64_t>(key[0]);
        return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                static_cast<std::uint32_t>(key[1]), static_cast<std::uint32_t>(key[2])};
    }
};

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_log_softmax(
    Context* context, const float* logits, std::int64_t rows, std::int64_t vocab, float* out) {
    return run_call(context, [&] {
        const SamplerKernels& kernels = context->sampler;
        context->reserve_per_thread(num_maxima(vocab) * std::int64_t{sizeof(float)});
        context->pool.parallel_for(rows, [&](std::int64_t row, int thread) {
            const float* const x = logits + row * vocab;
            const float max = kernels.scan(x, vocab, static_cast<float*>(context->per_thread[thread].data()));
            kernels.log_softmax(x, vocab, max, out + row * vocab);
        });
        return STATUS_OK;
    });
}

extern "C" std::int32_t penstock_finite_rows(
    Context* context, const float* logits, std::int64_t rows, std::int64_t vocab, std::uint8_t* out) {
    return run_call(context, [&] {
        context->pool.parallel_for(rows, [&](std::int64_t row, int) {
            out[row] = context->sampler.finite(logits + row * vocab, vocab);
        });
        return STATUS_OK;
    });
}

extern "C" std::int32_t penstock_sample(
    Context* context, const float* logits, std::int64_t rows, std::int64_t vocab, const PenstockSampling* params,
    std::int64_t* out) {
    return run_call(context, [&] {
        const std::int64_t bytes = Penalties(*params, rows, BumpAllocator(nullptr)).bytes();
        Penalties penalties(*params, rows, BumpAllocator(context->workspace.reserve(bytes)));
        penalties.sort();
        context->reserve_per_thread(RowMemory::bytes(vocab));
        const TokenSampler sampler{context->sampler, logits, vocab, *params, penalties};
        context->pool.parallel_for(rows, [&](std::int64_t row, int thread) {
            BumpAllocator memory(context->per_thread[thread].data());
            out[row] = sampler.choose(row, RowMemory(memory, vocab));
        });
        return STATUS_OK;
    });
}

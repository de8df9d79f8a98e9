// The kernels of pack_kernels.h in compiler vector types, compiled once per instruction level.
//
// Everything is in an anonymous namespace, and no function of the standard library is used (abi.h says why).

#include "elements.inc.h"
#include "products/pack_kernels.h"

namespace penstock {
namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef std::int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef std::uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef std::int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef std::uint8_t Bytes __attribute__((vector_size(WIDTH)));

constexpr int LANES = 16;                     // sums of squared errors, reduced as in quant/int4.py
constexpr std::uint32_t INFINITE = 0x7f800000;  // bits of infinity; those of a NaN are larger
constexpr float SMALLEST = 0x1p-100f;
constexpr float ROUNDER = 0x1.8p23f;  // adding it rounds a small float to nearest even
constexpr std::int32_t ROUNDER_BITS = 0x4b400000;

template <class Vector>
void store(void* to, Vector from) {
    __builtin_memcpy(to, &from, sizeof from);
}

Floats widen(Halves bf16) { return same_bits<Floats>(__builtin_convertvector(bf16, Words) << 16); }

// Elements at .. at + WIDTH - 1 of x, zero from `count` on.
template <int TYPE>
Floats load(const void* x, std::int64_t at, std::int64_t count) {
    constexpr int BYTES = type_bytes(TYPE);
    const std::int64_t left = count - at;
    const char* from = static_cast<const char*>(x) + at * BYTES;
    char raw[WIDTH * BYTES] = {};
    if (left >= WIDTH)
        __builtin_memcpy(raw, from, WIDTH * BYTES);
    else
        __builtin_memcpy(raw, from, static_cast<std::size_t>(left) * BYTES);
    if constexpr (TYPE == TYPE_F32) {
        Floats result;
        __builtin_memcpy(&result, raw, sizeof result);
        return result;
    } else {
        Halves result;
        __builtin_memcpy(&result, raw, sizeof result);
        return widen(result);
    }
}

// Call step(elements, at) for every WIDTH elements, the last ones padded with zeros.
template <int TYPE, class Step>
void each(const void* x, std::int64_t count, const Step& step) {
    std::int64_t at = 0;
    for (; at + WIDTH <= count; at += WIDTH) step(load<TYPE>(x, at, at + WIDTH), at);
    if (at < count) step(load<TYPE>(x, at, count), at);
}

template <class Step>
void each_of(const void* x, std::int32_t type, std::int64_t count, const Step& step) {
    if (type == TYPE_F32)
        each<TYPE_F32>(x, count, step);
    else
        each<TYPE_BF16>(x, count, step);
}

// Store the results whose positions are below `count`.
template <class Element, class Vector>
void store_some(Element* out, std::int64_t at, std::int64_t count, Vector values) {
    if (at + WIDTH <= count)
        store(out + at, values);
    else
        __builtin_memcpy(out + at, &values, static_cast<std::size_t>(count - at) * sizeof(Element));
}

Bytes narrow(Ints values) { return __builtin_convertvector(__builtin_convertvector(values, Shorts), Bytes); }

Floats fill(float value) { return value - Floats{}; }

// Bits of magnitudes have the order of the magnitudes, with infinity and NaN at the top.
std::uint32_t reduce_max(Ints lanes) {
    std::uint32_t result = 0;
    for (int lane = 0; lane < WIDTH; ++lane) {
        const std::uint32_t value = static_cast<std::uint32_t>(lanes[lane]);
        result = value > result ? value : result;
    }
    return result;
}

Ints magnitude_bits(Floats x) { return same_bits<Ints>(x) & 0x7fffffff; }

float abs_max(const void* x, std::int32_t type, std::int64_t count) {
    Ints max_bits = {};
    each_of(x, type, count, [&max_bits](Floats values, std::int64_t) {
        const Ints bits = magnitude_bits(values);
        max_bits = bits > max_bits ? bits : max_bits;
    });
    return same_bits<float>(reduce_max(max_bits));
}

void to_f32(const void* x, std::int32_t type, std::int64_t count, float* out) {
    each_of(x, type, count, [=](Floats values, std::int64_t at) { store_some(out, at, count, values); });
}

Halves round_bf16(Floats x) {
    const Words bits = same_bits<Words>(x);
    const Words quiet_nan = bits >> 16 | 0x40;
    return __builtin_convertvector((bits & 0x7fffffff) > INFINITE ? quiet_nan : round_to_bf16(bits), Halves);
}

void to_bf16(const void* x, std::int32_t type, std::int64_t count, std::uint16_t* out) {
    if (type == TYPE_BF16) {
        __builtin_memcpy(out, x, static_cast<std::size_t>(count) * sizeof *out);
        return;
    }
    each<TYPE_F32>(x, count, [=](Floats values, std::int64_t at) { store_some(out, at, count, round_bf16(values)); });
}

void to_int8(const void* x, std::int32_t type, std::int64_t count, float inverse, std::uint8_t* out) {
    each_of(x, type, count, [=](Floats values, std::int64_t at) {
        const Ints rounded = same_bits<Ints>(values * inverse + ROUNDER) - (ROUNDER_BITS - 128);
        store_some(out, at, count, narrow(rounded));
    });
}

constexpr int MAX_GROUP = 128;
constexpr double SHRINK[] = {1.0, 0.95, 0.9, 0.85, 0.8};

// The weights of a group, padded with zeros to a multiple of LANES.
struct Group {
    alignas(64) float weights[MAX_GROUP];
    int count;

    Floats at(int index) const {
        Floats result;
        __builtin_memcpy(&result, weights + index, sizeof result);
        return result;
    }
};

Floats round_int4(Floats weights, float inverse) {
    const Floats low = fill(-8), high = fill(7);
    Floats x = weights * inverse;
    x = x > low ? x : low;
    x = x < high ? x : high;
    return x + ROUNDER;  // the low bits hold the integer
}

// Add the upper half to the lower one until one sum is left.
float reduce_sum(const Floats (&sums)[LANES / WIDTH]) {
    typedef float Quad __attribute__((vector_size(16)));
    Quad quads[4];
    __builtin_memcpy(quads, sums, sizeof quads);
    const Quad sum = (quads[0] + quads[2]) + (quads[1] + quads[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

float squared_error(const Group& group, float scale) {
    const float inverse = 1 / scale;
    Floats sums[LANES / WIDTH] = {};
    for (int at = 0; at < group.count; at += LANES)
        for (int part = 0; part < LANES / WIDTH; ++part) {
            const Floats weights = group.at(at + part * WIDTH);
            const Floats error = weights - (round_int4(weights, inverse) - ROUNDER) * scale;
            sums[part] += error * error;
        }
    return reduce_sum(sums);
}

float best_scale(const Group& group, float abs_max, float extreme) {
    float best = 0, least = 0;
    bool first = true;
    const auto consider = [&](float candidate) {
        const float scale = to_float(to_bf16(candidate)), error = squared_error(group, scale);
        if (!first && !(error < least)) return;
        best = scale, least = error, first = false;
    };
    for (const double factor : SHRINK) {
        consider(abs_max * static_cast<float>(factor / 7));
        consider(extreme * static_cast<float>(-factor / 8));
    }
    return best;
}

std::uint16_t to_int4(const void* x, std::int32_t type, int count, std::uint8_t* out, bool& quantisable) {
    Group group{};
    group.count = (count + LANES - 1) / LANES * LANES;
    Ints max_bits = {}, max_positive_bits = {};
    each_of(x, type, count, [&](Floats values, std::int64_t at) {
        store(group.weights + at, values);
        const Ints bits = magnitude_bits(values), positive = values > Floats{} ? bits : Ints{};
        max_bits = bits > max_bits ? bits : max_bits;
        max_positive_bits = positive > max_positive_bits ? positive : max_positive_bits;
    });
    const std::uint32_t abs_max_bits = reduce_max(max_bits);
    float scale = 0, inverse = 0;
    const float abs_max = same_bits<float>(abs_max_bits);
    quantisable = quantisable && abs_max < MAGNITUDE_LIMIT;
    if (abs_max >= SMALLEST && abs_max < MAGNITUDE_LIMIT) {
        scale = best_scale(group, abs_max, reduce_max(max_positive_bits) == abs_max_bits ? abs_max : -abs_max);
        inverse = 1 / scale;
    }
    for (int at = 0; at < count; at += WIDTH) {
        const Ints rounded = same_bits<Ints>(round_int4(group.at(at), inverse)) - (ROUNDER_BITS - 8);
        store_some(out, at, count, narrow(rounded));
    }
    return static_cast<std::uint16_t>(same_bits<std::uint32_t>(scale) >> 16);
}

void interleave(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, std::uint32_t* out) {
    for (std::int64_t unit = 0; unit < units; ++unit, out += PANEL)
        for (int column = 0; column < columns; ++column) out[column] = rows[column * stride + unit];
}

void interleave_nibbles(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, int high,
                        std::uint32_t* out) {
    const int shift = high ? 4 : 0;
    const std::uint32_t keep = high ? 0x0f0f0f0f : 0xf0f0f0f0;
    for (std::int64_t unit = 0; unit < units; ++unit, out += PANEL / 2)
        for (int column = 0; column < columns; ++column)
            out[column] = (out[column] & keep) | rows[column * stride + unit] << shift;
}

constexpr PackKernels KERNELS = {abs_max, to_f32, to_bf16, to_int8, to_int4, interleave, interleave_nibbles};

}  // namespace
}  // namespace penstock

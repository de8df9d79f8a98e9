// The kernels of pack_kernels.h on the lanes of lanes.inc.h, compiled once per instruction level. They use no function
// of the standard library (abi.h says why).

#include "lanes.inc.h"
#include "products/pack_kernels.h"

namespace penstock {
namespace {

constexpr std::int32_t INFINITE = 0x7f800000;  // bits of infinity; those of a NaN are larger
constexpr float SMALLEST = 0x1p-100f;
constexpr float ROUNDER = 0x1.8p23f;  // adding it rounds a small float to nearest even
constexpr std::int32_t ROUNDER_BITS = 0x4b400000;

// Call step(elements, at, count) for every 16 elements of x. Elements beyond `count`, at the end of x, are zeros.
template <class Step>
PENSTOCK_INLINE void each_lanes(const void* x, std::int32_t type, std::int64_t n, const Step& step) {
    const float* floats = static_cast<const float*>(x);
    const std::uint16_t* halves = static_cast<const std::uint16_t*>(x);
    if (type == TYPE_F32)
        each_vector(n, PENSTOCK_BODY { step(load_some(floats + i, count), i, count); });
    else
        each_vector(n, PENSTOCK_BODY { step(load_some(halves + i, count), i, count); });
}

#define PENSTOCK_STEP [&](F32x16 values, std::int64_t at, int left) __attribute__((always_inline))

// Store the first `count` integers, narrowed to the element type of `to`.
template <class Element>
PENSTOCK_INLINE void store_narrow(Element* to, I32x16 a, int count) {
    typedef Element NarrowPart __attribute__((vector_size(sizeof(Element) * PART_LANES)));
    alignas(64) Element lane[LANES];
    for (int i = 0; i < PARTS; ++i) {
        const ShortPart halves = __builtin_convertvector(a.part[i], ShortPart);  // one step is slow with GCC
        const NarrowPart narrow = __builtin_convertvector(halves, NarrowPart);
        __builtin_memcpy(lane + i * PART_LANES, &narrow, sizeof narrow);
    }
    __builtin_memcpy(to, lane, static_cast<std::size_t>(count) * sizeof(Element));
}

PENSTOCK_INLINE I32x16 larger(I32x16 a, I32x16 b) { return select(a > b, a, b); }

// Bits of magnitudes have the order of the magnitudes, with infinity and NaN as the largest.
PENSTOCK_INLINE I32x16 magnitude_bits(F32x16 x) { return bits_as<I32x16>(abs(x)); }

PENSTOCK_INLINE std::int32_t reduce_max(I32x16 lanes) {
    alignas(64) std::int32_t lane[LANES];
    store(lane, lanes);
    std::int32_t result = 0;
    for (const std::int32_t value : lane) result = value > result ? value : result;
    return result;
}

float abs_max(const void* x, std::int32_t type, std::int64_t count) {
    I32x16 max_bits = 0;
    each_lanes(x, type, count, [&](F32x16 values, std::int64_t, int) __attribute__((always_inline)) {
        max_bits = larger(magnitude_bits(values), max_bits);
    });
    return same_bits<float>(reduce_max(max_bits));
}

void to_f32(const void* x, std::int32_t type, std::int64_t count, float* out) {
    each_lanes(x, type, count, PENSTOCK_STEP { store_some(out + at, values, left); });
}

void to_bf16(const void* x, std::int32_t type, std::int64_t count, std::uint16_t* out) {
    if (type == TYPE_BF16) {
        __builtin_memcpy(out, x, static_cast<std::size_t>(count) * sizeof *out);
        return;
    }
    each_lanes(x, TYPE_F32, count, PENSTOCK_STEP {
        const U32x16 bits = bits_as<U32x16>(values);
        const U32x16 rounded = select(magnitude_bits(values) > INFINITE, bits >> 16u | 0x40u, round_to_bf16(bits));
        store_narrow(out + at, bits_as<I32x16>(rounded), left);
    });
}

void to_int8(const void* x, std::int32_t type, std::int64_t count, float inverse, std::uint8_t* out) {
    each_lanes(x, type, count, PENSTOCK_STEP {
        store_narrow(out + at, bits_as<I32x16>(values * inverse + ROUNDER) - (ROUNDER_BITS - 128), left);
    });
}

constexpr int MAX_GROUP = 128;
constexpr double SHRINK[] = {1.0, 0.95, 0.9, 0.85, 0.8};

// The weights of a group, padded with zeros to whole vectors.
struct Group {
    alignas(64) float weights[MAX_GROUP];
    int count;
};

// The results have the rounded integers in their low bits.
PENSTOCK_INLINE F32x16 round_int4(F32x16 weights, float inverse) {
    return min(max(weights * inverse, -8.0f), 7.0f) + ROUNDER;
}

float squared_error(const Group& group, float scale) {
    const float inverse = 1 / scale;
    F32x16 sums = 0.0f;
    for (int at = 0; at < group.count; at += LANES) {
        const F32x16 weights = load(group.weights + at);
        const F32x16 error = weights - (round_int4(weights, inverse) - ROUNDER) * scale;
        sums = sums + error * error;
    }
    return reduce_sum(sums);  // in the order of reference/quantized_weights.py
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
    I32x16 max_bits = 0, max_positive_bits = 0;
    each_lanes(x, type, count, [&](F32x16 values, std::int64_t at, int) __attribute__((always_inline)) {
        store(group.weights + at, values);
        const I32x16 bits = magnitude_bits(values);
        max_bits = larger(bits, max_bits);
        max_positive_bits = larger(bits & (values > 0.0f), max_positive_bits);
    });
    const std::int32_t abs_max_bits = reduce_max(max_bits);
    float scale = 0, inverse = 0;
    const float abs_max = same_bits<float>(abs_max_bits);
    quantisable = quantisable && abs_max < MAGNITUDE_LIMIT;
    if (abs_max >= SMALLEST && abs_max < MAGNITUDE_LIMIT) {
        scale = best_scale(group, abs_max, reduce_max(max_positive_bits) == abs_max_bits ? abs_max : -abs_max);
        inverse = 1 / scale;
    }
    for (int at = 0; at < count; at += LANES) {
        const I32x16 rounded = bits_as<I32x16>(round_int4(load(group.weights + at), inverse)) - (ROUNDER_BITS - 8);
        store_narrow(out + at, rounded, count - at < LANES ? count - at : LANES);
    }
    return static_cast<std::uint16_t>(same_bits<std::uint32_t>(scale) >> 16);
}

void interleave(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, std::uint32_t* out) {
    for (std::int64_t unit = 0; unit < units; ++unit, out += PANEL)
        for (int column = 0; column < columns; ++column) out[column] = rows[column * stride + unit];
}

void interleave_nibbles(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, int high,
                        std::uint32_t* out, std::int64_t out_stride) {
    const int shift = high ? 4 : 0;
    const std::uint32_t keep = high ? 0x0f0f0f0f : 0xf0f0f0f0;
    for (std::int64_t unit = 0; unit < units; ++unit, out += out_stride)
        for (int column = 0; column < columns; ++column)
            out[column] = (out[column] & keep) | (rows[column * stride + unit] & 0x0f0f0f0f) << shift;
}

void interleave_high_bits(const std::uint32_t* rows, std::int64_t stride, int first, int columns, std::int64_t units,
                          int first_column, std::uint32_t* out, std::int64_t out_stride) {
    constexpr int PLANE = 8;  // columns that share a pair of bits
    for (std::int64_t unit = 0; unit < units; ++unit, out += out_stride)
        for (int column = 0; column < columns; ++column) {
            const int of_panel = first_column + first + column, shift = of_panel / PLANE * 2;
            std::uint32_t& to = out[of_panel % PLANE];
            to = (to & ~(0x03030303u << shift)) | (rows[column * stride + unit] >> 4 & 0x03030303u) << shift;
        }
}

}  // namespace

template <> PackKernels pack_kernels<THIS_LEVEL>() {
    return {abs_max, to_f32, to_bf16, to_int8, to_int4, interleave, interleave_nibbles, interleave_high_bits};
}

}  // namespace penstock

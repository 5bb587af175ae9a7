// From a dot product to the value that a token is picked by, and the order in which values win. The one implementation of
// rounding, NaN, signed zero and tie rule; every plan's kernel uses it.
#pragma once

#include "mailbox.cuh"
#include "types.cuh"

namespace tpw {

enum Rounding : int { kEngine = 0, kOnce = 1, kNone = 2 };

__device__ __forceinline__ float bf16_to_float(bf16 bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

__device__ __forceinline__ bf16 float_to_bf16(float value) {
    bf16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// The value a token is picked from, as the fp32 that holds it exactly. IEEE adds by name: no flag of the compiler may
// fuse or flush them.
template <int kRounding>
__device__ __forceinline__ float biased_logit(float base, float bias) {
    if constexpr (kRounding == kOnce) return bf16_to_float(float_to_bf16(__fadd_rn(base, bias)));
    const float rounded_bias = bf16_to_float(float_to_bf16(bias));
    const float sum = __fadd_rn(base, rounded_bias);
    if constexpr (kRounding == kEngine) return bf16_to_float(float_to_bf16(sum));
    return sum;
}

// The order of values as integers (mailbox.cuh: ordered_bits). No value becomes 0, which can so mean "nothing yet".
__device__ __forceinline__ uint32_t ordered(float value) { return ordered_bits(__float_as_uint(value)); }

// As make_key, of a value that is ordered already. Nothing yet becomes key 0, no contribution.
__device__ __forceinline__ uint64_t ordered_key(uint32_t ordered_value, uint32_t id) {
    return ordered_value == 0 ? 0 : (static_cast<uint64_t>(ordered_value) << 32) | (0xffffffffu - id);
}

// The largest key of a warp, on every lane. Two REDUX instructions take the place of five rounds of 64-bit shuffles.
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    const uint32_t best_high = __reduce_max_sync(kFullWarp, high);
    const uint32_t best_low = __reduce_max_sync(kFullWarp, high == best_high ? static_cast<uint32_t>(key) : 0u);
    return (static_cast<uint64_t>(best_high) << 32) | best_low;
}

}  // namespace tpw

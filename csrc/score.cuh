// From a dot product to the value that a token is picked by, and the order in which values win. The one implementation of
// rounding, NaN, signed zero and tie rule; every plan's kernel uses it.
#pragma once

#include "types.cuh"

namespace tpw {

enum Rounding : int { kEngine = 0, kOnce = 1, kNone = 2 };

__device__ __forceinline__ float bf16_to_float(bf16 bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

// Two values to bf16, to the nearest even. The packed conversion runs at full rate, a single one doesn't. NaN comes out as the
// positive quiet NaN.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t round_to_bf16(float& low, float& high) {
    const uint32_t packed = pack_bf16(low, high);
    low = __uint_as_float(packed << 16);
    high = __uint_as_float(packed & 0xffff0000u);
    return packed;
}

// Each half to the nearest even, as if of the exact sum.
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t x, uint32_t y) {
    uint32_t sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
}

// Two biases become the two values that tokens are picked from, as the fp32 that hold them exactly; where they are bf16, they
// are returned packed too. IEEE adds by name: no flag of the compiler may fuse or flush them.
template <int kRounding>
__device__ __forceinline__ uint32_t add_base(const float (&base)[2], float (&value)[2]) {
    if constexpr (kRounding != kOnce) round_to_bf16(value[0], value[1]);
    value[0] = __fadd_rn(base[0], value[0]);
    value[1] = __fadd_rn(base[1], value[1]);
    return kRounding == kNone ? 0 : round_to_bf16(value[0], value[1]);
}

// The same of base logits that are bf16, packed, in two instructions instead of seven. A bias that isn't rounded is an fp32 still.
// One that is makes a sum that is rounded once here and twice there, to fp32 in between, with the same result: the sum of two bf16
// is no fp32 only where one is 2^15 times the other, and then is as near to the larger one, a bf16, as no tie is.
template <int kRounding>
__device__ __forceinline__ uint32_t add_packed_base(uint32_t base, float (&value)[2]) {
    if constexpr (kRounding != kEngine) {
        const float both[2] = {__uint_as_float(base << 16), __uint_as_float(base & 0xffff0000u)};
        return add_base<kRounding>(both, value);
    }
    const uint32_t sum = add_bf16x2(base, pack_bf16(value[0], value[1]));
    value[0] = __uint_as_float(sum << 16);
    value[1] = __uint_as_float(sum & 0xffff0000u);
    return sum;
}

// Values in the order in which they win, as signed integers. Nothing becomes kNothing. Its own inverse.
constexpr int32_t kNothing = static_cast<int32_t>(0x80000000u);

__device__ constexpr int32_t ordered_bits(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

// Adding +0 makes -0 equal to it, and every NaN the positive one with all bits set, which then is above all.
__device__ __forceinline__ int32_t ordered(float value) { return ordered_bits(__float_as_int(__fadd_rn(value, 0.0f))); }

// Of two packed bf16: the upper halves of their ordered(), packed.
__device__ __forceinline__ uint32_t ordered_pair(uint32_t packed) {
    const uint32_t sum = add_bf16x2(packed, 0u);
    uint32_t signs;  // each spread over its 16 bits
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(sum));
    return sum ^ (signs & 0x7fff7fffu);
}

__device__ __forceinline__ float from_ordered(int32_t value) { return __int_as_float(ordered_bits(value)); }

// The device twin of mailbox.make_key: the largest key wins, the larger value, then the smaller id. Key 0 is no contribution.
__device__ constexpr uint64_t make_key(int32_t ordered_value, uint32_t id) {
    if (ordered_value == kNothing) return 0;
    return static_cast<uint64_t>(static_cast<uint32_t>(ordered_value) ^ 0x80000000u) << 32 | (0xffffffffu - id);
}

__device__ constexpr int32_t key_value(uint64_t key) { return key == 0 ? kNothing : static_cast<int32_t>(static_cast<uint32_t>(key >> 32) ^ 0x80000000u); }

__device__ __forceinline__ float key_score(uint64_t key) { return from_ordered(key_value(key)); }

__device__ constexpr uint32_t key_id(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

// The largest key of a warp, on every lane. Two REDUX instructions take the place of five rounds of 64-bit shuffles.
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    const uint32_t best_high = __reduce_max_sync(kFullWarp, high);
    const uint32_t best_low = __reduce_max_sync(kFullWarp, high == best_high ? static_cast<uint32_t>(key) : 0u);
    return static_cast<uint64_t>(best_high) << 32 | best_low;
}

}  // namespace tpw

// Counter-based Gumbel noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the
// counter words (id / 4, row, step, offset). A draw depends on nothing else, so not on shard, plan or neighbours.
#pragma once

#include "types.cuh"

namespace tpw {

__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t low0 = counter.x * 0xd2511f53u, high0 = __umulhi(counter.x, 0xd2511f53u);
        const uint32_t low1 = counter.z * 0xcd9e8d57u, high1 = __umulhi(counter.z, 0xcd9e8d57u);
        counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return counter;
}

__device__ __forceinline__ float uniform(uint32_t bits) { return __fmul_rn(__fadd_rn(__uint2float_rn(bits), 0.5f), 0x1p-32f); }

// -log(-log1p(-uniform)), each logarithm the fp32 nearest to the true value, as noise.gumbel on the host: the definition.
__device__ __forceinline__ float gumbel(uint32_t bits) {
    const float exponential = static_cast<float>(-log1p(-static_cast<double>(uniform(bits))));
    return static_cast<float>(-log(static_cast<double>(exponential)));
}

__device__ __forceinline__ float approximate_log(float x) {
    float log2;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log2) : "f"(x));
    return log2 * 0.69314718f;
}

// The same within kGumbelError, at a tenth of the cost: enough to tell which ids can have drawn the largest score. The error is
// a relative one of the exponential, and fp16's half of 2^-10 of a noise below 24. Below 1/32 the series of -log1p(-u) is cut
// after u^2/2 (relative error u^2/3 < 3.3e-4); above, lg2.approx is off by at most 2^-22 (PTX ISA), 7e-6 of the exponential.
constexpr float kGumbelError = 4e-4f + 24.0f * 0x1p-11f;

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float approximate_gumbel(uint32_t bits) {
    const float u = uniform(bits);
    const float series = __fmaf_rn(u, 0.5f * u, u);
    const float exponential = u < 0.03125f ? series : -approximate_log(1.0f - u);
    return -approximate_log(exponential);
}

// One request's noise at one step.
struct NoiseStream {
    uint32_t key0, key1, row, step, offset;

    __device__ __forceinline__ uint4 bits(uint32_t id_over_4) const { return philox4x32_10(make_uint4(id_over_4, row, step, offset), key0, key1); }

    // Of four ids, as fp16.
    __device__ __forceinline__ uint2 approximate(uint32_t id_over_4) const {
        const uint4 b = bits(id_over_4);
        return make_uint2(pack_halves(approximate_gumbel(b.x), approximate_gumbel(b.y)), pack_halves(approximate_gumbel(b.z), approximate_gumbel(b.w)));
    }

    __device__ __forceinline__ float exact(uint32_t id) const {
        const uint4 b = bits(id / 4);
        return gumbel(id % 4 == 0 ? b.x : id % 4 == 1 ? b.y : id % 4 == 2 ? b.z : b.w);
    }
};

// T > 0 samples; below 1e-5 it counts as 1e-5. Zero, negative and NaN are greedy and come out as 0.
__device__ __forceinline__ float effective_temperature(float temperature) {
    return temperature > 0.0f ? fmaxf(temperature, 1e-5f) : 0.0f;
}

// By how much the score value * (1 / T) + approximate noise may miss value / T + noise in fp32: the noise's error, and a few
// roundings of a sum below |score| + 24, the reciprocal's included.
__device__ __forceinline__ float score_error(float score) { return kGumbelError + 1e-6f * (fabsf(score) + 24.0f); }

}  // namespace tpw

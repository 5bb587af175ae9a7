// Counter-based Gumbel noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with
// the counter words of DESIGN's stream: (id / 4, row, step, offset). A draw depends on nothing else, so not on the shard.
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

// -log(-log1p(-u)) with u = (float(bits) + 0.5) * 2^-32. Each logarithm is the fp32 nearest to the true value, as in
// noise.gumbel on the host, so that a draw is the same bits on every machine.
__device__ __forceinline__ float gumbel(uint32_t bits) {
    const float uniform = __fmul_rn(__fadd_rn(__uint2float_rn(bits), 0.5f), 0x1p-32f);
    const float exponential = static_cast<float>(-log1p(-static_cast<double>(uniform)));
    return static_cast<float>(-log(static_cast<double>(exponential)));
}

// One request's noise at one step.
struct NoiseStream {
    uint32_t key0, key1, row, step, offset;

    __device__ __forceinline__ float4 four(uint32_t id_over_4) const {
        const uint4 bits = philox4x32_10(make_uint4(id_over_4, row, step, offset), key0, key1);
        return make_float4(gumbel(bits.x), gumbel(bits.y), gumbel(bits.z), gumbel(bits.w));
    }
};

// T > 0 samples; below 1e-5 it counts as 1e-5. Zero, negative and NaN are greedy and come out as 0.
__device__ __forceinline__ float effective_temperature(float temperature) {
    return temperature > 0.0f ? fmaxf(temperature, 1e-5f) : 0.0f;
}

}  // namespace tpw

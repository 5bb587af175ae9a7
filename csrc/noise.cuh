// Counter-based Gumbel noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the
// counter words (id / 4, row, step, offset). A draw depends on nothing else, so not on shard, plan or neighbours.
#pragma once

#include "types.cuh"

namespace tpw {

// Of the counter of one draw, with that round's keys.
__device__ __forceinline__ uint4 philox_round(const uint4& counter, uint32_t key0, uint32_t key1) {
    const uint32_t low0 = counter.x * 0xd2511f53u, high0 = __umulhi(counter.x, 0xd2511f53u);
    const uint32_t low1 = counter.z * 0xcd9e8d57u, high1 = __umulhi(counter.z, 0xcd9e8d57u);
    return make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
}

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxKey0 = 0x9e3779b9u, kPhiloxKey1 = 0xbb67ae85u;  // what a round adds to the keys

__device__ __forceinline__ float uniform(uint32_t bits) { return __fmul_rn(__fadd_rn(__uint2float_rn(bits), 0.5f), 0x1p-32f); }

// log((1 + s) / (1 - s)) for s = numerator / denominator, |s| <= 0.2: 2 atanh(s), whose series is cut below 2^-55 of it.
__device__ __forceinline__ double log_of_ratio(double numerator, double denominator) {
    double reciprocal;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(reciprocal) : "d"(denominator));
    reciprocal = __fma_rn(reciprocal, __fma_rn(-denominator, reciprocal, 1.0), reciprocal);
    reciprocal = __fma_rn(reciprocal, __fma_rn(-denominator, reciprocal, 1.0), reciprocal);
    const double s = __dmul_rn(numerator, reciprocal), z = __dmul_rn(s, s), z2 = __dmul_rn(z, z), z4 = __dmul_rn(z2, z2), z8 = __dmul_rn(z4, z4);
    const double c0 = __fma_rn(z, 1.0 / 3, 1.0), c2 = __fma_rn(z, 1.0 / 7, 1.0 / 5), c4 = __fma_rn(z, 1.0 / 11, 1.0 / 9);
    const double c6 = __fma_rn(z, 1.0 / 15, 1.0 / 13), c8 = __fma_rn(z2, 1.0 / 21, __fma_rn(z, 1.0 / 19, 1.0 / 17));
    const double sum = __fma_rn(z8, c8, __fma_rn(z4, __fma_rn(z2, c6, c4), __fma_rn(z2, c2, c0)));
    return __dmul_rn(__dadd_rn(s, s), sum);
}

// log(x) of a normal, positive x: x = m 2^e with m in [2/3, 4/3), so that nothing cancels near 1.
__device__ __forceinline__ double log_of(double x) {
    const int high = __double2hiint(x);
    const int exponent = (high - 0x3fe55555) >> 20;  // 0x3fe55555 begins 2/3
    const double m = __hiloint2double(high - (exponent << 20), __double2loint(x));
    return __fma_rn(exponent, 0.69314718055994530942, log_of_ratio(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0)));
}

// The fp32 nearest to the true value, where y is within 2^-44 of it; NaN where that leaves two of them.
__device__ __forceinline__ float decided(double y) {
    const double slack = __dmul_rn(fabs(y), 0x1p-44);
    const float low = __double2float_rn(__dadd_rn(y, -slack)), high = __double2float_rn(__dadd_rn(y, slack));
    return low == high ? low : __int_as_float(0x7fffffff);
}

// -log(-log1p(-uniform)), each logarithm the fp32 nearest to the true value, as noise.gumbel on the host: the definition. The
// logarithms above take a third of the time of the library's, which are called only where theirs leave two nearest values.
__device__ __forceinline__ float slow_gumbel(float u) {
    const float exponential = static_cast<float>(-log1p(-static_cast<double>(u)));
    return static_cast<float>(-log(static_cast<double>(exponential)));
}

__device__ __forceinline__ float gumbel(uint32_t bits) {
    const float u = uniform(bits);
    const double wide = u;
    // -log1p(-u) = log(1 / (1 - u)); from 1/4 on 1 - u is exact.
    const float exponential = decided(u < 0.25f ? log_of_ratio(wide, __dadd_rn(2.0, -wide)) : -log_of(__dadd_rn(1.0, -wide)));
    const float noise = decided(-log_of(exponential));
    return exponential == exponential && noise == noise && u < 1.0f ? noise : slow_gumbel(u);
}

// Neither logarithm below is ever of a denormal, and without .ftz each costs four more instructions.
__device__ __forceinline__ float approximate_log2(float x) {
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(x));
    return log2;
}

// The same within kGumbelError, at a tenth of the cost: enough to tell which ids can have drawn the largest score. In binary
// logarithms: with x = -log2(1 - u), -log(-log1p(-u)) = -log(2) (log2(x) + log2(log(2))).
// Below 1/16 x is u times the quadratic that is nearest to x / u: a relative error of 2.2e-6, and 0.2e-6 of roundings. Above,
// lg2.approx is off by at most 2^-22 (PTX ISA), 2.6e-6 of x, and 1 - u by 5e-7. The second logarithm turns relative errors into
// absolute ones and adds 2^-22 of a noise below 24: 5.7e-6, and its rounding 1.4e-6.
constexpr float kGumbelError = 1.4e-5f;

constexpr float kGumbelScale = -0.6931471806f, kGumbelShift = 0.3665129206f;

// log2(x): the noise is kGumbelShift + kGumbelScale times this.
__device__ __forceinline__ float gumbel_logarithm(uint32_t bits) {
    const float u = __fmaf_rn(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f);  // uniform(bits): scaling by a power of two is exact
    const float series = __fmul_rn(u, __fmaf_rn(u, __fmaf_rn(u, 0.516780853f, 0.720490515f), 1.442698f));
    const float x = u < 0.0625f ? series : approximate_log2(1.0f - u);  // or -x: the sign costs nothing below
    return approximate_log2(fabsf(x));
}

__device__ __forceinline__ float4 gumbel_logarithms(const uint4& bits) {
    return make_float4(gumbel_logarithm(bits.x), gumbel_logarithm(bits.y), gumbel_logarithm(bits.z), gumbel_logarithm(bits.w));
}

__device__ __forceinline__ float approximate_gumbel(uint32_t bits) { return __fmaf_rn(gumbel_logarithm(bits), kGumbelScale, kGumbelShift); }

__device__ __forceinline__ float4 approximate_gumbels(const uint4& bits) {
    return make_float4(approximate_gumbel(bits.x), approximate_gumbel(bits.y), approximate_gumbel(bits.z), approximate_gumbel(bits.w));
}

// value * (1 / T) + noise, of a gumbel_logarithm. In this order no instruction has two constants, of which one would have to be
// brought into a register first.
__device__ __forceinline__ float score_of_logarithm(float value, float inverse_temperature, float logarithm) {
    return __fmaf_rn(logarithm, kGumbelScale, __fmaf_rn(value, inverse_temperature, kGumbelShift));
}

// One request's noise at one step.
struct NoiseStream {
    uint32_t key0, key1, row, step, offset;

    __device__ __forceinline__ uint4 counter(uint32_t id_over_4) const { return make_uint4(id_over_4, row, step, offset); }

    __device__ __forceinline__ uint4 bits(uint32_t id_over_4) const {
        uint4 state = counter(id_over_4);
#pragma unroll
        for (uint32_t round = 0; round < kPhiloxRounds; ++round) state = philox_round(state, key0 + round * kPhiloxKey0, key1 + round * kPhiloxKey1);
        return state;
    }

    // Of four ids.
    __device__ __forceinline__ float4 approximate(uint32_t id_over_4) const { return approximate_gumbels(bits(id_over_4)); }

    __device__ __forceinline__ float exact(uint32_t id) const {
        const uint4 b = bits(id / 4);
        return gumbel(id % 4 == 0 ? b.x : id % 4 == 1 ? b.y : id % 4 == 2 ? b.z : b.w);
    }
};

// The gumbel_logarithms of four ids, of each of several requests. A draw is ten rounds of a multiplication and an
// addition each, one after the other, so they are drawn side by side. `alike`: their keys are those of `shared`, one in the whole warp:
// then the keys of the rounds cost no instructions of the lanes.
template <int kCount>
__device__ __forceinline__ void draw_side_by_side(const NoiseStream (&streams)[kCount], bool alike, const NoiseStream& shared,
                                                  const uint32_t (&ids_over_4)[kCount], float4 (&logarithms)[kCount]) {
    uint4 state[kCount];
    if (alike) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) state[i] = make_uint4(ids_over_4[i], streams[i].row, shared.step, streams[i].offset);
#pragma unroll
        for (uint32_t round = 0; round < kPhiloxRounds; ++round)
#pragma unroll
            for (int i = 0; i < kCount; ++i) state[i] = philox_round(state[i], shared.key0 + round * kPhiloxKey0, shared.key1 + round * kPhiloxKey1);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {  // rarely, so in few registers and few instructions
            uint4 one = streams[i].counter(ids_over_4[i]);
            uint32_t key0 = streams[i].key0, key1 = streams[i].key1;
#pragma unroll 1
            for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxKey0, key1 += kPhiloxKey1) one = philox_round(one, key0, key1);
            state[i] = one;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) logarithms[i] = gumbel_logarithms(state[i]);
}

// T > 0 samples; below 1e-5 it counts as 1e-5. Zero, negative and NaN are greedy and come out as 0.
__device__ __forceinline__ float effective_temperature(float temperature) {
    return temperature > 0.0f ? fmaxf(temperature, 1e-5f) : 0.0f;
}

// By how much the score value * (1 / T) + approximate noise may miss value / T + noise in fp32: the noise's error, and roundings.
// value / T is at most |score| + 24 and is rounded three times (quotient, reciprocal, product), the score twice: in all five times
// 2^-24, 3e-7. What is added to that is for the arithmetic with this error itself, a rounding of the score.
__device__ __forceinline__ float score_error(float score) { return kGumbelError + 4e-7f * (fabsf(score) + 24.0f); }

}  // namespace tpw

// B of tp_walk/certify.py: for each previous token the largest of its dots with all rows of W2, by the MMAs of the walk.
//
// A dot depends on its row of A and its column of B alone, so that here, where the 8 columns of an MMA are 8 tokens, it comes out
// to the same bits as in the walk and the chase. V squared times r multiply-adds, once for a head. A CTA takes kTokens tokens,
// whose B fragments stay in shared memory, and its warps share out the tiles of W2.
#include "dot.cuh"

namespace tpw {

constexpr int kBoundsWarps = 8;
constexpr int kGroups = TPW_TOKENS / kColumns;  // of 8 tokens

}  // namespace tpw

// fragments: W2 in fragment order, `tiles` of them; rows past the last repeat it. w1: [tokens, r]. bounds: [tokens].
extern "C" __global__ void __launch_bounds__(tpw::kBoundsWarps * 32) certify_bounds(const uint4* fragments, const uint4* w1, float* bounds, int tiles, int tokens) {
    using namespace tpw;
    extern __shared__ __align__(16) unsigned char u[];  // [group] columns of B fragments
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int first_token = blockIdx.x * TPW_TOKENS;
    for (int i = warp; i < TPW_TOKENS; i += kBoundsWarps) {
        URow row;
        row.load(w1 + static_cast<int64_t>(min(first_token + i, tokens - 1)) * (TPW_RANK / 8), nullptr, lane);
        row.store(u + i / kColumns * kUBytes, nullptr, i % kColumns, lane);
    }
    __syncthreads();

    float largest[kGroups][2];       // of this lane's two columns
    uint32_t magnitude[kGroups][2];  // bits, NaN above infinity
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int which = 0; which < 2; ++which) largest[group][which] = -__int_as_float(0x7f800000), magnitude[group][which] = 0;
    for (int tile = warp; tile < tiles; tile += kBoundsWarps) {
        Fragment a[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) a[k] = load_weights(fragments + (static_cast<int64_t>(tile) * kSteps + k) * kWarpSize + lane);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            Dot::Accumulator acc[4] = {};
            const unsigned char* b = b_fragments(u + group * kUBytes, lane, kColumns);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) Dot::mma(acc, a[k], *reinterpret_cast<const uint2*>(b + 32 * k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                largest[group][i & 1] = fmaxf(largest[group][i & 1], acc[i]);
                magnitude[group][i & 1] = max(magnitude[group][i & 1], __float_as_uint(acc[i]) & 0x7fffffffu);
            }
        }
    }

    // Over the lanes that hold the same columns, then over the warps.
    __shared__ float warp_largest[kBoundsWarps][TPW_TOKENS];
    __shared__ uint32_t warp_magnitude[kBoundsWarps][TPW_TOKENS];
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int distance = 4; distance < kWarpSize; distance *= 2) {
                largest[group][which] = fmaxf(largest[group][which], __shfl_xor_sync(kFullWarp, largest[group][which], distance));
                magnitude[group][which] = max(magnitude[group][which], __shfl_xor_sync(kFullWarp, magnitude[group][which], distance));
            }
            if (lane < 4) {
                warp_largest[warp][group * kColumns + 2 * lane + which] = largest[group][which];
                warp_magnitude[warp][group * kColumns + 2 * lane + which] = magnitude[group][which];
            }
        }
    __syncthreads();
    const int token = threadIdx.x;
    if (token >= TPW_TOKENS || first_token + token >= tokens) return;
    float bound = warp_largest[0][token];
    uint32_t most = warp_magnitude[0][token];
    for (int other = 1; other < kBoundsWarps; ++other) {
        bound = fmaxf(bound, warp_largest[other][token]);
        most = max(most, warp_magnitude[other][token]);
    }
    // Where a dot may overflow on its way to a score, nothing is certified.
    bounds[first_token + token] = most < __float_as_uint(0x1p80f) ? bound : __int_as_float(0x7f800000);
}

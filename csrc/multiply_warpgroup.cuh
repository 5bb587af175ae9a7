// A pass of greedy requests with two groups of columns: other than in multiply.cuh tiles are multiplied by wgmma, a warpgroup's four
// warps together.
//
// Slot i of a warpgroup are the i-th tiles of its four warps. By mma.sync the dot products and what follows them took turns: of an SM
// quarter's two warps, which go through a pass in step, both multiplied or neither. wgmma goes on by itself while the round before
// is finished.
//
// Sampled requests have mma.sync: what follows takes most of a pass there, and the registers that draws need. By wgmma 64 took 200 µs
// instead of 196 on two GPUs. So have kernels that stream tiles: 64 took 233 µs instead of 196 at V = 248,320.
#pragma once

#include "lane_requests.cuh"
#include "wgmma.cuh"

namespace tpw {

constexpr int kWarpgroupWarps = 4;

// A warp's tiles, by rounds (see Round).
constexpr int kSlots = (kTilesPerCta + kMultiplyWarps - 1) / kMultiplyWarps > kRegTiles ? (kTilesPerCta + kMultiplyWarps - 1) / kMultiplyWarps : kRegTiles;
constexpr int kRounds = (kSlots + 1) / 2;

// Of named_barrier, in even passes; the next number is that of odd ones. A barrier counts threads and doesn't know whose they are: with
// a single one the first warpgroup, a pass ahead, could arrive in place of a late warp of the second, which then waits for ever.
constexpr int kSecondWarpgroupBarrier = 4;

// ---- W2 in shared memory ---------------------------------------------------------------------------------------------

// Of a tile: 8 rows, then the other 8, each as core matrices one k after the other. So the rows of four tiles side by side, as a
// warpgroup's are, have one stride.
constexpr int kHalfTileBytes = kTileBytes / 2;

// This warp's tiles that stay in shared memory. Register i of a fragment holds, over the lanes, just one core matrix.
__device__ __forceinline__ void load_core_matrices(const WalkParams& p, const Smem& s, const Cta& cta, bool wanted) {
    constexpr int kAhead = 8;  // fragments in flight; 16 are no faster
    static_assert(kSteps % kAhead == 0);
    const Fragment* source = p.w2_fragments + (static_cast<int64_t>(cta.index) * kTilesPerCta + kRegTiles * kMultiplyWarps) * (kSteps * kWarpSize) + cta.lane;
#pragma unroll 1
    for (int tile = cta.warp; tile < kSmemTiles && wanted; tile += kMultiplyWarps) {
        unsigned char* to = s.weights + tile * kTileBytes + cta.lane * 4;
#pragma unroll 1
        for (int first = 0; first < kSteps; first += kAhead) {
            Fragment a[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) a[i] = load_weights(source + (tile * kSteps + first + i) * kWarpSize);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const uint32_t words[4] = {a[i].x, a[i].y, a[i].z, a[i].w};  // rows and other rows of one k, then of the next
#pragma unroll
                for (int word = 0; word < 4; ++word)
                    *reinterpret_cast<uint32_t*>(to + word % 2 * kHalfTileBytes + (2 * (first + i) + word / 2) * kMatrixBytes) = words[word];
            }
        }
    }
    fence_async_proxy();
    __syncwarp();
    if (cta.lane == 0) mbarrier_arrive(&s.control->weights_arrived);
}

// ---- dot products ----------------------------------------------------------------------------------------------------

// u of a pass.
__device__ __forceinline__ uint64_t u_matrices(const Smem& s, const Pass& pass) {
    return matrix_descriptor(shared_address(s.u + pass.buffer() * kColumnGroups * kUBytes), kUMatrixBytes, kUBytes);
}

// k step `k` of slot `slot` of the warpgroup, on its way. Of one that not all of its warps have, the others multiply what lies there.
template <int kGroups>
__device__ __forceinline__ void start_product(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int slot, int k, uint64_t u,
                                              Dot::Accumulator (&acc)[kGroups][4]) {
    u += k * (2 * kUMatrixBytes / 16);
    if (slot < kRegTiles) {
        Dot::wgmma(acc, weights[slot < kRegTiles ? slot : 0][k], u, k > 0);
    } else {
        const int tile = (slot - kRegTiles) * kMultiplyWarps + cta.warp / kWarpgroupWarps * kWarpgroupWarps, first = tile < kSmemTiles ? tile : 0;
        const uint64_t tiles = matrix_descriptor(shared_address(s.weights + first * kTileBytes), kMatrixBytes, kHalfTileBytes);
        Dot::wgmma(acc, tiles + k * (2 * kMatrixBytes / 16), u, k > 0);
    }
}

// Both slots of a round, a constant, by turns: a product of 16 columns takes longer than the tensor cores do for it, and the next one of
// the same sums waits for it.
template <int kGroups>
__device__ __forceinline__ void start_round(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int round, uint64_t u,
                                            Dot::Accumulator (&acc)[2][kGroups][4]) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        start_product(s, cta, weights, 2 * round, k, u, acc[0]);
        if (2 * round + 1 < kSlots) start_product(s, cta, weights, 2 * round + 1, k, u, acc[1]);
    }
    wgmma_commit();
}

// ---- a pass ----------------------------------------------------------------------------------------------------------

// All warps have a tile in this slot.
__device__ constexpr bool is_whole(int slot) { return slot < kRegTiles || (slot + 1) * kMultiplyWarps <= kTilesPerCta; }

// This warp has. An empty shard's CTA has none at all, which makes this a branch always: in one piece of straight code the assembler
// waits for the next round's dot products before it goes on with this one's.
__device__ __forceinline__ bool has_tile(const Cta& cta, int slot) {
    return cta.rows > 0 && (is_whole(slot) || slot * kMultiplyWarps + cta.warp < kTilesPerCta);
}

template <int kGroups>
__device__ __forceinline__ void add_round(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int round, LaneRequests<kColumnGroups>& mine,
                                          Dot::Accumulator (&acc)[2][kGroups][4]) {
    const int both[2] = {2 * round, 2 * round + 1}, one[1] = {2 * round};
    if (both[1] < kSlots && has_tile(cta, both[1]))
        mine.add_tiles<2>(p, s, cta, pass, both, acc);
    else if (!is_whole(both[1]) && has_tile(cta, one[0]))
        mine.add_tiles<1>(p, s, cta, pass, one, acc);
}

// All tiles of the warp.
template <int kGroups>
__device__ __forceinline__ void multiply_by_warpgroups(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                       const Fragment (&weights)[kRegTiles][kSteps], LaneRequests<kColumnGroups>& mine) {
    static_assert(kMultiplyWarps == 2 * kWarpgroupWarps, "two warpgroups");
    static_assert(kGroups == 2 && !kReadsAgain, "all tiles are resident");
    const uint64_t u = u_matrices(s, pass);
    Dot::Accumulator acc[2][2][kGroups][4];
    __syncwarp();
    // The second warpgroup begins behind the first: in step they would want the tensor cores at the same time, and then neither.
    const bool is_second = cta.warp >= kWarpgroupWarps;
    const int barrier = kSecondWarpgroupBarrier + pass.buffer();
    if (is_second) named_barrier(barrier, kMultiplyWarps * kWarpSize);
    start_round(s, cta, weights, 0, u, acc[0]);
    if (!is_second) named_barrier_arrive(barrier, kMultiplyWarps * kWarpSize);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (round + 1 < kRounds) {
            start_round(s, cta, weights, round + 1, u, acc[(round + 1) % 2]);
            wgmma_wait<1>(acc[round % 2]);
        } else {
            wgmma_wait<0>(acc[round % 2]);
        }
        add_round(p, s, cta, pass, round, mine, acc[round % 2]);
    }
}

}  // namespace tpw

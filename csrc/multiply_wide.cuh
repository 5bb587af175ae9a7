// The multiply warps' part of a pass of 32 requests: as multiply.cuh, but by wgmma, a warpgroup's four warps together.
//
// Slot i of a warpgroup are the i-th tiles of its four warps. Slots 2j and 2j + 1, whose rows lie together (Round), are multiplied
// one behind the other, each by a group of wgmma of its own: what follows the first one's dot products goes on beside the second
// one's. The warpgroups begin with slots of different kinds: register tiles leave the loads of shared memory idle that bound shared
// ones, and while one warpgroup finishes its sums the other one keeps the tensor cores busy.
//
// Base logits are read where they lie, 8 bytes a lane and request, on their way during the dot products.
//
// For 49 to 64 greedy requests, two passes a step. At V = 75,968 on one H200, γ = 7, a block of 64 takes 92.7 µs instead of 98.2 by
// four passes of 16; of 48, two of these take 89.9 µs, and three of 16 are reckoned to take 77. What bounds it are the service warps, not the
// dot products: a later build without any took 91 µs of 111.
#pragma once

#include "candidate.cuh"
#include "wgmma.cuh"

namespace tpw {

constexpr int kGroupWarps = 4;  // of a warpgroup
constexpr int kSlots = (kTilesPerCta + kMultiplyWarps - 1) / kMultiplyWarps > kRegTiles ? (kTilesPerCta + kMultiplyWarps - 1) / kMultiplyWarps : kRegTiles;
static_assert(kMultiplyWarps == 2 * kGroupWarps, "two warpgroups");
static_assert(kTilesPerCta <= kRegTiles * kMultiplyWarps + kSmemTiles, "no tile is streamed");
static_assert(sizeof(BaseLogit) == 2 && kRounding != kNone, "a lane's four base logits are 8 bytes");
static_assert(Dot::kLaneRequests == 2 && kColumnGroups == 4);

// ---- W2 in shared memory ---------------------------------------------------------------------------------------------

// Of a tile: 8 rows, then the other 8, each as core matrices one k after the other. So the rows of four tiles side by side, as a
// warpgroup's are, have one stride.
constexpr int kHalfTileBytes = kTileBytes / 2;

// This warp's tiles that stay in shared memory. Register i of a fragment holds, over the lanes, just one core matrix.
__device__ __forceinline__ void load_core_matrices(const WalkParams& p, const Smem& s, const Cta& cta, bool wanted) {
    constexpr int kAhead = 8;  // fragments in flight
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
    fence_before_wgmma();
    __syncwarp();
    if (cta.lane == 0) mbarrier_arrive(&s.control->weights_arrived);
}

// ---- from dot products to the best row -------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_base(const uint2* address) {
    uint2 f;  // volatile: ahead of the dot products, as it is written
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(f.x), "=r"(f.y) : "l"(address));
    return f;
}

// Base logits of the lane's requests, of the four ids in a row that hold its rows of a pair of tiles, or of one.
struct BaseQuads {
    uint2 of[kColumnGroups][Dot::kLaneRequests];

    __device__ __forceinline__ BaseQuads(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int row) {
        const int first = row & ~3;
        const uint4* places = reinterpret_cast<const uint4*>(s.base) + pass.buffer() * (kRequests / 2) + (cta.lane & 3);  // of two requests each
        const auto place = [&](int group, int which) {
            const uint4 both = places[group * (Dot::kRequests / 2)];
            return reinterpret_cast<const BaseLogit*>(which ? static_cast<uint64_t>(both.w) << 32 | both.z : static_cast<uint64_t>(both.y) << 32 | both.x) + first;
        };
        if (p.base_aligned && cta.rows % 4 == 0) {  // as in any engine
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
                for (int which = 0; which < Dot::kLaneRequests; ++which) {
                    of[group][which] = make_uint2(0, 0);
                    if (first < cta.rows) of[group][which] = load_base(reinterpret_cast<const uint2*>(place(group, which)));
                }
        } else {
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
                for (int which = 0; which < Dot::kLaneRequests; ++which) {
                    const BaseLogit* at = place(group, which);
                    uint64_t all = 0;
#pragma unroll 1
                    for (int i = 3; i >= 0; --i) all = all << 16 | (first + i < cta.rows ? at[i] : 0);
                    of[group][which] = make_uint2(static_cast<uint32_t>(all), static_cast<uint32_t>(all >> 32));
                }
        }
    }
};

// What a lane knows of the requests that its accumulators belong to.
struct LaneRequests {
    Best best[kColumnGroups][Dot::kLaneRequests];

    __device__ __forceinline__ LaneRequests(const WalkParams&, const Smem&, const Cta&, const Pass&) {}

    // A tile's two rows of the lane. upper: they have the latter two of the four base logits.
    __device__ __forceinline__ void add(const Cta& cta, int row, bool upper, const Dot::Accumulator (&acc)[kColumnGroups][4], const BaseQuads& base) {
        const RowPair rows(row, cta);
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                float bias[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) bias[half] = Dot::bias(acc[group], half, which, 1.0f, 1.0f);
                const uint2& quad = base.of[group][which];
                Best& added = best[group][which];
                added.add_pair(add_packed_base<kRounding>(upper ? quad.y : quad.x, bias), rows);
                asm volatile("" : "+r"(added.packed));  // not behind the next wait
            }
    }
};

// ---- dot products ----------------------------------------------------------------------------------------------------

template <int kSlot>
__device__ __forceinline__ void dot_products(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], uint64_t u,
                                             Dot::Accumulator (&acc)[kColumnGroups][4]) {
    constexpr uint64_t kStep = 2 * kUMatrixBytes / 16;
    if constexpr (kSlot < kRegTiles) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) wgmma(acc, weights[kSlot][k], u + k * kStep, k > 0);
    } else {
        const int first = (kSlot - kRegTiles) * kMultiplyWarps + cta.warp / kGroupWarps * kGroupWarps;
        const uint64_t tiles = matrix_descriptor(shared_address(s.weights + first * kTileBytes), kMatrixBytes, kHalfTileBytes);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) wgmma(acc, tiles + k * (2 * kMatrixBytes / 16), u + k * kStep, k > 0);
    }
    wgmma_commit();
}

// One slot of this warpgroup, or two.
template <int kSlot, int kCount>
__device__ __forceinline__ void multiply_slots(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                               uint64_t u, LaneRequests& mine) {
    // Of a slot that not all of the warps have, the others multiply what lies there.
    // An empty shard's CTA has no tile at all, which makes this a branch always: in one piece of straight code the assembler waits
    // for the second slot before it goes on with the first one.
    const auto exists = [&](int slot) { return cta.rows > 0 && slot * kMultiplyWarps + cta.warp < kTilesPerCta; };
    const int row = tile_row(cta, kSlot);
    const BaseQuads base(p, s, cta, pass, row);
    Dot::Accumulator acc[kCount][kColumnGroups][4];
    __syncwarp();
    wgmma_fence();
    dot_products<kSlot>(s, cta, weights, u, acc[0]);
    if constexpr (kCount > 1) dot_products<kSlot + 1>(s, cta, weights, u, acc[1]);
    wgmma_wait<kCount - 1>(acc[0]);
    if (exists(kSlot)) mine.add(cta, row, (kSlot + 2) * kMultiplyWarps > kTilesPerCta && row & 2, acc[0], base);
    if constexpr (kCount > 1) {
        wgmma_wait<0>(acc[1]);
        if (exists(kSlot + 1)) mine.add(cta, row + 2, true, acc[1], base);
    }
}

// Slot kSlot, if this warpgroup has it, and its partner. Ends with all of its wgmma waited for: across a branch the assembler would
// wait for each by itself.
template <int kSlot>
__device__ __forceinline__ void multiply_turn(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                              uint64_t u, LaneRequests& mine) {
    if constexpr (kSlot < kSlots) {
        const int first_warp = cta.warp / kGroupWarps * kGroupWarps;
        if (kSlot > 0 && kSlot * kMultiplyWarps + first_warp >= kTilesPerCta) return;
        if constexpr (kSlot + 1 < kSlots)
            if ((kSlot + 1) * kMultiplyWarps + first_warp < kTilesPerCta) return multiply_slots<kSlot, 2>(p, s, cta, pass, weights, u, mine);
        if constexpr ((kSlot + 2) * kMultiplyWarps > kTilesPerCta) multiply_slots<kSlot, 1>(p, s, cta, pass, weights, u, mine);
    }
}

// All tiles of this warp; leaves its lanes' best rows in shared memory. `mine` is of this pass, and new. u has been waited for.
template <typename Ready>
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                         LaneRequests& mine, const Ready&) {
    const uint64_t u = matrix_descriptor(shared_address(s.u + pass.buffer() * kColumnGroups * kUBytes), kUMatrixBytes, kUBytes);
    constexpr int kTurns = (kSlots + 1) / 2;
    static_assert(kTurns <= 4);
    int turn = kTurns > 1 ? cta.warp / kGroupWarps : 0;
#pragma unroll 1
    for (int i = 0; i < kTurns; ++i) {
        if (turn == 0)
            multiply_turn<0>(p, s, cta, pass, weights, u, mine);
        else if (turn == 1)
            multiply_turn<2>(p, s, cta, pass, weights, u, mine);
        else if (turn == 2)
            multiply_turn<4>(p, s, cta, pass, weights, u, mine);
        else
            multiply_turn<6>(p, s, cta, pass, weights, u, mine);
        if (++turn == kTurns) turn = 0;
    }
    Best* out = s.best + pass.buffer() * kRequests * kBestStride + cta.warp * kWarpEntries + (cta.lane >> 2);
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which)
            out[(group * Dot::kRequests + Dot::lane_request(cta.lane, which)) * kBestStride] = mine.best[group][which];
}

}  // namespace tpw

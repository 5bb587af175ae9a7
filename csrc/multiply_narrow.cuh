// The multiply warps' part of a pass of one request in int8: other than in multiply.cuh, tiles share MMA columns and lanes.
#pragma once

#include "lane_requests.cuh"

namespace tpw {

// One request in int8, all tiles of the warp but streamed ones at once. The request's two planes of u would take two columns of an
// MMA's eight, and all that follows the dot products one lane of four. So of four pairs of tiles each has two columns: the others
// are zero in its B, and the four add to the same accumulators, of which a lane ends up with those of one pair. Four times fewer
// of both, accumulators and what is done with them. Sums of integers may take two chains each, which hide the MMAs' latencies.
// All but u is there before ready() has waited for it, and is loaded as far as registers go. False if ready() is.
template <int kShared, typename Ready>
__device__ __forceinline__ bool multiply_narrow(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                                LaneRequests<1>& mine, const Ready& ready) {
    constexpr int kSlots = kRegTiles + kShared, kPairs = kSlots / 2, kTurns = (kPairs + 3) / 4;
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + cta.warp * kTileBytes) + cta.lane;
    struct Operands {
        uint2 u;
        Fragment a[kShared + 1];
    };
    const auto load_u = [&](Operands& into, int k) { into.u = *reinterpret_cast<const uint2*>(mine.u[0] + 32 * k); };
    const auto load_weights = [&](Operands& into, int k) {
#pragma unroll
        for (int i = 0; i < kShared; ++i) into.a[i] = shared[(i * kMultiplyWarps * kSteps + k) * kWarpSize];
    };
    Operands ahead;
    load_weights(ahead, 0);
    const int member = cta.lane & 3;
    AllLaneRows<kTurns, kSlots % 2> rows;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int left = kPairs - 4 * turn;
        rows.pairs[turn].slot = 2 * (4 * turn + min(member, left - 1));
        rows.pairs[turn].counts = left >= 4 || member < left;
    }
    if constexpr (kSlots % 2) rows.alone.slot = kSlots - 1, rows.alone.counts = member == 0;
    rows.load(p, s, cta, mine.base[0]);
    if (!ready()) return false;
    load_u(ahead, 0);
    mine.load_u_scales(s, cta, pass);
    Dot::Accumulator acc[kTurns + 1][2][2][4] = {}, alone[4] = {};  // [turn][tile of the pair][chain]
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const Operands now = ahead;
        if (k + 1 < kSteps) {
            load_u(ahead, k + 1);
            load_weights(ahead, k + 1);
        }
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const Fragment& a = slot < kRegTiles ? weights[slot < kRegTiles ? slot : 0][k] : now.a[slot < kRegTiles ? 0 : slot - kRegTiles];
            const int pair = slot / 2;
            if (pair == kPairs) {
                Dot::mma(alone, a, now.u);
            } else {
                const bool own = cta.lane >> 3 == pair % 4;
                Dot::mma(acc[pair / 4][slot % 2][pair % 2], a, make_uint2(own ? now.u.x : 0, own ? now.u.y : 0));
            }
        }
        __syncwarp();  // as in dot_products() of multiply.cuh
    }
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");
        Dot::Accumulator sums[2 * kTurns + 1][4];
        const Dot::Accumulator* of_rows[2 * kTurns + kSlots % 2];
#pragma unroll
        for (int i = 0; i < 2 * kTurns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = acc[i / 2][i % 2][0][j] + acc[i / 2][i % 2][1][j];
            of_rows[i] = sums[i];
        }
        if constexpr (kSlots % 2) of_rows[2 * kTurns] = alone;
        rows.load_noise(s, cta);  // sooner it would take the registers of what the MMAs need next
        mine.add_all<kTurns, kSlots % 2>(p, s, cta, pass, 0, of_rows, rows);
    }
    return true;
}

}  // namespace tpw

// The dot products of a pass, and what a CTA keeps of them: each request's best rows.
#pragma once

#include "cta.cuh"

namespace tpw {

// Of the CTA: the lower (half 0) or upper (half 1) row of a tile that a lane holds accumulators of.
__device__ __forceinline__ int lane_row(const Cta& cta, int tile, int half) { return tile * kTileRows + (cta.lane >> 2) + 8 * half; }

// Where this lane finds the base logits of its accumulators' requests, and how it scores them.
struct LaneRequests {
    BaseLogit* base[kColumnGroups][Dot::kLaneRequests];  // of the CTA's first row
    Best best[kColumnGroups][Dot::kLaneRequests];

    __device__ __forceinline__ LaneRequests(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass) {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                base[group][which] = staged_base(p, s, cta, pass, group * Dot::kRequests + Dot::lane_request(cta.lane, which));
    }

    // The rows of some tiles. Values are rounded in pairs: two requests of a row, or where a lane has but
    // one, its two rows. All base logits are loaded first, and nothing branches: the tiles' chains of latencies overlap.
    template <int kTiles>
    __device__ __forceinline__ void add_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const int (&tiles)[kTiles], const bool (&exists)[kTiles],
                                              const Dot::Accumulator (&acc)[kTiles][kColumnGroups][4]) {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) {
            float inverse_temperature[Dot::kLaneRequests], u_scale[Dot::kLaneRequests];
            const float* noise[Dot::kLaneRequests];
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
                u_scale[which] = TPW_INT8 ? s.control->u_scale[request] : 1.0f;
                if constexpr (kSampled) {
                    inverse_temperature[which] = request < pass.requests ? s.rows[pass.first_row + request].inverse_temperature : 0.0f;
                    noise[which] = s.noise + request * staged_rows(p);
                }
            }
            float base_value[kTiles][2][Dot::kLaneRequests];
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int which = 0; which < Dot::kLaneRequests; ++which)
                        base_value[i][half][which] = base_to_float(base[group][which][lane_row(cta, tiles[i], half)]);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int pair = 0; pair < Dot::kLaneRequests; ++pair) {
                    float values[2], bases[2];
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        const int half = Dot::kLaneRequests == 2 ? pair : v, which = Dot::kLaneRequests == 2 ? v : 0;
                        const int row = lane_row(cta, tiles[i], half);
                        values[v] = Dot::bias(acc[i][group], half, which, u_scale[which], TPW_INT8 ? s.row_scales[row] : 1.0f);
                        bases[v] = base_value[i][half][which];
                    }
                    add_base<kRounding>(bases, values);
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        const int half = Dot::kLaneRequests == 2 ? pair : v, which = Dot::kLaneRequests == 2 ? v : 0;
                        const int row = lane_row(cta, tiles[i], half);
                        if constexpr (kKeepsLogits)
                            if (exists[i]) *reinterpret_cast<Logit*>(base[group][which] + row) = to_logit(values[v]);
                        float score = values[v];
                        if constexpr (kSampled)
                            score = inverse_temperature[which] > 0.0f ? __fmaf_rn(score, inverse_temperature[which], noise[which][row]) : score;
                        best[group][which].add(score, row, exists[i] && row < cta.rows);
                    }
                }
            }
        }
    }
};

// kReg register tiles from kFirst on and kShared tiles of shared memory from the warp's `shared_slot`th on, side by side: their
// independent accumulators hide the latency of a row's dependent MMAs.
template <int kFirst, int kReg, int kShared>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegFragments],
                                               int shared_slot, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kColumnGroups][4] = {};
    int tiles[kTiles];
    bool exists[kTiles];
    const Fragment* tail = reinterpret_cast<const Fragment*>(s.tails + cta.warp * kTailBytes) + cta.lane;
    const Fragment* shared[kShared + 1];
#pragma unroll
    for (int i = 0; i < kReg; ++i) tiles[i] = (kFirst + i) * kWarps + cta.warp, exists[i] = true;
#pragma unroll
    for (int i = 0; i < kShared; ++i) {
        // A warp that has one tile less than others takes some tile again instead, and what comes of it is left out: all warps
        // run the same instructions, which two warps of an SM's quarter then fetch once.
        const int slot = (shared_slot + i) * kWarps + cta.warp;
        exists[kReg + i] = slot < p.smem_tiles;
        tiles[kReg + i] = exists[kReg + i] ? kRegTiles * kWarps + slot : 0;
        shared[i] = reinterpret_cast<const Fragment*>(s.weights + (exists[kReg + i] ? slot : 0) * kTileBytes) + cta.lane;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint2 u[kColumnGroups];
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) u[group] = *reinterpret_cast<const uint2*>(b[group] + 32 * k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const int held = (kFirst + i) * kSteps + k;
            const Fragment a = i >= kReg               ? shared[i < kReg ? 0 : i - kReg][k * kWarpSize]
                               : held < kRegFragments ? weights[held < kRegFragments ? held : 0]
                                                      : tail[(held - kRegFragments) * kWarpSize];
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group) Dot::mma(acc[i][group], a, u[group]);
        }
    }
    // A branch, so that the dot products end before it: in one piece of straight code the assembler finishes one tile after the
    // other to save registers, and each MMA waits 35 cycles for the one before it (3,700 cycles a pass instead of 2,700).
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
        mine.add_tiles<kTiles>(p, s, cta, pass, tiles, exists, acc);
    }
}

// A tile that is read again each step, from L2 or HBM.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int tile,
                                                  const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kAhead = 8;  // fragments in flight
    const Fragment* source = p.w2_fragments + (static_cast<int64_t>(cta.index) * p.tiles_per_cta + tile) * (kSteps * kWarpSize) + cta.lane;
    Dot::Accumulator acc[1][kColumnGroups][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
        Fragment a[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) a[i] = load_weights(source + (first + i) * kWarpSize);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
                Dot::mma(acc[0][group], a[i], *reinterpret_cast<const uint2*>(b[group] + 32 * (first + i)));
    }
    const int tiles[1] = {tile};
    const bool exists[1] = {true};
    mine.add_tiles<1>(p, s, cta, pass, tiles, exists, acc);
}

// All tiles of this warp; leaves its lanes' best rows in shared memory.
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegFragments]) {
    LaneRequests mine(p, s, cta, pass);
    const unsigned char* b[kColumnGroups];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
        b[group] = b_fragments(s.u + group * kUBytes, cta.lane, (pass.requests - group * Dot::kRequests) * (kColumns / Dot::kRequests));

    // With two column groups a tile has twice the accumulators already, and the registers are few.
    constexpr int kBeside = kColumnGroups == 1 ? 2 : 0;
    constexpr int kAtOnce = kColumnGroups == 1 ? 4 : 2;
    const int shared_slots = (p.smem_tiles + kWarps - 1) / kWarps;  // the same for all warps
    int done = 0;
    if (kBeside > 0 && shared_slots > 0) {
        multiply_tiles<0, (kRegTiles < 3 ? kRegTiles : 3), kBeside>(p, s, cta, pass, weights, 0, b, mine);
        done = kBeside;
    } else {
        multiply_tiles<0, (kRegTiles < 3 ? kRegTiles : 3), 0>(p, s, cta, pass, weights, 0, b, mine);
    }
    if constexpr (kRegTiles > 3) {
        if (kBeside > 0 && shared_slots > done) {
            multiply_tiles<3, kRegTiles - 3, kBeside>(p, s, cta, pass, weights, done, b, mine);
            done += kBeside;
        } else {
            multiply_tiles<3, kRegTiles - 3, 0>(p, s, cta, pass, weights, 0, b, mine);
        }
    }
#pragma unroll 1
    for (; done < shared_slots; done += kAtOnce) multiply_tiles<0, 0, kAtOnce>(p, s, cta, pass, weights, done, b, mine);
    for (int tile = kRegTiles * kWarps + p.smem_tiles + cta.warp; tile < p.tiles_per_cta; tile += kWarps)
        multiply_streamed(p, s, cta, pass, tile, b, mine);

#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
            s.best[request * kBestStride + cta.warp * 8 + (cta.lane >> 2)] = mine.best[group][which];
        }
}

// ---- the best of the CTA ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t row_key(const WalkParams& p, const Cta& cta, int32_t value, uint32_t row) {
    return make_key(value, p.shard_start + cta.first_row + row);
}

#if TPW_SAMPLED

// value / T + noise as it is defined, of one id.
__device__ __forceinline__ uint64_t exact_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, uint32_t row) {
    const RowState& state = s.rows[pass.first_row + request];
    const Logit logit = *reinterpret_cast<const Logit*>(staged_base(p, s, cta, pass, request) + row);
    const float noise = noise_stream(state, pass.step).exact(p.shard_start + cta.first_row + row);
    return row_key(p, cta, ordered(__fadd_rn(__fdiv_rn(TPW_ROUNDING == 2 ? logit : bf16_to_float(logit), state.temperature), noise)), row);
}

// By one warp. Scores so far are approximate; who may be the largest is scored exactly. As a rule that is one id.
__device__ __forceinline__ uint64_t cta_best_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request) {
    const Best* entries = s.best + request * kBestStride;
    const bool greedy = s.rows[pass.first_row + request].temperature == 0.0f;
    int32_t best = kNothing;
#pragma unroll
    for (int entry = cta.lane; entry < kBestEntries; entry += kWarpSize) best = max(best, entries[entry].value);
    best = __reduce_max_sync(kFullWarp, best);
    const float largest = from_ordered(best);
    const float threshold = largest - 2.0f * score_error(largest);  // NaN where anything may be largest
    const auto excluded = [&](int32_t value) { return value == kNothing || from_ordered(value) < threshold; };
    uint64_t key = 0;
    for (int entry = cta.lane; entry < kBestEntries; entry += kWarpSize) {
        const Best& mine = entries[entry];
        if (greedy) {
            key = max(key, row_key(p, cta, mine.value, mine.row));
        } else if (!excluded(mine.value)) {
            if (excluded(mine.second)) {
                key = max(key, exact_key(p, s, cta, pass, request, mine.row));
            } else {
                for (int tile = entry / 8; tile < p.tiles_per_cta; tile += kWarps)
                    for (int row = tile * kTileRows + entry % 8; row < min(cta.rows, (tile + 1) * kTileRows); row += 8)
                        key = max(key, exact_key(p, s, cta, pass, request, row));
            }
        }
    }
    return warp_max_key(key);
}

#else

// By one warp.
__device__ __forceinline__ uint64_t cta_best_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass&, int request) {
    const Best* entries = s.best + request * kBestStride;
#if TPW_ROUNDING == 2
    uint64_t key = 0;
#pragma unroll
    for (int entry = 0; entry < kBestEntries; entry += kWarpSize)
        key = max(key, row_key(p, cta, entries[entry + cta.lane].value, entries[entry + cta.lane].row));
    return warp_max_key(key);
#else
    Best best;
#pragma unroll
    for (int entry = 0; entry < kBestEntries; entry += kWarpSize) best.packed = max(best.packed, entries[entry + cta.lane].packed);
    best.packed = __reduce_max_sync(kFullWarp, best.packed);
    return row_key(p, cta, best.value(), best.row());
#endif
}

#endif

}  // namespace tpw

// The dot products of a pass, and what a CTA keeps of them: each request's best rows.
#pragma once

#include "cta.cuh"

namespace tpw {

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

    // The rows of one tile. Values are rounded in pairs: two requests of a row, or where a lane has but one, its two rows.
    __device__ __forceinline__ void add_tile(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int tile,
                                             const Dot::Accumulator (&acc)[kColumnGroups][4]) {
        if (tile >= p.tiles_per_cta) return;
        const int first_row = tile * kTileRows + (cta.lane >> 2);
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) {
#pragma unroll
            for (int pair = 0; pair < Dot::kLaneRequests; ++pair) {
                float base_value[2], value[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int half = Dot::kLaneRequests == 2 ? pair : i, which = Dot::kLaneRequests == 2 ? i : 0;
                    const int row = first_row + 8 * half;
                    base_value[i] = base_to_float(base[group][which][row]);
                    const float u_scale = TPW_INT8 ? s.control->u_scale[group * Dot::kRequests + Dot::lane_request(cta.lane, which)] : 1.0f;
                    value[i] = Dot::bias(acc[group], half, which, u_scale, TPW_INT8 ? s.row_scales[row] : 1.0f);
                }
                add_base<kRounding>(base_value, value);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int half = Dot::kLaneRequests == 2 ? pair : i, which = Dot::kLaneRequests == 2 ? i : 0;
                    const int row = first_row + 8 * half;
                    if constexpr (kKeepsLogits) *reinterpret_cast<Logit*>(base[group][which] + row) = to_logit(value[i]);
                    float score = value[i];
                    if constexpr (kSampled) {
                        const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
                        const float inverse_temperature = request < pass.requests ? s.rows[pass.first_row + request].inverse_temperature : 0.0f;
                        if (inverse_temperature > 0.0f)
                            score = __fmaf_rn(score, inverse_temperature, s.noise[request * p.tiles_per_cta * kTileRows + row]);
                    }
                    best[group][which].add(row < cta.rows ? ordered(score) : kNothing, row);
                }
            }
        }
    }
};

// kReg register tiles (from kFirst on) and kShared tiles of shared memory, side by side: independent accumulators hide the
// latency of a row's dependent MMAs. `shared_slot` is the warp's first such tile, as its how-manieth of all.
template <int kFirst, int kReg, int kShared>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegFragments],
                                               int shared_slot, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kColumnGroups][4] = {};
    const Fragment* tail = reinterpret_cast<const Fragment*>(s.tails + cta.warp * kTailBytes) + cta.lane;
    const Fragment* shared[kShared + 1];
#pragma unroll
    for (int i = 0; i < kShared; ++i)
        shared[i] = reinterpret_cast<const Fragment*>(s.weights + ((shared_slot + i) * kWarps + cta.warp) * kTileBytes) + cta.lane;
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
    // Keeps the loads of base logits behind the dot products: ahead of them, they cost the registers that W2 lives in.
    asm volatile("" ::: "memory");
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int slot = i < kReg ? kFirst + i : kRegTiles + shared_slot + i - kReg;
        mine.add_tile(p, s, cta, pass, slot * kWarps + cta.warp, acc[i]);
    }
}

// A tile that is read again each step, from L2 or HBM.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int tile,
                                                  const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kAhead = 8;  // fragments in flight
    const Fragment* source = p.w2_fragments + (static_cast<int64_t>(cta.index) * p.tiles_per_cta + tile) * (kSteps * kWarpSize) + cta.lane;
    Dot::Accumulator acc[kColumnGroups][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
        Fragment a[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) a[i] = load_weights(source + (first + i) * kWarpSize);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
                Dot::mma(acc[group], a[i], *reinterpret_cast<const uint2*>(b[group] + 32 * (first + i)));
    }
    mine.add_tile(p, s, cta, pass, tile, acc);
}

// Register tiles [kFirst, kFirst + kReg), with up to two of the warp's tiles in shared memory beside them, from the `done`th on.
template <int kFirst, int kReg>
__device__ __forceinline__ void multiply_register_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegFragments], const unsigned char* const (&b)[kColumnGroups],
                                                        int shared_tiles, int& done, LaneRequests& mine) {
    // With two column groups a tile has twice the accumulators already, and the registers are few.
    const int beside = kColumnGroups == 1 ? min(shared_tiles - done, 2) : 0;
    if (beside == 2)
        multiply_tiles<kFirst, kReg, kColumnGroups == 1 ? 2 : 0>(p, s, cta, pass, weights, done, b, mine);
    else if (beside == 1)
        multiply_tiles<kFirst, kReg, kColumnGroups == 1 ? 1 : 0>(p, s, cta, pass, weights, done, b, mine);
    else
        multiply_tiles<kFirst, kReg, 0>(p, s, cta, pass, weights, done, b, mine);
    done += max(beside, 0);
}

// All tiles of this warp; leaves its lanes' best rows in shared memory.
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegFragments]) {
    LaneRequests mine(p, s, cta, pass);
    const unsigned char* b[kColumnGroups];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
        b[group] = b_fragments(s.u + group * kUBytes, cta.lane, (pass.requests - group * Dot::kRequests) * (kColumns / Dot::kRequests));

    const int shared_tiles = (p.smem_tiles - cta.warp + kWarps - 1) / kWarps;
    constexpr int kHalf = kRegTiles > 3 ? (kRegTiles + 1) / 2 : kRegTiles;
    int done = 0;
    multiply_register_tiles<0, kHalf>(p, s, cta, pass, weights, b, shared_tiles, done, mine);
    if constexpr (kHalf < kRegTiles) multiply_register_tiles<kHalf, kRegTiles - kHalf>(p, s, cta, pass, weights, b, shared_tiles, done, mine);
    for (; done + 1 < shared_tiles; done += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, done, b, mine);
    if (done < shared_tiles) multiply_tiles<0, 0, 1>(p, s, cta, pass, weights, done, b, mine);
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
    uint64_t key = 0;
#pragma unroll
    for (int entry = 0; entry < kBestEntries; entry += kWarpSize)
        key = max(key, row_key(p, cta, entries[entry + cta.lane].value, entries[entry + cta.lane].row));
    return warp_max_key(key);
}

#endif

}  // namespace tpw

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

    // The rows of the tiles of multiply_tiles. Values are rounded in pairs: two requests of a row, or where a lane has but
    // one, its two rows. All base logits are loaded first, and nothing branches: the tiles' chains of latencies overlap.
    template <int kFirst, int kReg, int kShared>
    __device__ __forceinline__ void add_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int shared_slot,
                                              const Dot::Accumulator (&acc)[kReg + kShared][kColumnGroups][4]) {
        constexpr int kTiles = kReg + kShared;
        const auto row_of = [&](int i, int half) {
            const int slot = i < kReg ? kFirst + i : kRegTiles + shared_slot + i - kReg;
            return lane_row(cta, slot * kMultiplyWarps + cta.warp, half);
        };
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) {
            float inverse_temperature[Dot::kLaneRequests], u_scale[Dot::kLaneRequests];
            const uint16_t* noise[Dot::kLaneRequests];
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
                u_scale[which] = TPW_INT8 ? s.control->u_scale[pass.buffer()][request] : 1.0f;
                if constexpr (kSampled) {
                    inverse_temperature[which] = request < pass.requests ? s.rows[pass.first_row + request].inverse_temperature : -1.0f;
                    noise[which] = reinterpret_cast<const uint16_t*>(s.noise) + (pass.buffer() * kRequests + request) * staged_rows(p);
                }
            }
            float base_value[kTiles][2][Dot::kLaneRequests];
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int which = 0; which < Dot::kLaneRequests; ++which)
                        base_value[i][half][which] = base_to_float(base[group][which][row_of(i, half)]);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int pair = 0; pair < Dot::kLaneRequests; ++pair) {
                    float values[2], bases[2];
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        const int half = Dot::kLaneRequests == 2 ? pair : v, which = Dot::kLaneRequests == 2 ? v : 0;
                        const int row = row_of(i, half);
                        values[v] = Dot::bias(acc[i][group], half, which, u_scale[which], TPW_INT8 ? s.row_scales[row] : 1.0f);
                        bases[v] = base_value[i][half][which];
                    }
                    add_base<kRounding>(bases, values);
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        const int half = Dot::kLaneRequests == 2 ? pair : v, which = Dot::kLaneRequests == 2 ? v : 0;
                        const int row = row_of(i, half);
                        if constexpr (kKeepsLogits) *reinterpret_cast<Logit*>(base[group][which] + row) = to_logit(values[v]);
                        float score = values[v];
                        if constexpr (kSampled)
                            score = inverse_temperature[which] >= 0.0f ? __fmaf_rn(score, inverse_temperature[which], half_to_float(noise[which][row])) : score;
                        best[group][which].add(score, row, row < cta.rows);
                    }
                }
            }
        }
    }
};

// kReg register tiles from kFirst on and kShared tiles of shared memory from the warp's `shared_slot`th on, side by side: their
// independent accumulators hide the latency of a row's dependent MMAs.
template <int kFirst, int kReg, int kShared>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                               int shared_slot, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kColumnGroups][4] = {};
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + (shared_slot * kMultiplyWarps + cta.warp) * kTileBytes) + cta.lane;
    // What k step `k` needs from shared memory.
    struct Operands {
        uint2 u[kColumnGroups];
        Fragment a[kTiles];
    };
    const auto load = [&](int k) {
        Operands now;
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) now.u[group] = *reinterpret_cast<const uint2*>(b[group] + 32 * k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
            now.a[i] = i < kReg ? weights[i < kReg ? kFirst + i : 0][k] : shared[((i - kReg) * kMultiplyWarps * kSteps + k) * kWarpSize];
        return now;
    };
    Operands next = load(0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const Operands now = next;
        if (k + 1 < kSteps) next = load(k + 1);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group) Dot::mma(acc[i][group], now.a[i], now.u[group]);
        // Loads don't move across this, so the steps stay in order. In one piece of straight code the assembler loads all of u
        // first and then finishes one tile after the other, to save registers: each MMA waits 35 cycles for the one before it.
        __syncwarp();
    }
    // A branch ends the dot products before what follows them.
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
        mine.add_tiles<kFirst, kReg, kShared>(p, s, cta, pass, shared_slot, acc);
    }
}

// Register tiles, with up to kBeside of the warp's tiles in shared memory at their side, from the `slot`th on.
template <int kFirst, int kReg, int kBeside>
__device__ __forceinline__ void multiply_register_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegTiles][kSteps], const unsigned char* const (&b)[kColumnGroups],
                                                        int shared_slots, int& slot, LaneRequests& mine) {
    if constexpr (kBeside > 0) {
        if (shared_slots - slot < kBeside)
            return multiply_register_tiles<kFirst, kReg, kBeside - 1>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    }
    multiply_tiles<kFirst, kReg, kBeside>(p, s, cta, pass, weights, slot, b, mine);
    slot += kBeside;
}

// A tile that is read again each step, from L2 or HBM.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int shared_slot,
                                                  const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kAhead = 8;  // fragments in flight
    const Fragment* source = p.w2_fragments +
                             (static_cast<int64_t>(cta.index) * p.tiles_per_cta + (kRegTiles + shared_slot) * kMultiplyWarps + cta.warp) * (kSteps * kWarpSize) + cta.lane;
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
    mine.add_tiles<0, 0, 1>(p, s, cta, pass, shared_slot, acc);
}

// All tiles of this warp; leaves its lanes' best rows in shared memory.
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps]) {
    LaneRequests mine(p, s, cta, pass);
    const unsigned char* b[kColumnGroups];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
        b[group] = b_fragments(s.u + (pass.buffer() * kColumnGroups + group) * kUBytes, cta.lane, (pass.requests - group * Dot::kRequests) * (kColumns / Dot::kRequests));

    const int shared_slots = (p.smem_tiles - cta.warp + kMultiplyWarps - 1) / kMultiplyWarps;
    // Only one group of columns leaves the registers for tiles of both kinds at once. Having one of an SM quarter's two warps
    // begin with the register tiles and the other with the shared ones cost 0.5 µs a step: too few MMAs side by side.
    constexpr int kBeside = kColumnGroups == 1 ? 3 : 0;
    constexpr int kHalf = kRegTiles > 2 ? (kRegTiles + 1) / 2 : kRegTiles;
    int slot = 0;
    multiply_register_tiles<0, kHalf, kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    if constexpr (kHalf < kRegTiles) multiply_register_tiles<kHalf, kRegTiles - kHalf, kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
#pragma unroll 1
    for (; slot + 1 < shared_slots; slot += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, slot, b, mine);
    if (slot < shared_slots) multiply_tiles<0, 0, 1>(p, s, cta, pass, weights, slot, b, mine);
    // Tiles beyond those in shared memory go on in the same order; which warp streams one follows from its number alone.
    for (int tile = kRegTiles * kMultiplyWarps + p.smem_tiles; tile < p.tiles_per_cta; ++tile)
        if (tile % kMultiplyWarps == cta.warp) multiply_streamed(p, s, cta, pass, tile / kMultiplyWarps - kRegTiles, b, mine);

    Best* out = s.best + pass.buffer() * kRequests * kBestStride;
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
#if TPW_SAMPLED || TPW_ROUNDING == 2
            mine.best[group][which].reduce();
            if (cta.lane < 4) out[request * kBestStride + cta.warp] = mine.best[group][which];
#else
            out[request * kBestStride + cta.warp * 8 + (cta.lane >> 2)] = mine.best[group][which];
#endif
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

// By one warp, of several requests at once: kBestEntries lanes a request, each with one multiply warp's best. Scores so far are
// approximate; whose may be the largest is scored exactly. As a rule that is one id of the CTA, or two. Returns a request's
// best key on all of its lanes.
__device__ __forceinline__ uint64_t cta_best_keys(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, bool active) {
    static_assert((kBestEntries & (kBestEntries - 1)) == 0 && kWarpRequests * kBestEntries <= kWarpSize, "a lane an entry");
    Best mine;
    if (active) mine = s.best[(pass.buffer() * kRequests + request) * kBestStride + cta.lane % kBestEntries];
    int32_t best = mine.value;
#pragma unroll
    for (int distance = 1; distance < kBestEntries; distance *= 2) best = max(best, __shfl_xor_sync(kFullWarp, best, distance));
    const float largest = from_ordered(best);
    const float threshold = largest - 2.0f * score_error(largest);  // NaN where anything may be largest
    const auto excluded = [&](int32_t value) { return value == kNothing || from_ordered(value) < threshold; };
    uint64_t key = 0;
    bool crowded = false;  // another row of the same warp came near
    if (active) {
        if (s.rows[pass.first_row + request].temperature == 0.0f) {
            key = row_key(p, cta, mine.value, mine.row);
        } else if (!excluded(mine.value)) {
            crowded = !excluded(mine.second);
            if (!crowded) key = exact_key(p, s, cta, pass, request, mine.row);
        }
    }
    // All rows of that warp are scored again, by the lanes together.
    for (uint32_t left = __ballot_sync(kFullWarp, crowded); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const int their_request = __shfl_sync(kFullWarp, request, owner);
        uint64_t their_key = 0;
        for (int tile = owner % kBestEntries + kMultiplyWarps * (cta.lane / kTileRows); tile < p.tiles_per_cta; tile += 2 * kMultiplyWarps) {
            const int row = tile * kTileRows + cta.lane % kTileRows;
            if (row < cta.rows) their_key = max(their_key, exact_key(p, s, cta, pass, their_request, row));
        }
        their_key = warp_max_key(their_key);
        if (cta.lane == owner) key = their_key;
    }
#pragma unroll
    for (int distance = 1; distance < kBestEntries; distance *= 2) key = max(key, __shfl_xor_sync(kFullWarp, key, distance));
    return key;
}

#else

// By one warp.
__device__ __forceinline__ uint64_t cta_best_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request) {
    const Best* entries = s.best + (pass.buffer() * kRequests + request) * kBestStride;
    Best best;
#if TPW_ROUNDING == 2
    if (cta.lane < kBestEntries) best = entries[cta.lane];
    return warp_max_key(row_key(p, cta, best.value, best.row));
#else
#pragma unroll
    for (int entry = 0; entry < kBestEntries; entry += kWarpSize) best.packed = max(best.packed, entries[entry + cta.lane].packed);
    best.packed = __reduce_max_sync(kFullWarp, best.packed);
    return row_key(p, cta, best.value(), best.row());
#endif
}

#endif

}  // namespace tpw

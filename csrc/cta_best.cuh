// The best of the CTA: from the rows that multiply warps leave of each request (multiply.cuh) to the one word that the CTA tells
// others. By a service warp, of all its requests at once: kLanes lanes a request, on all of which its word comes out.
#pragma once

#include "candidate.cuh"

namespace tpw {

__device__ __forceinline__ uint32_t row_id(const WalkParams& p, const Cta& cta, uint32_t row) { return p.shard_start + cta.first_row + row; }

// The best of those of a request's entries that fall to this lane.
template <int kLanes>
__device__ __forceinline__ Best lane_entries(const Smem& s, const Cta& cta, const Pass& pass, int request, bool active) {
    const Best* entries = s.best + (pass.buffer() * kRequests + request) * kBestStride;
    Best best;
    if (active)
#pragma unroll
        for (int first = 0; first < kBestEntries; first += kLanes)
            if (first + cta.lane % kLanes < kBestEntries) best.merge(entries[first + cta.lane % kLanes]);
    return best;
}

#if TPW_SAMPLED

__device__ __forceinline__ uint64_t exact_row_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, uint32_t row) {
    const Logit logit = *reinterpret_cast<const Logit*>(staged_base(p, s, cta, pass, request) + row);
    return exact_key(s.rows[pass.first_row + request], pass.step, row_id(p, cta, row), TPW_ROUNDING == 2 ? logit : bf16_to_float(logit));
}

// Scores so far are approximate: all rows whose score may be the largest are scored exactly. `mine` is the best of a lane's entries.
template <int kLanes>
__device__ __forceinline__ uint64_t exact_cta_key(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, const Best& mine,
                                                  float threshold) {
    const auto contests = [&](int32_t value) { return value != kNothing && !(from_ordered(value) < threshold); };
    const bool crowded = contests(mine.second);  // another row behind these entries came near
    uint64_t key = contests(mine.value) && !crowded ? exact_row_key(p, s, cta, pass, request, mine.row) : 0;
    // All rows of the warps that the entries are of, by the lanes together.
    for (uint32_t left = __ballot_sync(kFullWarp, crowded); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const int their_request = __shfl_sync(kFullWarp, request, owner);
        uint64_t their_key = 0;
        const auto add = [&](const Round& rows) {
            const int row = rows.start + cta.lane;
            if (cta.lane < (rows.paired ? 2 : 1) * kTileRows && row < cta.rows) their_key = max(their_key, exact_row_key(p, s, cta, pass, their_request, row));
        };
        for (int entry = owner % kLanes; entry < kBestEntries; entry += kLanes) {
            Cta theirs = cta;
            theirs.warp = entry_warp(entry);
#pragma unroll 1
            for (int round = 0; round * kRoundTiles + theirs.warp < kTilesPerCta; ++round) add(Round(theirs, round));
#pragma unroll 1
            for (int item = theirs.warp; item < Singles::kItems; item += kMultiplyWarps) add(Round(Singles(item).of(cta), Singles::kSlot / 2));
        }
        their_key = warp_max_key(their_key);
        if (cta.lane == owner) key = their_key;
    }
    return max_over_lanes(key, kLanes);
}

// The same as a call: few steps need it, and its code would lie between what all do. sampled: of the lane's request.
template <int kLanes>
__device__ __noinline__ uint64_t exact_keys(const WalkParams& p, unsigned char* shared_memory, const Pass pass, int request, bool sampled, float threshold) {
    const Smem s(shared_memory);
    const Cta cta = Cta::of_service(p);
    return exact_cta_key<kLanes>(p, s, cta, pass, request, lane_entries<kLanes>(s, cta, pass, request, sampled), threshold);
}

// Keys if !kCandidates, else candidates.
__device__ __forceinline__ uint64_t cta_best_keys(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, bool active) {
    constexpr int kLanes = kWarpSize / kWarpRequests;
    const Best mine = lane_entries<kLanes>(s, cta, pass, request, active);
    const bool sampled = active && s.rows[pass.first_row + request].temperature > 0.0f;
    const Logit* logits = reinterpret_cast<const Logit*>(staged_base(p, s, cta, pass, request));
    const auto word_of = [&](const Best& one) -> uint64_t {
        if (one.value == kNothing) return 0;
        const uint32_t id = row_id(p, cta, one.row);
        return kCandidates ? make_candidate(one.value, id, static_cast<bf16>(logits[one.row])) : make_key(one.value, id);
    };
    const uint64_t word = word_of(mine);
    uint64_t best = max_over_lanes(word, kLanes);
    const float threshold = contest_threshold(kCandidates ? candidate_score(best) : key_score(best));
    const auto near = [&](int32_t value) { return value != kNothing && !(from_ordered(value) < threshold); };
    const bool contested = sampled && (near(mine.second) || (word != best && near(mine.value)));
    if (!kCandidates || __any_sync(kFullWarp, contested)) {
        const uint64_t exact = exact_keys<kLanes>(p, s.weights, pass, request, sampled, threshold);
        Best winner;
        winner.value = key_value(exact);
        winner.row = key_id(exact) - row_id(p, cta, 0);
        if (sampled && exact != 0) best = word_of(winner);  // 0 where nothing contests: all scores are -inf, the approximate ones too
    }
    return best;
}

#else

__device__ __forceinline__ uint64_t cta_best_keys(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request, bool active) {
    constexpr int kLanes = kWarpSize / kWarpRequests;
    Best best = lane_entries<kLanes>(s, cta, pass, request, active);
#if TPW_ROUNDING == 2
    return max_over_lanes(make_key(best.value, row_id(p, cta, best.row)), kLanes);
#else
    if constexpr (kLanes == kWarpSize) {
        best.packed = __reduce_max_sync(kFullWarp, best.packed);
    } else {
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) best.packed = max(best.packed, __shfl_xor_sync(kFullWarp, best.packed, distance));
    }
    return make_key(best.value(), row_id(p, cta, best.row()));
#endif
}

#endif

}  // namespace tpw

// What CTAs tell each other of a sampled request: its best id with an approximate score, and with the logit that whoever finds
// two scores too near each other scores exactly. So the exact score, two logarithms in fp64, is on the way of a token only when
// it decides: about once in ten thousand steps.
//
// A candidate is 64 bits and the largest wins, as with keys (score.cuh): the upper 28 bits of the score's ordered(), the
// complement of the id, the bf16 logit. What is left of the score is below it by at most 2^-19 of its magnitude.
#pragma once

#include "cta.cuh"

namespace tpw {

constexpr int kCandidateIdBits = 20;
constexpr uint32_t kCandidateIds = (1u << kCandidateIdBits) - 1;

__device__ constexpr uint64_t make_candidate(int32_t ordered_score, uint32_t id, bf16 logit) {
    if (ordered_score == kNothing) return 0;
    const uint32_t score = (static_cast<uint32_t>(ordered_score) ^ 0x80000000u) >> 4;
    return static_cast<uint64_t>(score) << (kCandidateIdBits + 16) | static_cast<uint64_t>(kCandidateIds - id) << 16 | logit;
}

__device__ constexpr uint32_t candidate_id(uint64_t candidate) { return kCandidateIds - (static_cast<uint32_t>(candidate >> 16) & kCandidateIds); }

// Not below -inf, as which what is left of its bits would be a NaN.
__device__ __forceinline__ float candidate_score(uint64_t candidate) {
    constexpr int32_t kLowest = ordered_bits(static_cast<int32_t>(0xff800000u));
    return from_ordered(max(static_cast<int32_t>((static_cast<uint32_t>(candidate >> (kCandidateIdBits + 16)) << 4) ^ 0x80000000u), kLowest));
}

// Whoever scores below this has a smaller exact score than the one who scores `best`. NaN, below which nothing is, where +inf
// or NaN leave no difference to go by; infinity where all scores are -inf, masked: then all exact scores are, too, and the
// smallest id, which is the best already, wins. `best` may be a candidate's score, and so smaller than the real one.
__device__ __forceinline__ float contest_threshold(float best) {
    return best == __int_as_float(0xff800000) ? __int_as_float(0x7f800000) : best - 2.0f * score_error(best);
}

// The same where the others are candidates, too.
__device__ __forceinline__ float candidate_threshold(float best) {
    const float threshold = contest_threshold(best);
    return best == __int_as_float(0xff800000) ? threshold : threshold - 0x1p-17f * fabsf(best);
}

__device__ __forceinline__ bool contests(uint64_t candidate, float threshold) { return candidate != 0 && !(candidate_score(candidate) < threshold); }

// value / T + noise as it is defined, of one id, as a key. A call, once for all its uses: inlined, it lay between the instructions
// of every step, which in a cold L2 are fetched from DRAM, a jump over each of its copies taking one more read.
__device__ __noinline__ uint64_t exact_key(const RowState& row, int step, uint32_t id, float logit) {
    const float noise = noise_stream(row, step).exact(id);
    return make_key(ordered(__fadd_rn(__fdiv_rn(logit, row.temperature), noise)), id);
}

__device__ __forceinline__ uint64_t max_over_lanes(uint64_t value, int lanes) {
    if (lanes == kWarpSize) return warp_max_key(value);
    for (int distance = 1; distance < lanes; distance *= 2) value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
    return value;
}

// Picks the winner among the words of kLanes lanes that speak of the same row, on all of them.
template <int kLanes>
struct Settle {
    const RowState& row;
    int step;

    // Of each lane the `first` and `second` largest, all `words` of which `load` gives again.
    template <typename Load>
    __device__ __forceinline__ uint64_t operator()(uint64_t first, uint64_t second, int words, const Load& load) const {
        const uint64_t best = max_over_lanes(first, kLanes);
        if constexpr (kCandidates) {
            const float threshold = candidate_threshold(candidate_score(best));
            const bool sampled = row.temperature > 0.0f;
            const bool contested = sampled && ((first != best && contests(first, threshold)) || contests(second, threshold));
            if (__any_sync(kFullWarp, contested)) {
                uint64_t exact = 0, winner = 0;
                for (int i = 0; sampled && i < words; ++i) {
                    const uint64_t candidate = load(i);
                    if (!contests(candidate, threshold)) continue;
                    const uint64_t key = exact_key(row, step, candidate_id(candidate), bf16_to_float(static_cast<bf16>(candidate)));
                    if (key > exact) exact = key, winner = candidate;
                }
                const uint64_t largest = max_over_lanes(exact, kLanes);
                winner = max_over_lanes(exact == largest ? winner : 0, kLanes);
                if (winner != 0) return winner;  // 0: a greedy row, or all of this one is masked; another row of the warp is contested
            }
        }
        return best;
    }
};

}  // namespace tpw

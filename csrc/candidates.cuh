// The candidates of each request's step: chosen by every rank from its own columns, pushed to all ranks.
//
// A *unit* is a warp's share of one request's step on one rank: TPW_CHUNKS * 32 chunks of 16 ids, dealt to the units in turn, as
// likely tokens are neighbours. Each unit keeps its own best, up to TPW_LIST ids, with no word to any other: any set of ids is
// sound, as long as the largest score of those left out is told (tp_walk/certify.py). Which of them is best nobody needs to know.
//
// A unit's TPW_LIST candidates, and after them the largest score that was left out, are sent in words of mailbox.cuh, as many to
// a word as have room beside the block's number: links and the gathering CTA have that much less to do. Every word of a unit is
// written in every block, so that nothing is ever reset, and each carries its block, so that none needs another's ordering. Two
// block parities take turns, for the reason that mailbox.cuh gives for headers: a rank enters block n + 2 once every peer's
// launch n is complete.
#pragma once

#include "certify_params.cuh"
#include "cta.cuh"
#include "watch.cuh"

namespace tpw {

constexpr int kList = TPW_LIST;
constexpr int kWordCandidates = TPW_BASE_FP32 ? 1 : TPW_SAMPLED ? 2 : 3;
constexpr int kUnitWords = TPW_UNIT_WORDS;
constexpr int kSlots = kUnitWords * kWordCandidates;
static_assert(kSlots > kList && kSlots - kWordCandidates <= kList, "a list, and what was left out");
constexpr int kChunkIds = 16;
constexpr int kChunks = TPW_CHUNKS;  // of a lane
static_assert(kChunks * kWarpSize * kChunkIds <= 1 << 16, "a place in a unit has 16 bits");
static_assert(kList == kWarpSize, "a lane a candidate");

// Of a step of the block. pair = step * batch + row.
__device__ __forceinline__ u32 list_offset(const CertifyParams& p, u64 block, int pair, int source, int unit) {
    const u32 words = u32(block & 1) * p.list_words + ((pair * TPW_WORLD_SIZE + source) * p.units + unit) * kUnitWords;
    return words * TPW_WORD_BYTES;
}

__device__ __forceinline__ bool is_of_block(const Word& word, u64 block) { return u32(word.tag >> 32) == u32(block); }

// ---- scores and their limit: the device half of tp_walk/certify.py, which proves them ----------------------------------

constexpr int32_t kTop = 0x7fffffff;  // ordered(NaN)
constexpr float kLargestScore = 0x1p100f;
constexpr float kSlack = 0x1p-20f, kSlackMagnitude = 32.0f;

// The most that rounding can make of a value.
__device__ __forceinline__ float swell(float value) {
    return kRounding == kNone ? value : __fmul_rn(value, value < 0.0f ? 1.0f - 0x1p-8f : 1.0f + 0x1p-8f);
}

// One request's: how its values become scores.
struct Scoring {
    float temperature, inverse_temperature;  // effective: 0 is greedy

    __device__ __forceinline__ bool sampled() const { return kSampled && temperature > 0.0f; }

    // What candidates are chosen by, from the base logit and approximate noise.
    __device__ __forceinline__ int32_t selection(float base, float noise) const {
        if (!sampled()) return ordered(base);
        const float value = __fmul_rn(swell(base), inverse_temperature);
        const bool limitless = !(base < kLargestScore) || !(value < kLargestScore) || temperature >= kLargestScore;
        return limitless ? kTop : ordered(__fadd_rn(value, noise));
    }

    // The scores themselves, of an id's dots after two tokens and exact noise.
    __device__ __forceinline__ void scores(float base, float first_dot, float second_dot, float noise, int32_t (&scores)[2]) const {
        const float bases[2] = {base, base};
        float values[2] = {first_dot, second_dot};
        add_base<kRounding>(bases, values);
#pragma unroll
        for (int i = 0; i < 2; ++i) scores[i] = ordered(sampled() ? __fadd_rn(__fdiv_rn(values[i], temperature), noise) : values[i]);
    }

    __device__ __forceinline__ int32_t score(float base, float dot, float noise) const {
        int32_t found[2];
        scores(base, dot, dot, noise, found);
        return found[0];
    }

    // What no score of an id with a selection score of `selection` or less exceeds, after a token whose dots are `bound` at most.
    __device__ __forceinline__ int32_t limit(int32_t selection, float bound) const {
        if (selection == kNothing || selection == kTop) return selection;
        if (!(fabsf(bound) < __int_as_float(0x7f800000))) return kTop;
        const float largest = from_ordered(selection);
        if (!sampled()) return score(largest, bound, 0.0f);
        if (largest == -__int_as_float(0x7f800000)) return ordered(-kLargestScore);
        float bias[2] = {bound, bound};
        if constexpr (kRounding != kOnce) round_to_bf16(bias[0], bias[1]);
        const float share = __fmul_rn(swell(bias[0]), inverse_temperature);
        const float slack = __fadd_rn(__fmul_rn(kSlack, fabsf(largest) + fabsf(share) + kSlackMagnitude), kGumbelError);
        return ordered(__fadd_rn(__fadd_rn(largest, share), slack));
    }
};

// ---- words -------------------------------------------------------------------------------------------------------------
// 32 bits a candidate, {score, place}, to which a sampled one adds 16 of its base logit; or one with all bits of an fp32 logit.
// 16 bits of a score will do. A greedy one is a bf16, and has no more. A sampled one is rounded up, by less than a bf16's unit:
// all that a selection score has to be is large enough.

// place: of the id in its unit.
struct Candidate {
    int32_t score;
    uint32_t place;
    float base;
};

constexpr uint32_t kNoScore = static_cast<uint32_t>(kNothing) >> 16;

__device__ __forceinline__ uint32_t round_score(int32_t score) { return static_cast<uint32_t>(score) >> 16; }

__device__ __forceinline__ int32_t unround_score(uint32_t upper, bool sampled) {
    if (upper == kNoScore) return kNothing;
    const int32_t score = upper << 16 | (sampled || upper >> 15 ? 0xffff : 0);
    return sampled ? score : ordered(from_ordered(score));  // of a NaN, whose lower bits are ones
}

__device__ __forceinline__ Word pack(const Candidate (&candidates)[kWordCandidates], u64 block) {
    uint32_t parts[3] = {};
    if constexpr (kWordCandidates == 1) {
        parts[0] = candidates[0].score, parts[1] = __float_as_uint(candidates[0].base), parts[2] = candidates[0].place;
    } else {
#pragma unroll
        for (int i = 0; i < kWordCandidates; ++i) {
            parts[i] = round_score(candidates[i].score) << 16 | candidates[i].place;
            if (kWordCandidates == 2) parts[2] |= __float_as_uint(candidates[i].base) >> 16 << 16 * i;
        }
    }
    return {static_cast<u64>(parts[1]) << 32 | parts[0], block << 32 | parts[2]};
}

// A received word without its block.
struct Parts {
    uint32_t of[3];

    __device__ __forceinline__ static Parts from(const Word& word) {
        return {{static_cast<uint32_t>(word.key), static_cast<uint32_t>(word.key >> 32), static_cast<uint32_t>(word.tag)}};
    }

    // Candidate i's score as an integer to compare; what lies below kOrderMask is no part of it.
    __device__ __forceinline__ int32_t order(int i) const { return static_cast<int32_t>(of[i]); }
    __device__ __forceinline__ uint32_t place(int i) const { return kWordCandidates == 1 ? of[2] : of[i] & 0xffff; }

    __device__ __forceinline__ float base(int i, bool sampled) const;
};

constexpr uint32_t kOrderMask = kWordCandidates == 1 ? 0 : 0xffff;
constexpr int kOrderShift = kWordCandidates == 1 ? 0 : 16;

__device__ __forceinline__ int32_t score_of(int32_t order, bool sampled) {
    return kWordCandidates == 1 ? order : unround_score(static_cast<uint32_t>(order) >> 16, sampled);
}

__device__ __forceinline__ float Parts::base(int i, bool sampled) const {
    return kWordCandidates == 1 ? __uint_as_float(of[1]) : kWordCandidates == 2 ? __uint_as_float(of[2] >> 16 * i << 16) : from_ordered(score_of(order(i), sampled));
}

__device__ __forceinline__ int column_of(int place, int unit, int units) { return (place / kChunkIds * units + unit) * kChunkIds + place % kChunkIds; }

// ---- choosing ----------------------------------------------------------------------------------------------------------

constexpr int kChoiceBinBits = 6;

// A warp's own, in shared memory.
struct Chosen {
    int32_t bins[1 << kChoiceBinBits];
    int32_t score[kSlots];
    uint16_t place[kSlots];
};

// By a whole warp: bins from the top as long as they hold no more than `most`, with `count` that lie beyond them. Returns the first
// of those bins, and in `count` what is then held in all.
template <int kBits>
__device__ __forceinline__ uint32_t first_bin(const int32_t* bins, int lane, int most, int& count) {
    constexpr int kLaneBins = (1 << kBits) / kWarpSize;
    int own[kLaneBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kLaneBins; ++i) sum += own[i] = bins[lane * kLaneBins + i];
    int held = sum;  // after a scan: by this lane's bins and those above
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int other = __shfl_down_sync(kFullWarp, held, distance);
        if (lane + distance < kWarpSize) held += other;
    }
    int fits = count + held - sum, taken = 0, found = 0;
#pragma unroll
    for (int i = kLaneBins - 1; i >= 0; --i) {
        fits += own[i];
        if (fits <= most) ++taken, found = fits;
    }
    count = max(count, __reduce_max_sync(kFullWarp, found));
    return (1 << kBits) - __reduce_add_sync(kFullWarp, taken);
}

// What shifts the scores of an interval of `width` into so many bins.
template <int kBits>
__device__ __forceinline__ int bin_shift(uint32_t width) {
    return max(32 - __clz(width - 1) - kBits, 0);
}

// Lane's 16 ids of one chunk as selection scores; kNothing where there is no id.
__device__ __forceinline__ void load_chunk(const WalkParams& p, const BaseLogit* base, const Scoring& scoring, const NoiseStream& noise, int column,
                                           int32_t (&scores)[kChunkIds]) {
    constexpr int kPiece = 16 / sizeof(BaseLogit);  // ids of a 16-byte load
    const bool aligned = reinterpret_cast<uint64_t>(base) % 16 == 0;
#pragma unroll
    for (int first = 0; first < kChunkIds; first += kPiece) {
        __align__(16) BaseLogit values[kPiece];
        // A piece that begins inside the row shares its 16 bytes with an id, so an allocation too.
        if (aligned && column + first < p.shard_width) {
            *reinterpret_cast<uint4*>(values) = __ldg(reinterpret_cast<const uint4*>(base + column + first));
        } else {
#pragma unroll
            for (int i = 0; i < kPiece; ++i) values[i] = column + first + i < p.shard_width ? base[column + first + i] : BaseLogit{};
        }
#pragma unroll
        for (int quad = 0; quad < kPiece; quad += 4) {
            float drawn[4] = {};
            if (scoring.sampled()) {
                const uint4 bits = noise.bits((p.shard_start + column + first + quad) / 4);
                drawn[0] = approximate_gumbel(bits.x), drawn[1] = approximate_gumbel(bits.y);
                drawn[2] = approximate_gumbel(bits.z), drawn[3] = approximate_gumbel(bits.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool exists = column + first + quad + i < p.shard_width;
                const int32_t score = exists ? scoring.selection(base_to_float(values[quad + i]), drawn[i]) : kNothing;
                scores[first + quad + i] = kWordCandidates == 2 ? unround_score(round_score(score), scoring.sampled()) : score;
            }
        }
    }
}

// By one warp: chooses a unit's candidates and pushes them to every rank.
__device__ __forceinline__ void choose(const CertifyParams& p, u64 block, const RowState& row, int pair, int batch_row, int step, int unit, int lane,
                                       Chosen& chosen) {
    const WalkParams& walk = p.walk;
    const BaseLogit* base = static_cast<const BaseLogit*>(walk.base_logits) + batch_row * walk.base_stride_row + step * walk.base_stride_step;
    const Scoring scoring{row.temperature, row.inverse_temperature};
    const NoiseStream noise = noise_stream(row, step);
    int32_t scores[kChunks][kChunkIds];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) load_chunk(walk, base, scoring, noise, ((i * kWarpSize + lane) * p.units + unit) * kChunkIds, scores[i]);

    int32_t mine = kNothing;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int j = 0; j < kChunkIds; ++j) mine = max(mine, scores[i][j]);
    const auto count_above = [&](int32_t threshold) {
        int above = 0;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < kChunkIds; ++j) above += scores[i][j] > threshold;
        return __reduce_add_sync(kFullWarp, above);
    };
    // `above` leaves too many, `kept` does not. The least of the lanes' largest is exceeded by some hundred scores of a usual
    // step: they are sorted into bins, and what is left of the search takes a turn or two. It needn't find the best threshold; but one that stops at three quarters of
    // a list leaves out ids that count: on held-out text the candidates of all units then hold the best 600 ids instead of 1,060.
    int32_t above = __reduce_min_sync(kFullWarp, mine), kept = __reduce_max_sync(kFullWarp, mine);
    int count = 0;
    if (count_above(above) <= kList) kept = above, above = kNothing;
    if (above == kNothing) {
        count = count_above(kept);
        const int all = count_above(kNothing);
        if (all <= kList) kept = kNothing, count = all;
    }
    if (above != kNothing) {
        for (int bin = lane; bin < 1 << kChoiceBinBits; bin += kWarpSize) chosen.bins[bin] = 0;
        __syncwarp();
        const int shift = bin_shift<kChoiceBinBits>(static_cast<uint32_t>(kept) - static_cast<uint32_t>(above));
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < kChunkIds; ++j)
                if (scores[i][j] > above) atomicAdd(&chosen.bins[(static_cast<uint32_t>(scores[i][j]) - static_cast<uint32_t>(above) - 1) >> shift], 1);
        __syncwarp();
        const uint32_t first = first_bin<kChoiceBinBits>(chosen.bins, lane, kList, count);
        if (first < 1u << kChoiceBinBits) kept = static_cast<uint32_t>(above) + (first << shift);
        above = static_cast<uint32_t>(above) + ((first - 1) << shift);
    }
    constexpr uint32_t kGap = kWordCandidates == 1 ? 1 : 0xffff;  // between two scores of 16 bits lies no third
    while (kept != kNothing && count < kList - kList / 16 && static_cast<uint32_t>(kept) - static_cast<uint32_t>(above) > kGap) {
        const int32_t middle = static_cast<int32_t>(static_cast<uint32_t>(above) + (static_cast<uint32_t>(kept) - static_cast<uint32_t>(above)) / 2);
        const int found = count_above(middle);
        if (found <= kList)
            kept = middle, count = found;
        else
            above = middle;
    }

    int32_t left_out = kNothing;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int j = 0; j < kChunkIds; ++j) {
            own += scores[i][j] > kept;
            if (scores[i][j] <= kept) left_out = max(left_out, scores[i][j]);
        }
    left_out = __reduce_max_sync(kFullWarp, left_out);
    int slot = own;  // after a scan over the lanes: where the lane's candidates begin
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int before = __shfl_up_sync(kFullWarp, slot, distance);
        if (lane >= distance) slot += before;
    }
    slot -= own;
    __syncwarp();
    for (int at = lane; at < kSlots; at += kWarpSize) chosen.score[at] = at == kList ? left_out : kNothing, chosen.place[at] = 0;
    __syncwarp();
    if (own > 0) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < kChunkIds; ++j)
                if (scores[i][j] > kept) {
                    chosen.score[slot] = scores[i][j];
                    chosen.place[slot] = (i * kWarpSize + lane) * kChunkIds + j;
                    ++slot;
                }
    }
    __syncwarp();
    const u32 at = list_offset(p, block, pair, walk.rank, unit);
    for (int i = lane; i < kUnitWords; i += kWarpSize) {
        Candidate candidates[kWordCandidates];
#pragma unroll
        for (int j = 0; j < kWordCandidates; ++j) {
            const int from = i * kWordCandidates + j;
            candidates[j] = {chosen.score[from], chosen.place[from], 0.0f};
            // What is there in place of an id has no base logit. Of greedy kernels the score is the base logit.
            if (kWordCandidates < 3 && from < kList && candidates[j].score != kNothing)
                candidates[j].base = base_to_float(base[column_of(candidates[j].place, unit, p.units)]);
        }
        const Word word = pack(candidates, block);
#pragma unroll
        for (int destination = 0; destination < TPW_WORLD_SIZE; ++destination)
            store_word<Scope::sys>(p.lists[destination] + at + i * TPW_WORD_BYTES, word.key, word.tag);
    }
}

}  // namespace tpw

// The candidates of each request's step: chosen by every rank from its own columns, pushed to the ranks that have the request: all, or
// where requests are dealt out (certified.shares) one.
//
// A *unit* is a warp's share of one request's step on one rank: TPW_CHUNKS * 32 chunks of 16 ids, dealt to the units in turn, as
// likely tokens are neighbours. Each unit keeps its own best, up to TPW_LIST ids, with no word to any other: any set of ids is
// sound, as long as what was left out is no more than is told (tp_walk/certify.py). Which of them is best nobody needs to know. Nor does a
// list have to be full: a threshold that a good guess gives costs a pass over the scores, the one that fills a list six.
//
// A unit's TPW_LIST candidates, and after them what no score that was left out exceeds, are sent in words of mailbox.cuh, as many to
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
constexpr int kLeastList = kList * 3 / 4;
constexpr int kWordCandidates = TPW_BASE_FP32 ? 1 : TPW_SAMPLED ? 2 : 3;
constexpr int kUnitWords = TPW_UNIT_WORDS;
constexpr int kSlots = kUnitWords * kWordCandidates;
static_assert(kSlots > kList && kSlots - kWordCandidates <= kList, "a list, and what bounds the others");
constexpr int kChunkIds = 16;
constexpr int kChunks = TPW_CHUNKS;  // of a lane
static_assert(kChunks * kWarpSize * kChunkIds <= 1 << 16, "a place in a unit has 16 bits");

// Of a step of the block. pair = step * batch + row.
__device__ __forceinline__ u32 list_offset(const CertifyParams& p, u64 block, int pair, int source, int unit) {
    const u32 words = u32(block & 1) * p.list_words + ((pair * TPW_WORLD_SIZE + source) * p.units + unit) * kUnitWords;
    return words * TPW_WORD_BYTES;
}

// By 32 bits of the block's number: a word would have to be left from exactly 2^32 blocks before, five days of nothing but blocks of
// 100 µs, to be taken for a new one.
__device__ __forceinline__ bool is_of_block(const Word& word, u64 block) { return u32(word.tag >> 32) == u32(block); }

// ---- scores and their limit: the device half of tp_walk/certify.py, which proves them ----------------------------------

constexpr int32_t kTop = 0x7fffffff;  // ordered(NaN)
constexpr float kLargestScore = 0x1p100f;
constexpr float kSlack = 0x1p-20f, kSlackMagnitude = 32.0f;

// The most that rounding can make of a value, as a factor.
__device__ __forceinline__ float swelling(bool is_negative) { return kRounding == kNone ? 1.0f : is_negative ? 1.0f - 0x1p-8f : 1.0f + 0x1p-8f; }

// One request's: how its values become scores.
struct Scoring {
    float temperature, inverse_temperature;  // effective: 0 is greedy

    __device__ __forceinline__ bool sampled() const { return kSampled && temperature > 0.0f; }

    // Of a sampled request: no selection score bounds anything.
    __device__ __forceinline__ bool is_limitless() const { return sampled() && temperature >= kLargestScore; }

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
        const float share = __fmul_rn(__fmul_rn(bias[0], swelling(bias[0] < 0.0f)), inverse_temperature);
        const float slack = __fadd_rn(__fmul_rn(kSlack, fabsf(largest) + fabsf(share) + kSlackMagnitude), kGumbelError);
        return ordered(__fadd_rn(__fadd_rn(largest, share), slack));
    }
};

// What a sampled request's candidates are chosen by, from the base logit and the logarithm of approximate noise. NaN: nothing bounds it.
// Of an id that doesn't exist, whose base logit is -inf, -inf.
struct Selection {
    float positive, negative;  // what base logits are multiplied by
    float largest;             // base logits below it stay below 2^100, swollen and divided by the temperature, too

    __device__ __forceinline__ explicit Selection(const Scoring& scoring) {
        const float inverse = scoring.is_limitless() ? 1.0f : scoring.inverse_temperature;  // 0 would make a NaN of -inf
        positive = __fmul_rn(inverse, swelling(false)), negative = __fmul_rn(inverse, swelling(true));
        largest = fminf(kLargestScore, __fmul_rn(kLargestScore / 2, scoring.temperature));
    }

    __device__ __forceinline__ float operator()(float base, float logarithm) const {
        return base < largest ? score_of_logarithm(base, base < 0.0f ? negative : positive, logarithm) : __int_as_float(0x7fffffff);
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

constexpr int kPiece = 16 / sizeof(BaseLogit);  // ids of a 16-byte load
constexpr int kLaneIds = kChunks * kChunkIds;
constexpr int kPieces = kLaneIds / kPiece;
constexpr int kMasks = kLaneIds / 32;
static_assert(kChunkIds % kPiece == 0 && kLaneIds % 32 == 0);

// A unit's ids in their order are pieces, dealt to the lanes in turn: loads of whole sectors, and neighbours in several lanes. The place in
// the unit of a lane's id `id`.
__device__ __forceinline__ int place_of(int lane, int id) { return (id / kPiece * kWarpSize + lane) * kPiece + id % kPiece; }

// Base logits of fp32 are read again instead: there is no room for twice as many.
constexpr bool kStagesBases = kWordCandidates == 2;

// A warp's own, in shared memory.
struct Chosen {
    // Base logits, or the scores of a sampled request in their place: truncated, where they are bf16. And then the base logits.
    uint4 pieces[kStagesBases ? 2 * kPieces : kPieces][kWarpSize];
    uint16_t place[kList];

    __device__ __forceinline__ BaseLogit& score(uint32_t place) { return reinterpret_cast<BaseLogit*>(pieces)[place]; }
    __device__ __forceinline__ BaseLogit& base(uint32_t place) { return reinterpret_cast<BaseLogit*>(pieces + kPieces)[place]; }
};

// Per half: all ones where x > y; the larger; the smaller, y for a NaN x.
__device__ __forceinline__ uint32_t pair_above(uint32_t x, uint32_t y) {
    uint32_t mask;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
    return mask;
}
__device__ __forceinline__ uint32_t pair_max(uint32_t x, uint32_t y) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
}
__device__ __forceinline__ uint32_t pair_min(uint32_t x, uint32_t y) {
    uint32_t smaller;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(x), "r"(y));
    return smaller;
}

constexpr int32_t kInfinityBits = 0x7f800000, kLowestBits = static_cast<int32_t>(0xff800000u);
constexpr uint32_t kLowestPair = TPW_BASE_FP32 ? 0xff800000u : 0xff80ff80u;  // of a piece's words

#if TPW_BASE_FP32
__device__ __forceinline__ float lowest_base() { return __int_as_float(kLowestBits); }
#else
__device__ __forceinline__ bf16 lowest_base() { return 0xff80; }
#endif

// What a lane chooses from, in registers; a NaN counts as infinity. Thresholds are in the order of ordered().
#if TPW_BASE_FP32

struct Scores {
    float of[kLaneIds];

    __device__ __forceinline__ void take(const uint4& piece, int i) {
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) of[i * 4 + j] = fminf(__uint_as_float(words[j]), __int_as_float(kInfinityBits));
    }

    __device__ __forceinline__ void above(int32_t threshold, uint32_t (&mask)[kMasks]) const {
        const float limit = from_ordered(threshold);
#pragma unroll
        for (int i = 0; i < kMasks; ++i) mask[i] = 0;
#pragma unroll
        for (int i = 0; i < kLaneIds; ++i) mask[i / 32] |= of[i] > limit ? 1u << i % 32 : 0;
    }
    __device__ __forceinline__ static uint32_t id_of_bit(uint32_t bit) { return bit; }

    __device__ __forceinline__ int32_t largest() const {
        float largest = of[0];
#pragma unroll
        for (int i = 1; i < kLaneIds; ++i) largest = fmaxf(largest, of[i]);
        return ordered(largest);
    }
};

#else

struct Scores {
    uint32_t of[kLaneIds / 2];

    __device__ __forceinline__ void take(const uint4& piece, int i) {
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) of[i * 4 + j] = pair_min(words[j], 0x7f807f80u);
    }

    __device__ __forceinline__ static uint32_t both(int32_t threshold) {
        const uint32_t bits = ordered_bits(threshold);
        return __byte_perm(bits, bits, 0x3232);
    }

    // Bit b of 32: the half b / 16 of pair b % 16.
    __device__ __forceinline__ void above(int32_t threshold, uint32_t (&mask)[kMasks]) const {
        const uint32_t limit = both(threshold);
#pragma unroll
        for (int i = 0; i < kMasks; ++i) {
            mask[i] = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) mask[i] |= pair_above(of[i * 16 + j], limit) & 0x10001u << j;
        }
    }
    __device__ __forceinline__ static uint32_t id_of_bit(uint32_t bit) { return bit % 16 * 2 + bit / 16; }

    __device__ __forceinline__ int32_t largest() const {
        uint32_t largest = of[0];
#pragma unroll
        for (int i = 1; i < kLaneIds / 2; ++i) largest = pair_max(largest, of[i]);
        return max(ordered(__uint_as_float(largest << 16)), ordered(__uint_as_float(largest & 0xffff0000u)));
    }
};

#endif

// A warp's share of a request's step.
struct Unit {
    int batch_row, step, unit;

    Unit() = default;
    __device__ __forceinline__ Unit(const CertifyParams& p, int item, int batch) {
        const u32 pair = u32(item) / u32(p.units);
        batch_row = pair % u32(batch), step = pair / u32(batch), unit = u32(item) % u32(p.units);
    }

    __device__ __forceinline__ const BaseLogit* base(const WalkParams& walk) const {
        return static_cast<const BaseLogit*>(walk.base_logits) + batch_row * walk.base_stride_row + step * walk.base_stride_step;
    }

    // Of a lane's id.
    __device__ __forceinline__ int column_at(const CertifyParams& p, int lane, int id) const { return column_of(place_of(lane, id), unit, p.units); }
};

// Of a row that has no 16-byte alignment, or that ends in a piece, or of a unit with few ids: -inf where there is none. A call, as it is rare.
__device__ __noinline__ void load_ragged(const CertifyParams& p, const Unit of, Chosen* chosen) {
    const BaseLogit* base = of.base(p.walk);
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll kPiece
    for (int i = 0; i < kLaneIds; ++i) {
        const int column = of.column_at(p, lane, i);
        chosen->score(place_of(lane, i)) = column < p.walk.shard_width ? base[column] : lowest_base();
    }
}

// `chosen`: the warp's own, and free: the unit before has been sent, the present one is in registers.
__device__ __forceinline__ void load_pieces(const CertifyParams& p, const Unit& of, int lane, uint4 (&pieces)[kPieces], Chosen& chosen) {
    const BaseLogit* base = of.base(p.walk);
    const int width = p.walk.shard_width, first = of.column_at(p, lane, 0), step = kWarpSize * kPiece * p.units;
    static_assert(kWarpSize * kPiece % kChunkIds == 0, "a row of pieces is whole chunks");
    constexpr int kLast = kPieces - 1;
    const bool is_plain = reinterpret_cast<uint64_t>(base) % 16 == 0 && width % kPiece == 0 && first + (kLast - 1) * step < width;
    if (!__all_sync(kFullWarp, is_plain)) {
        load_ragged(p, of, &chosen);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) pieces[i] = chosen.pieces[i][lane];
        return;
    }
    const uint4* piece = reinterpret_cast<const uint4*>(base + first);
#pragma unroll
    for (int i = 0; i < kLast; ++i) pieces[i] = __ldg(piece + i * (step / kPiece));
    pieces[kLast] = make_uint4(kLowestPair, kLowestPair, kLowestPair, kLowestPair);
    if (first + kLast * step < width) pieces[kLast] = __ldg(piece + kLast * (step / kPiece));
}

__device__ __forceinline__ uint32_t order_distance(int32_t from, int32_t to) {
    return static_cast<uint32_t>(to >> kOrderShift) - static_cast<uint32_t>(from >> kOrderShift);
}

// The order `steps` above.
__device__ __forceinline__ int32_t order_above(int32_t from, uint32_t steps) { return from + (steps << kOrderShift); }

// By one warp: the order that a unit's candidates exceed. No more than kList do, and no fewer than kLeastList, unless too many are equal or
// there are no more. largest: of the lane's scores. count_above(order): how many of all lanes' exceed it; called for what is returned last.
template <typename Count>
__device__ __forceinline__ int32_t list_threshold(int32_t largest, const Count& count_above) {
    // Of text and of noise as many as a list should have exceed the mean of the lanes' largest, less a part of the distance to their least.
    // (A search for an order that so many lanes exceed is closer, and takes longer than what it saves.)
    const int32_t top = __reduce_max_sync(kFullWarp, largest), bottom = __reduce_min_sync(kFullWarp, largest);
    const uint32_t distance = order_distance(bottom, largest);
    // The sum of 32 distances of 32 bits has no room.
    const uint32_t mean = kOrderShift > 0 ? __reduce_add_sync(kFullWarp, distance) / kWarpSize : __reduce_add_sync(kFullWarp, distance / kWarpSize);
    const int32_t guess = order_above(bottom, mean - mean / (256 / kLaneIds));
    // `low` leaves too many, unless it is the lowest; `width` above it doesn't. The guess isn't far off, as a rule: steps away from it
    // double, up to where they can't be less than half of any width. (One that became 0 would try the same order for ever.)
    int32_t low = ordered_bits(kLowestBits);
    uint32_t width = order_distance(low, top), tried = order_distance(low, guess);
    for (uint32_t step = order_distance(bottom, guess) / 4 + 1;; step = min(step, 1u << 30) * 2) {
        const int count = count_above(order_above(low, tried));
        if (count > kList) {
            low = order_above(low, tried), width -= tried;
            tried = max(min(step, width / 2), 1u);
        } else {
            width = tried;
            if (count >= kLeastList || width <= 1) return order_above(low, width);
            tried = max(width - min(step, width), width / 2);
        }
    }
}

// By one warp: chooses a unit's candidates, from its base logits, and pushes them to the ranks that have the request.
__device__ __forceinline__ void choose(const CertifyParams& p, u64 block, const RowState& row, const Unit& of, int lane, uint4 (&pieces)[kPieces], Chosen& chosen) {
    const WalkParams& walk = p.walk;
    const Scoring scoring{row.temperature, row.inverse_temperature};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        chosen.pieces[i][lane] = pieces[i];
        if constexpr (kStagesBases) chosen.pieces[kPieces + i][lane] = pieces[i];
    }
    if (scoring.sampled()) {
        // A loop: its code is run for the first time in each walk, which takes longer than running it again.
        const NoiseStream noise = noise_stream(row, of.step);
        const Selection selection(scoring);
#pragma unroll 1
        for (int i = 0; i < kLaneIds; i += 4) {
            const float4 logarithms = gumbel_logarithms(noise.bits(u32(walk.shard_start + of.column_at(p, lane, i)) / 4));
            BaseLogit* values = &chosen.score(place_of(lane, i));
#if TPW_BASE_FP32
            float4& four = *reinterpret_cast<float4*>(values);
            four = make_float4(selection(four.x, logarithms.x), selection(four.y, logarithms.y), selection(four.z, logarithms.z), selection(four.w, logarithms.w));
#else
            uint2& four = *reinterpret_cast<uint2*>(values);
            const auto scores_of = [&](uint32_t pair, float first, float second) {
                const float low = selection(__uint_as_float(pair << 16), first), high = selection(__uint_as_float(pair & 0xffff0000u), second);
                return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
            };
            four = make_uint2(scores_of(four.x, logarithms.x, logarithms.y), scores_of(four.y, logarithms.z, logarithms.w));
#endif
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) pieces[i] = chosen.pieces[i][lane];
    }
    Scores scores;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) scores.take(pieces[i], i);

    uint32_t mask[kMasks];
    int own, count;
    const int32_t kept = list_threshold(scores.largest(), [&](int32_t threshold) {
        scores.above(threshold, mask);
        own = 0;
#pragma unroll
        for (int i = 0; i < kMasks; ++i) own += __popc(mask[i]);
        return count = __reduce_add_sync(kFullWarp, own);
    });
    // What isn't above -0 may be 0; and what isn't above infinity, a NaN.
    const int32_t most = ordered(from_ordered(kept)), left_out = most < kInfinityBits && !scoring.is_limitless() ? most : kTop;

    // A sum over the lanes before, bit by bit: one lane rarely has more than seven.
    const uint32_t before = (1u << lane) - 1;
    int slot = 0;
    const auto add_bit = [&](int bit) { slot += __popc(__ballot_sync(kFullWarp, own >> bit & 1) & before) << bit; };
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) add_bit(bit);
    for (int bit = 3; __any_sync(kFullWarp, own >> bit != 0); ++bit) add_bit(bit);
    // Three a turn: a register that is stored can't be written before the store has been taken.
#pragma unroll
    for (int i = 0; i < kMasks; ++i)
        while (mask[i] != 0)
#pragma unroll
            for (int turn = 0; turn < 3; ++turn) {
                if (mask[i] != 0) chosen.place[slot++] = place_of(lane, i * 32 + Scores::id_of_bit(__ffs(mask[i]) - 1));
                mask[i] &= mask[i] - 1;
            }
    __syncwarp();
    const u32 at = list_offset(p, block, of.step * walk.batch + of.batch_row, walk.rank, of.unit);
    const int owner = of.batch_row % TPW_WORLD_SIZE;  // where requests are dealt out
    for (int i = lane; i < kUnitWords; i += kWarpSize) {
        Candidate candidates[kWordCandidates];
#pragma unroll
        for (int j = 0; j < kWordCandidates; ++j) {
            const int from = i * kWordCandidates + j;
            candidates[j] = {from == kList ? left_out : kNothing, 0, 0.0f};
            if (from >= count) continue;
            const uint32_t place = chosen.place[from];
            candidates[j].place = place;
            candidates[j].score = ordered(base_to_float(chosen.score(place)));
            // Of greedy kernels the score is the base logit.
            if (kStagesBases) candidates[j].base = base_to_float(chosen.base(place));
            if (kWordCandidates == 1) candidates[j].base = base_to_float(of.base(walk)[column_of(place, of.unit, p.units)]);
        }
        const Word word = pack(candidates, block);
#pragma unroll
        for (int destination = 0; destination < TPW_WORLD_SIZE; ++destination)
            if (p.owners == 1 || destination == owner) store_word<Scope::sys>(p.lists[destination] + at + i * TPW_WORD_BYTES, word.key, word.tag);
    }
    __syncwarp();  // the next unit takes over what is chosen from
}

}  // namespace tpw

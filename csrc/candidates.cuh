// The candidates of each request's step: chosen by every rank from its own columns, pushed to all ranks.
//
// A *unit* is a warp's share of one request's step on one rank: TPW_CHUNKS * 32 chunks of 16 ids, dealt to the units in turn, as
// likely tokens are neighbours. Each unit keeps its own best, up to TPW_LIST ids, with no word to any other: any set of ids is
// sound, as long as the largest score of those left out is told (tp_walk/certify.py). Which of them is best nobody needs to know.
//
// A candidate is one word of mailbox.cuh: key = {ordered score, base logit}, tag = {block, id}; after a unit's TPW_LIST of them
// comes one whose score is the largest that was left out. Every word of a unit is written in every block, so that nothing is
// ever reset, and each carries its block, so that none needs another's ordering. Two block parities take turns, for the reason
// that mailbox.cuh gives for headers: a rank enters block n + 2 once every peer's launch n is complete.
#pragma once

#include "certify_params.cuh"
#include "cta.cuh"
#include "watch.cuh"

namespace tpw {

constexpr int kList = TPW_LIST;
constexpr int kUnitWords = kList + 1;
constexpr int kChunkIds = 16;
constexpr int kChunks = TPW_CHUNKS;  // of a lane
constexpr int kIdBits = 20;
static_assert(kList == kWarpSize, "a lane a candidate");

// Of a step of the block. pair = step * batch + row.
__device__ __forceinline__ u32 list_offset(const CertifyParams& p, u64 block, int pair, int source, int unit) {
    const u32 words = u32(block & 1) * p.list_words + ((pair * TPW_WORLD_SIZE + source) * p.units + unit) * kUnitWords;
    return words * TPW_WORD_BYTES;
}

__device__ __forceinline__ u64 candidate_tag(u64 block, u32 id) { return block << kIdBits | id; }
__device__ __forceinline__ bool is_of_block(u64 tag, u64 block) { return tag >> kIdBits == (block & (~0ull >> kIdBits)); }
__device__ __forceinline__ u32 tag_id(u64 tag) { return u32(tag) & ((1u << kIdBits) - 1); }

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

    // The score itself, of a dot and exact noise.
    __device__ __forceinline__ int32_t score(float base, float dot, float noise) const {
        const float bases[2] = {base, base};
        float values[2] = {dot, dot};
        add_base<kRounding>(bases, values);
        return ordered(sampled() ? __fadd_rn(__fdiv_rn(values[0], temperature), noise) : values[0]);
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

// ---- choosing ----------------------------------------------------------------------------------------------------------

// A warp's own, in shared memory.
struct Chosen {
    int32_t score[kList];
    uint32_t column[kList];  // of this rank's
};

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
                scores[first + quad + i] = exists ? scoring.selection(base_to_float(values[quad + i]), drawn[i]) : kNothing;
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
    // step, so that the search begins near its end. It needn't find the best threshold; but one that stops at three quarters of
    // a list leaves out ids that count: on held-out text the candidates of all units then hold the best 600 ids instead of 1,060.
    int32_t above = __reduce_min_sync(kFullWarp, mine), kept = __reduce_max_sync(kFullWarp, mine);
    int count = 0;
    if (count_above(above) <= kList) kept = above, above = kNothing;
    if (above == kNothing) {
        count = count_above(kept);
        const int all = count_above(kNothing);
        if (all <= kList) kept = kNothing, count = all;
    }
    constexpr uint32_t kGap = kSampled || TPW_BASE_FP32 ? 1 : 0xffff;  // between two bf16 values lies no third
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
    chosen.score[lane] = kNothing;
    __syncwarp();
    if (own > 0) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < kChunkIds; ++j)
                if (scores[i][j] > kept) {
                    chosen.score[slot] = scores[i][j];
                    chosen.column[slot] = ((i * kWarpSize + lane) * p.units + unit) * kChunkIds + j;
                    ++slot;
                }
    }
    __syncwarp();
    const int32_t score = chosen.score[lane];
    const uint32_t column = score == kNothing ? 0 : chosen.column[lane];
    const uint32_t base_bits = score == kNothing ? 0 : __float_as_uint(base_to_float(base[column]));
    const u64 key = static_cast<u64>(static_cast<uint32_t>(score)) << 32 | base_bits;
    const u32 at = list_offset(p, block, pair, walk.rank, unit);
#pragma unroll
    for (int destination = 0; destination < TPW_WORLD_SIZE; ++destination) {
        char* words = p.lists[destination] + at;
        store_word<Scope::sys>(words + lane * TPW_WORD_BYTES, key, candidate_tag(block, walk.shard_start + column));
        if (lane == 0) store_word<Scope::sys>(words + kList * TPW_WORD_BYTES, static_cast<u64>(static_cast<uint32_t>(left_out)) << 32, candidate_tag(block, 0));
    }
}

}  // namespace tpw

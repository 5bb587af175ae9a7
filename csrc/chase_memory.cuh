// What the CTAs of the chase (chase.cuh) keep in shared memory, and the words through which those of a GPU tell each other.
//
// The words of a step: its token, the tokens that it is likely to end with, its transitions, and those of its helper: the best of the
// second tier and what it leaves, what the tier is to be scored after, and that the helper is there. What is asked and answered is
// written where a step that is helped has no transition, all others in every block, in no order that matters, and read in the same
// launch. The token comes from the rank that has the request, the others are the rank's own. A
// rank tells no token of a block before it has every rank's candidates, so not before all have finished the block before.
#pragma once

#include "candidates.cuh"

namespace tpw {

constexpr int kCertifyWarps = TPW_CERTIFY_WARPS;
constexpr int kCertifyThreads = kCertifyWarps * kWarpSize;
constexpr int kTier = TPW_TIER;  // rows of W2 in shared memory
constexpr int kRowBytes = TPW_RANK * 2 + 16;  // the pad spreads the rows of a fragment over the banks
constexpr int kMaxEntries = TPW_MAX_ENTRIES;
constexpr int kPart = TPW_PART;  // tokens whose transitions are worked out together: a column each
constexpr int kPartGroups = kPart / kColumns;
constexpr int kLikely = TPW_LIKELY;  // tokens of a step that have transitions, at most
constexpr int kLaneLikely = kLikely / kWarpSize;
static_assert(kPartGroups == 2 && kPart <= kWarpSize && kLikely % kWarpSize == 0);
constexpr int kThreadWords = (kMaxEntries / kList * kUnitWords + kCertifyThreads - 1) / kCertifyThreads;  // of the candidates' words
static_assert(kThreadWords <= 32, "a bit a word: certified.MOST_THREAD_WORDS");
// Warps that load columns of u; of sampled kernels the others draw noise meanwhile.
constexpr int kColumnWarps = kSampled ? kCertifyWarps / 2 : kCertifyWarps;
constexpr int kWarpRows = kTier / kCertifyWarps;
static_assert(kWarpRows == kTileRows || kWarpRows * kCertifyWarps == kTier && kWarpRows < kTileRows, "a warp multiplies one tile at most");

// A token word's key: the token, or this bit and the step that wasn't certified.
constexpr u64 kFailed = 1ull << 63;
// And how many candidates were scored for it.
constexpr int kScoredShift = 32;
constexpr u64 kTokenMask = kFailed | ((1ull << kScoredShift) - 1);

// A likely token's key: the token, or this one. A transition's: {token before, token}; {kNoToken, 0} is none.
constexpr uint32_t kNoToken = 0xffffffffu, kNobody = 0xfffffffeu;

struct ChaseControl {
    uint64_t block, expiry;
    uint64_t token, next;  // of follow(), await_asking() and await_second()
    uint64_t rows_barrier;  // a phase for the rows of each tier
    unsigned long long hash;  // of the last tokens
    int32_t largest[kCertifyWarps];
    int32_t left_out[kCertifyWarps];
    uint32_t counts[2][2][kCertifyWarps];  // of threshold_of: by parity of the turn; two, and the third
    int32_t rows;     // of the tier
    uint32_t phase;  // of rows_barrier: parity of those that have begun
    int32_t failed;
};

// Shared memory in this order; the host half is certified.shared_bytes.
struct ChaseSmem {
    unsigned char* rows;        // [kTier] of W2; before that, Chosen of each warp
    unsigned char* u;           // [kPart] columns of B fragments
    ChaseControl* control;
    uint64_t* keys;             // [warp][kPart] the best after each token of a column
    uint64_t* transitions;      // [warp][kLikely] of as many steps
    int32_t* tier_order;        // [kTier]
    uint32_t* tier_place;       // [kTier] unit << 16 | place in it
    uint32_t* tier_id;          // [kTier]
    float* tier_base;           // [kTier]
    float* tier_noise;          // [kTier]

    __device__ __forceinline__ explicit ChaseSmem(unsigned char* start) {
        rows = start;
        u = rows + kTier * kRowBytes;
        control = reinterpret_cast<ChaseControl*>(u + kPart * kColumnBytes);
        keys = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(control) + TPW_CHASE_CONTROL_BYTES);
        transitions = keys + kCertifyWarps * kPart;
        tier_order = reinterpret_cast<int32_t*>(transitions + kCertifyWarps * kLikely);
        tier_place = reinterpret_cast<uint32_t*>(tier_order + kTier);
        tier_id = tier_place + kTier;
        tier_base = reinterpret_cast<float*>(tier_id + kTier);
        tier_noise = tier_base + kTier;
    }

    __device__ __forceinline__ Chosen& chosen(int warp) const { return reinterpret_cast<Chosen*>(rows)[warp]; }
};
static_assert(sizeof(ChaseControl) <= TPW_CHASE_CONTROL_BYTES, "certified.CHASE_CONTROL_BYTES holds ChaseControl");
static_assert(kPart % kColumnWarps == 0, "as many columns for each warp");
static_assert(kCertifyWarps * sizeof(Chosen) <= kTier * kRowBytes + kPart * kColumnBytes, "choosing borrows the rows' place, and u's");

__device__ __forceinline__ char* step_word_of(const CertifyParams& p, int rank, int step, int row) {
    return p.lists[rank] + p.steps_offset + static_cast<u64>(step * p.walk.batch + row) * (TPW_STEP_WORDS * TPW_WORD_BYTES);
}
__device__ __forceinline__ char* step_word(const CertifyParams& p, int step, int row) { return step_word_of(p, p.walk.rank, step, row); }
__device__ __forceinline__ char* likely_word(const CertifyParams& p, int step, int row, int i) { return step_word(p, step, row) + (1 + i) * TPW_WORD_BYTES; }
__device__ __forceinline__ char* transition_word(const CertifyParams& p, int step, int row, int i) { return likely_word(p, step, row, kLikely + i); }
__device__ __forceinline__ char* second_word(const CertifyParams& p, int step, int row, int i) { return likely_word(p, step, row, 2 * kLikely + i); }
__device__ __forceinline__ char* asking_word(const CertifyParams& p, int step, int row) { return second_word(p, step, row, 2); }
__device__ __forceinline__ char* helper_word(const CertifyParams& p, int step, int row) { return second_word(p, step, row, 3); }
static_assert(TPW_STEP_WORDS == 5 + 2 * kLikely, "certified.STEP_WORDS");

}  // namespace tpw

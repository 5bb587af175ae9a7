// What the CTAs of the chase (chase.cuh) keep in shared memory, and the words through which those of a GPU tell each other.
//
// The words of a step, all of this rank alone: its token, the tokens that it is likely to end with, and its transitions. All are
// written in every block, in no order that matters, and read in the same launch.
#pragma once

#include "candidates.cuh"

namespace tpw {

constexpr int kCertifyWarps = TPW_CERTIFY_WARPS;
constexpr int kCertifyThreads = kCertifyWarps * kWarpSize;
constexpr int kTier = TPW_TIER;  // rows of W2 in shared memory
constexpr int kRowBytes = TPW_RANK * 2 + 16;  // the pad spreads the rows of a fragment over the banks
constexpr int kMaxEntries = TPW_MAX_ENTRIES;
constexpr int kLikely = TPW_LIKELY;  // tokens of a step that have transitions
constexpr int kLikelyGroups = kLikely / kColumns;
static_assert(kLikely == kWarpSize, "a lane a token");
constexpr int kBinBits = 8, kBins = 1 << kBinBits;

// A token word's key: the token, or this bit and the step that wasn't certified.
constexpr u64 kFailed = 1ull << 63;

// A likely token's key: the token, or this one. A transition's: {token before, token}; {kNoToken, 0} is none.
constexpr uint32_t kNoToken = 0xffffffffu;

struct ChaseControl {
    uint64_t block, expiry;
    uint64_t best[kCertifyWarps];
    int32_t largest[kCertifyWarps];
    int32_t left_out[kCertifyWarps];
    int32_t counters[3];  // rows of the first tier, entries of the second, likely tokens
    uint32_t likely[kLikely];
    int32_t failed;
};

// Shared memory in this order; the host half is certified.shared_bytes.
struct ChaseSmem {
    unsigned char* rows;        // [kTier] of W2; before that, Chosen of each warp
    unsigned char* u;           // [kLikely] columns of B fragments; later one a warp
    ChaseControl* control;
    uint64_t* keys;             // [warp][kLikely] the best after each likely token; before that, bins
    uint64_t* transitions;      // [warp][kLikely] of as many steps
    float* tier_base;           // [kTier]
    float* tier_noise;          // [kTier]
    uint32_t* tier_id;          // [kTier]
    int32_t* score;             // [kMaxEntries] selection scores
    float* base;                // [kMaxEntries]
    uint32_t* id;               // [kMaxEntries]
    uint16_t* second;           // [kMaxEntries] entries of the second tier

    __device__ __forceinline__ explicit ChaseSmem(unsigned char* start) {
        rows = start;
        u = rows + kTier * kRowBytes;
        control = reinterpret_cast<ChaseControl*>(u + kLikely * kColumnBytes);
        keys = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(control) + TPW_CHASE_CONTROL_BYTES);
        transitions = keys + kCertifyWarps * kLikely;
        tier_base = reinterpret_cast<float*>(transitions + kCertifyWarps * kLikely);
        tier_noise = tier_base + kTier;
        tier_id = reinterpret_cast<uint32_t*>(tier_noise + kTier);
        score = reinterpret_cast<int32_t*>(tier_id + kTier);
        base = reinterpret_cast<float*>(score + kMaxEntries);
        id = reinterpret_cast<uint32_t*>(base + kMaxEntries);
        second = reinterpret_cast<uint16_t*>(id + kMaxEntries);
    }

    __device__ __forceinline__ int32_t* bins() const { return reinterpret_cast<int32_t*>(keys); }  // [kBins] of threshold_of
    __device__ __forceinline__ Chosen& chosen(int warp) const { return reinterpret_cast<Chosen*>(rows)[warp]; }
};
static_assert(sizeof(ChaseControl) <= TPW_CHASE_CONTROL_BYTES, "certified.CHASE_CONTROL_BYTES holds ChaseControl");
static_assert(kBins * sizeof(int32_t) <= kCertifyWarps * kLikely * sizeof(uint64_t), "bins borrow the keys' place");
static_assert(kCertifyWarps <= kLikely, "a warp has a column of u to itself");
static_assert(kCertifyWarps * sizeof(Chosen) <= kTier * kRowBytes, "choosing borrows the rows' place");

__device__ __forceinline__ char* step_word(const CertifyParams& p, int step, int row) {
    return p.steps + (step * p.walk.batch + row) * (TPW_STEP_WORDS * TPW_WORD_BYTES);
}
__device__ __forceinline__ char* likely_word(const CertifyParams& p, int step, int row, int i) { return step_word(p, step, row) + (1 + i) * TPW_WORD_BYTES; }
__device__ __forceinline__ char* transition_word(const CertifyParams& p, int step, int row, int i) { return likely_word(p, step, row, kLikely + i); }
static_assert(TPW_STEP_WORDS == 1 + 2 * kLikely, "certified.STEP_WORDS");

}  // namespace tpw

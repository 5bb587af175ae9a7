// What one launch of csrc/certify.cu is given. `certified.CertifyParams` is the host half: same fields, same order.
#pragma once

#include "walk_params.cuh"

namespace tpw {

// What the walk that follows is given: num_failed requests, those of rows[0 .. num_failed), from step first_step on.
struct Fallback {
    int32_t num_failed;
    int32_t first_step;
    int32_t rows[1];
};

struct CertifyParams {
    WalkParams walk;          // as for the walk kernel; w2_fragments and what places them go unused
    const bf16* w2;           // [vocabulary, r], all of it
    const float* bounds;      // [target vocabulary] fp32: B of every previous token
    char* lists[kMaxWorld];   // every rank's candidate words as this rank sees them, laid out by candidates.cuh; and behind them,
    uint64_t steps_offset;    // so many bytes on, its words of each step, [step][row], laid out by chase_memory.cuh
    Fallback* fallback;
    int64_t* offsets;         // [max batch] the noise offsets that this block used
    uint64_t* counts;         // [Count::count]
    int32_t units;            // warps' shares that a request's step has on each rank
    int32_t list_words;       // of one block parity
    int32_t owners;           // ranks that deal the requests out among themselves: all, or 1, where each takes all
    int32_t team;             // CTAs that share a request's step
    int32_t helpers;          // and those that have its second tier ready: one, where no CTA has more than one step then, or none
    int32_t shard_starts[kMaxWorld];
};

// What is counted, in this order: certified.COUNTS.
enum class Count : int { blocks, certified_blocks, steps, certified_steps, candidates_scored, fallbacks, count };

static_assert(sizeof(CertifyParams) == TPW_CERTIFY_PARAMS_BYTES, "host and device have the same fields");

}  // namespace tpw

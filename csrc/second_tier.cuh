// What a step's follower and its helper (chase.cuh) tell each other about the second tier. Few steps need it, so what waits and what ends is
// calls, behind what every step runs: a jump over code is a read of DRAM more. Calls have no variables of their caller's, which would lie
// in memory; they make their own from the parameters and shared memory.
#pragma once

#include "chase_memory.cuh"
#include "exchange.cuh"

namespace tpw {

// A wait of this step for another of this GPU's CTAs.
struct StepWait {
    const Exchange watch;
    const Site site;

    __device__ __forceinline__ StepWait(const CertifyParams& p, const ChaseSmem& s, int step, int row)
        : watch(WalkExchange{p.walk, s.control->block, s.control->expiry}.watch()), site{TPW_WAIT_SLOT, 0, u32(step), u32(row)} {}
};

// The follower's, where a step has no transition: what the helper is to score the second tier after. By one thread.
__device__ __forceinline__ void ask_second(const CertifyParams& p, u64 block, int step, int row, u64 token) {
    store_word<Scope::gpu>(asking_word(p, step, row), token, header_tag(block));
}

// The helper's, as soon as it knows the block's number, by one thread: CTA 0 doesn't end the block without it. Nobody else waits for a
// helper that isn't asked, and one that came behind the block's end would wait for the candidates of the next.
__device__ __forceinline__ void tell_helper(const CertifyParams& p, u64 block, int step, int row) {
    store_word<Scope::gpu>(helper_word(p, step, row), 0, header_tag(block));
}

// The helper's, by one warp: control->token is the token before, or kNoToken once the step has its token without this. False: the walk
// has failed.
__device__ __noinline__ bool await_asking(const CertifyParams& p, unsigned char* shared_memory, int step, int row) {
    const ChaseSmem s(shared_memory);
    const StepWait wait(p, s, step, row);
    const int lane = threadIdx.x % kWarpSize;
    const char* word = lane == 0 ? asking_word(p, step, row) : step_word(p, step, row);
    for (u32 polls = 1;; ++polls) {
        Word seen = {};
        load_word_if(lane < 2, word, seen);
        const uint32_t told = __ballot_sync(kFullWarp, seen.tag == header_tag(wait.watch.block));
        if (told != 0) {
            if (lane == 0) s.control->token = told & 1 ? seen.key : kNoToken;
            return true;
        }
        if (polls % POLLS_PER_LOOK == 0 && __any_sync(kFullWarp, lane == 0 && hopeless(wait.watch, wait.site, header_tag(wait.watch.block), 0))) return false;
    }
}

// The helper's, by all warps: the best of the second tier, the limit of what follows, and how many rows it had.
__device__ __noinline__ void tell_second(const CertifyParams& p, unsigned char* shared_memory, int step, int row, int32_t threshold, int rows) {
    const ChaseSmem s(shared_memory);
    const int lane = threadIdx.x % kWarpSize;
    const uint64_t best = warp_max_key(lane < kCertifyWarps ? s.keys[lane * kPart] : 0);
    if (threadIdx.x != 0) return;
    store_word<Scope::gpu>(second_word(p, step, row, 0), best, header_tag(s.control->block));
    store_word<Scope::gpu>(second_word(p, step, row, 1), static_cast<u64>(rows) << 32 | static_cast<uint32_t>(threshold), header_tag(s.control->block));
}

// The follower's, by one warp: control->token and ->next are what tell_second told. False: the walk has failed.
__device__ __noinline__ bool await_second(const CertifyParams& p, unsigned char* shared_memory, int step, int row) {
    const ChaseSmem s(shared_memory);
    const StepWait wait(p, s, step, row);
    const int lane = threadIdx.x % kWarpSize;
    u64 key = 0;
    const bool alive = lane >= 2 || await_word<Scope::gpu>(wait.watch, second_word(p, step, row, lane), header_tag(wait.watch.block), wait.site, key);
    if (lane < 2) (lane == 0 ? s.control->token : s.control->next) = key;
    return __all_sync(kFullWarp, alive);
}

}  // namespace tpw

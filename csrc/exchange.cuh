// How the CTAs of all ranks agree on a token, in one of two ways:
//   posts        in kernels for one request, on one or two GPUs: each CTA posts its best key to every rank, and every CTA polls
//                the posts of all CTAs. One hop. They are posted in several copies, each polled by some of the CTAs, because CTAs
//                that are early would otherwise hold up the lines that late ones still write.
//   aggregators  each CTA stores its best key into a slot of the row's aggregator CTA, which reduces the slots of its GPU and
//                stores the result into the mailbox of every rank, where every CTA polls one word a rank. Two hops, few words.
//
// All words are tagged 128-bit words: no atomics, no fences, nothing to reset; mailbox.cuh says why that is sound. The other
// designs that were measured, and how they compare: experiments/rendezvous.py and experiments/kernel_history.md.
//
// All calls but those that say so are made by whole warps. Those that return bool return false when the walk has failed: drain.
#pragma once

#include "rows.cuh"
#include "score.cuh"
#include "types.cuh"
#include "walk_params.cuh"
#include "watch.cuh"

namespace tpw {

static_assert((kAgreeingRanks & (kAgreeingRanks - 1)) == 0 && kAgreeingRanks <= 8, "ranks are reduced by butterfly");
constexpr int kSlotsPerLane = TPW_MAX_GRID / kWarpSize;
static_assert(TPW_MAX_GRID % kWarpSize == 0 && TPW_MAX_GRID <= TPW_MAX_CTAS, "every slot is polled by a lane");
static_assert(TPW_WORLD_SIZE * TPW_HEADER_WORDS <= kWarpSize, "a lane a header word");

// The kernel writes into peers' memory beside the mailboxes, which mailbox.cuh says the rules of.
constexpr bool kPeerLogits = TPW_LOGITS == 2;

struct WalkExchange {
    const WalkParams& p;
    u64 block, expiry;

    __device__ __forceinline__ char* mailbox() const { return p.mailboxes[p.rank]; }  // this rank's
    __device__ __forceinline__ Exchange watch() const { return {p.mailboxes, p.status, static_cast<u32>(p.rank), block, expiry}; }

    // This rank's place among those that agree, and who has which place: a rank that agrees with none is the first.
    __device__ __forceinline__ u32 own_source() const { return kAgreeingRanks == 1 ? 0 : p.rank; }
    __device__ __forceinline__ u32 rank_of(u32 source) const { return kAgreeingRanks == 1 ? p.rank : source; }
    __device__ __forceinline__ char* mailbox_of(u32 source) const { return p.mailboxes[rank_of(source)]; }

    // By one thread, before anything else.
    __device__ static __forceinline__ void start(const WalkParams& p, uint64_t* block_number, uint64_t* expiry) {
        const char* mailbox = p.mailboxes[p.rank];
        const u64 block = load_control(mailbox, TPW_BLOCK_OFFSET);
        // A peer may come to its first block much later than to the others: it still compiles, loads weights, captures graphs.
        const bool first = block == load_control(mailbox, TPW_FIRST_BLOCK_OFFSET);
        *block_number = block;
        *expiry = now_ns() + (first ? p.startup_deadline_ns : p.steady_deadline_ns);
    }

    // At the start of a launch, by one warp of each CTA. valid: rows of the batch.
    __device__ __forceinline__ bool open(int lane, int cta, int valid) const {
        if (__any_sync(kFullWarp, lane == 0 && poisoned(watch()))) return false;
        if (p.is_opened) return true;
        if (cta == 0) {
            if (__any_sync(kFullWarp, lane == 0 && is_second())) return false;
            for (int row = lane; row < valid; row += kWarpSize)
                if (static_cast<u64>(anchor(p, row)) >= static_cast<u64>(p.target_vocab_size)) flag_clamped_anchor(watch(), row);
        }
        return true;
    }

    // Next, where ranks exchange anything. publishes: the CTA sends something to other ranks, so it must know that all of them run
    // the same launch, and nobody may write into a peer's logits that what came before in the peer's stream still reads.
    __device__ __forceinline__ bool compare_headers(int lane, int cta, int valid, bool publishes) const {
        if (cta == 0) send_header(lane, valid);
        if (!publishes) return true;
        bool agrees = true;
        if (lane < TPW_WORLD_SIZE * TPW_HEADER_WORDS) {
            const u32 source = lane / TPW_HEADER_WORDS, word = lane % TPW_HEADER_WORDS;
            const Site site{TPW_WAIT_HEADER, static_cast<u32>(p.rank), 0, 0};
            const Exchange own_watch = watch();
            u64 own = 0;
            agrees = await_word<Scope::sys>(own_watch, header_word(mailbox(), block, p.rank, word), header_tag(block), site, own) &&
                     header_agrees(own_watch, source, word, own);
        }
        if constexpr (kPeerLogits) fence_system();
        return __all_sync(kFullWarp, agrees);
    }

    // This CTA's best key of a row, which came to this step through token `previous`. By one lane.
    __device__ __forceinline__ void contribute(int step, int row, u32 previous, int cta, u64 key) const {
        const u64 tag = step_tag(block, step, previous);
        store_word<Scope::gpu>(slot_word(mailbox(), row, cta), key, tag);
    }

    // The row's aggregator: waits for all CTAs of this GPU, publishes their best to all ranks. `settle(first, second, words, load)`
    // picks the best of a lane's and all other lanes' words: see Service.
    template <typename Settle>
    __device__ __forceinline__ bool aggregate(int lane, int step, int row, u32 previous, int ctas, u64& best, const Settle& settle) const {
        const u64 tag = step_tag(block, step, previous);
        const char* slots = slot_word(mailbox(), row, lane);
        u64 first, second;
        for (u32 polls = 1;; ++polls) {
            first = second = 0;
            int missing = -1;  // a CTA whose word isn't there yet
            u64 seen = tag;
#pragma unroll
            for (int i = 0; i < kSlotsPerLane; ++i) {
                const int cta = i * kWarpSize + lane;
                if (cta < ctas) {
                    const Word word = load_word<Scope::gpu>(slots + i * kWarpSize * TPW_WORD_BYTES);
                    take(first, second, word.key);
                    if (word.tag != tag) missing = cta, seen = word.tag;
                }
            }
            if (__all_sync(kFullWarp, missing < 0)) break;
            if (polls % POLLS_PER_LOOK == 0 && gives_up(missing >= 0, {TPW_WAIT_SLOT, u32(missing), u32(step), u32(row)}, tag, seen)) return false;
        }
        best = settle(first, second, (ctas - lane + kWarpSize - 1) / kWarpSize, [&](int i) { return load_word<Scope::gpu>(slots + i * kWarpSize * TPW_WORD_BYTES).key; });
        if (lane < kAgreeingRanks) store_word<Scope::sys>(result_word(mailbox_of(lane), block, step, row, own_source()), best, tag);
        return true;
    }

    // The best keys of several rows over all ranks: lane i * kAgreeingRanks + rank waits for that rank's word of the i-th row,
    // `row` and `previous` being the lane's; `key` is that word. Lanes that aren't `active` only take part.
    __device__ __forceinline__ bool receive(int lane, bool active, int step, int row, u32 previous, u64& key) const {
        const u64 tag = step_tag(block, step, previous);
        const u32 source = lane % kAgreeingRanks;
        const char* result = result_word(mailbox(), block, step, row, source);
        Word word{0, tag};
        for (u32 polls = 1;; ++polls) {
            if (active) word = load_word<Scope::sys>(result);
            if (__all_sync(kFullWarp, word.tag == tag)) break;
            if (polls % POLLS_PER_LOOK == 0 && gives_up(word.tag != tag, {TPW_WAIT_RESULT, rank_of(source), u32(step), u32(row)}, tag, word.tag)) return false;
        }
        key = word.key;
        return true;
    }

    // Of those who will post: an SM's first access to a peer's page waits for the translation of its address, and all SMs would
    // at once. One look, for nothing, while W2 is on its way.
    __device__ __forceinline__ void translate(int thread) const {
        if (thread < TPW_WORLD_SIZE) load_word<Scope::sys>(poison_word(p.mailboxes[thread], 0));
    }

    // What a CTA will poll, of both parities of a step: a word that isn't in L2 is waited for longer than a hop takes. Once W2 has
    // come, which else would push these lines out again.
    __device__ __forceinline__ void prefetch(int thread, int threads, bool posts, int batch, int cta, int ctas) const {
        constexpr int kLineWords = 128 / TPW_WORD_BYTES;
        const auto fetch = [](const char* word) { asm volatile("prefetch.global.L2 [%0];" ::"l"(word)); };
        const int lines = posts ? (kAgreeingRanks * ctas + kLineWords - 1) / kLineWords : batch;
        for (int line = thread; line < 2 * lines; line += threads) {
            const int parity = line >= lines, at = line - parity * lines;
            fetch(posts ? post_word(mailbox(), block, parity, cta % TPW_POST_COPIES, at * kLineWords) : result_word(mailbox(), block, parity, at, 0));
        }
        if (posts) return;
        for (int row = cta; row < batch; row += ctas)
            for (int slot = thread * kLineWords; slot < ctas; slot += threads * kLineWords) fetch(slot_word(mailbox(), row, slot));
    }

    // One hop, for row 0. This CTA's best key, on all lanes, to all ranks. By one warp.
    __device__ __forceinline__ void post(int lane, int step, u32 previous, int cta, int ctas, u64 key) const {
        static_assert(kAgreeingRanks > TPW_POST_WORLD_SIZE || kAgreeingRanks * TPW_POST_COPIES <= kWarpSize, "a lane a copy");
        if (lane < kAgreeingRanks * TPW_POST_COPIES)
            store_word<Scope::sys>(post_word(mailbox_of(lane / TPW_POST_COPIES), block, step, lane % TPW_POST_COPIES, own_source() * ctas + cta), key,
                                   step_tag(block, step, previous));
    }

    // The best of those posts that thread `thread` of `kThreads` has to wait for, on all lanes of its warp.
    template <int kThreads, typename Settle>
    __device__ __forceinline__ bool collect(int thread, int step, u32 previous, int cta, int ctas, u64& best, const Settle& settle) const {
        constexpr int kWords = (kAgreeingRanks * TPW_MAX_GRID + kThreads - 1) / kThreads;
        const u64 tag = step_tag(block, step, previous);
        const char* posts = post_word(mailbox(), block, step, cta % TPW_POST_COPIES, thread);
        const int words = max((kAgreeingRanks * ctas - thread + kThreads - 1) / kThreads, 0);
        u64 first, second;
        for (u32 polls = 1;; ++polls) {
            first = second = 0;
            int missing = -1;
            u64 seen = tag;
            Word all[kWords];
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                all[i] = {0, tag};
                load_word_if(i < words, posts + i * (kThreads * TPW_WORD_BYTES), all[i]);
            }
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                take(first, second, all[i].key);
                if (all[i].tag != tag) missing = i * kThreads + thread, seen = all[i].tag;
            }
            if (__all_sync(kFullWarp, missing < 0)) break;
            if (polls % POLLS_PER_LOOK == 0 && gives_up(missing >= 0, {TPW_WAIT_RESULT, rank_of(missing / ctas), u32(step), 0}, tag, seen)) return false;
        }
        best = settle(first, second, words, [&](int i) { return load_word<Scope::sys>(posts + i * (kThreads * TPW_WORD_BYTES)).key; });
        return true;
    }

    // Where the batch is split over the ranks: this rank's token of a row of the batch, to all others. By one thread.
    __device__ __forceinline__ void send_token(int step, int row, int64_t token) const {
        for (u32 peer = 0; peer < TPW_WORLD_SIZE; ++peer)
            if (peer != static_cast<u32>(p.rank)) store_word<Scope::sys>(token_word(p.mailboxes[peer], row, step), token, step_tag(block, step, 0));
    }

    // Another rank's. By any threads.
    __device__ __forceinline__ bool receive_token(int step, int row, u64& token) const {
        const Site site{TPW_WAIT_TOKEN, static_cast<u32>(row % p.shares), static_cast<u32>(step), static_cast<u32>(row)};
        return await_word<Scope::sys>(watch(), token_word(mailbox(), row, step), step_tag(block, step, 0), site, token);
    }

    // One thread, once every CTA has read all that a block may read of the line that this changes. Not after a failure, which
    // keeps out all launches until the host resets the mailbox.
    __device__ __forceinline__ void close(u64 last_tokens) const {
        atomicExch(reinterpret_cast<u32*>(mailbox() + TPW_IN_FLIGHT_OFFSET), 0u);
        store_control(mailbox(), TPW_LAST_TOKENS_OFFSET, last_tokens);
        store_control(mailbox(), TPW_BLOCK_OFFSET, block + 1);
    }

    // By a whole warp, every few polls: true when the wait must be given up.
    __device__ __forceinline__ bool gives_up(bool stuck, Site site, u64 expected, u64 seen) const {
        return __any_sync(kFullWarp, stuck && hopeless(watch(), site, expected, seen));
    }

  private:
    __device__ static __forceinline__ void take(u64& first, u64& second, u64 key) {
        second = max(second, min(first, key));
        first = max(first, key);
    }

    __device__ __forceinline__ bool is_second() const {
        if (!is_second_in_flight(watch())) return false;
        fail(watch(), TPW_CODE_OVERLAP, {TPW_WAIT_HEADER, static_cast<u32>(p.rank), 0, 0}, 0, 0, 0);
        return true;
    }

    __device__ __forceinline__ void send_header(int lane, int valid) const {
        constexpr int kTensors = static_cast<int>(HeaderTensor::count);
        u64 sums[kTensors] = {};
        for (int row = lane; row < valid; row += kWarpSize)
#pragma unroll
            for (int tensor = 0; tensor < kTensors; ++tensor) sums[tensor] += row_hash(row, header_element(p, row, static_cast<HeaderTensor>(tensor)));
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor)
#pragma unroll
            for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sums[tensor] += __shfl_xor_sync(kFullWarp, sums[tensor], distance);
        const u64 last_tokens = load_control(mailbox(), TPW_LAST_TOKENS_OFFSET);
        const u64 words[TPW_HEADER_WORDS] = {
            p.launch_fields | u64(valid) << TPW_HEADER_NUM_VALID_SHIFT,
            hash_field<TPW_HEADER_ANCHORS_BITS>(sums[0]) << TPW_HEADER_ANCHORS_SHIFT |
                hash_field<TPW_HEADER_TEMPERATURES_BITS>(sums[1]) << TPW_HEADER_TEMPERATURES_SHIFT,
            hash_field<TPW_HEADER_KEY_BITS>(sums[2]) << TPW_HEADER_KEY_SHIFT | hash_field<TPW_HEADER_OFFSET_BITS>(sums[3]) << TPW_HEADER_OFFSET_SHIFT |
                hash_field<TPW_HEADER_ROWS_BITS>(sums[4]) << TPW_HEADER_ROWS_SHIFT |
                hash_field<TPW_HEADER_LAST_TOKENS_BITS>(last_tokens) << TPW_HEADER_LAST_TOKENS_SHIFT};
        if constexpr (kPeerLogits) fence_system();
        if (lane < TPW_WORLD_SIZE)
#pragma unroll
            for (int word = 0; word < TPW_HEADER_WORDS; ++word)
                store_word<Scope::sys>(header_word(p.mailboxes[lane], block, p.rank, word), words[word], header_tag(block));
    }
};

}  // namespace tpw

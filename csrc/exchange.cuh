// How the CTAs of all ranks agree on a token: each stores its best key into a slot of the row's aggregator CTA, which reduces
// the slots of its GPU and stores the result into the mailbox of every rank, where every CTA polls one word a rank.
//
// Two hops of tagged 128-bit words: no atomics, no fences, nothing to reset; mailbox.cuh says why that is sound. The other
// designs that were measured, and how they compare: experiments/rendezvous.py. One of them, every CTA polling the slots of all
// CTAs of both ranks, is a fifth faster there for one row, yet made the walk slower (experiments/kernel_history.md, versions 7 to
// 10): CTAs that are early then poll the lines that late ones still write.
//
// All calls but those that say so are made by whole warps. Those that return bool return false when the walk has failed: drain.
#pragma once

#include "score.cuh"
#include "types.cuh"
#include "walk_params.cuh"
#include "watch.cuh"

namespace tpw {

static_assert((TPW_WORLD_SIZE & (TPW_WORLD_SIZE - 1)) == 0 && TPW_WORLD_SIZE <= 8, "ranks are reduced by butterfly");
constexpr int kSlotsPerLane = TPW_MAX_GRID / kWarpSize;
static_assert(TPW_MAX_GRID % kWarpSize == 0 && TPW_MAX_GRID <= TPW_MAX_CTAS, "every slot is polled by a lane");
static_assert(TPW_WORLD_SIZE * TPW_HEADER_WORDS <= kWarpSize, "a lane a header word");

// The kernel writes into peers' memory beside the mailboxes, which mailbox.cuh says the rules of.
constexpr bool kPeerLogits = TPW_LOGITS == 2;

// What the header hashes, in this order.
enum class HeaderTensor : int { anchors, temperatures, key, offset, rows, count };

struct WalkExchange {
    const WalkParams& p;
    // Of the launch, in shared memory: read where they are needed, instead of kept in registers that the dot products need.
    const volatile uint64_t* block_number;
    const volatile uint64_t* expiry;

    __device__ __forceinline__ char* mailbox() const { return p.mailboxes[p.rank]; }  // this rank's
    __device__ __forceinline__ u64 block() const { return *block_number; }
    __device__ __forceinline__ Exchange watch() const { return {p.mailboxes, p.status, static_cast<u32>(p.rank), *block_number, *expiry}; }

    // By one thread, before anything else.
    __device__ static __forceinline__ void start(const WalkParams& p, uint64_t* block_number, uint64_t* expiry) {
        const char* mailbox = p.mailboxes[p.rank];
        const u64 block = load_control(mailbox, TPW_BLOCK_OFFSET);
        // A peer may come to its first block much later than to the others: it still compiles, loads weights, captures graphs.
        const bool first = block == load_control(mailbox, TPW_FIRST_BLOCK_OFFSET);
        *block_number = block;
        *expiry = now_ns() + (first ? p.startup_deadline_ns : p.steady_deadline_ns);
    }

    // At the start of a block, by one warp of each CTA. `hashed(row, tensor)`: element `row` of a HeaderTensor.
    template <typename Hashed>
    __device__ __forceinline__ bool open(int lane, int cta, int batch, const Hashed& hashed) const {
        if (__any_sync(kFullWarp, lane == 0 && poisoned(watch()))) return false;
        if (cta == 0) {
            if (__any_sync(kFullWarp, lane == 0 && is_second())) return false;
            for (int row = lane; row < batch; row += kWarpSize)
                if (static_cast<u64>(hashed(row, HeaderTensor::anchors)) >= static_cast<u64>(p.target_vocab_size)) flag_clamped_anchor(watch(), row);
        }
        if (TPW_WORLD_SIZE == 1) return true;
        if (cta == 0) send_header(lane, batch, hashed);
        // Only who publishes must know that all ranks run the same launch; and CTA 0, should no row be valid. But nobody may
        // write into a peer's logits that what came before in the peer's stream still reads.
        if (!kPeerLogits && cta != 0 && cta >= batch) return true;
        bool agrees = true;
        if (lane < TPW_WORLD_SIZE * TPW_HEADER_WORDS) {
            const u32 source = lane / TPW_HEADER_WORDS, word = lane % TPW_HEADER_WORDS;
            const Site site{TPW_WAIT_HEADER, static_cast<u32>(p.rank), 0, 0};
            const Exchange own_watch = watch();
            u64 own = 0;
            agrees = await_word<Scope::sys>(own_watch, header_word(mailbox(), block(), p.rank, word), header_tag(block()), site, own) &&
                     header_agrees(own_watch, source, word, own);
        }
        if constexpr (kPeerLogits) fence_system();
        return __all_sync(kFullWarp, agrees);
    }

    // This CTA's best key of a row, which came to this step through token `previous`. By one lane.
    __device__ __forceinline__ void contribute(int step, int row, u32 previous, int cta, u64 key) const {
        const u64 tag = step_tag(block(), step, previous);
        store_word<Scope::gpu>(slot_word(mailbox(), row, cta), key, tag);
    }

    // The row's aggregator: waits for all CTAs of this GPU, publishes their best to all ranks.
    __device__ __forceinline__ bool aggregate(int lane, int step, int row, u32 previous, int ctas, u64& best) const {
        const u64 tag = step_tag(block(), step, previous);
        const char* slots = slot_word(mailbox(), row, lane);
        for (u32 polls = 1;; ++polls) {
            best = 0;
            int missing = -1;  // a CTA whose word isn't there yet
            u64 seen = tag;
#pragma unroll
            for (int i = 0; i < kSlotsPerLane; ++i) {
                const int cta = i * kWarpSize + lane;
                if (cta < ctas) {
                    const Word word = load_word<Scope::gpu>(slots + i * kWarpSize * TPW_WORD_BYTES);
                    best = max(best, word.key);
                    if (word.tag != tag) missing = cta, seen = word.tag;
                }
            }
            if (__all_sync(kFullWarp, missing < 0)) break;
            if (polls % POLLS_PER_LOOK == 0 && gives_up(missing >= 0, {TPW_WAIT_SLOT, u32(missing), u32(step), u32(row)}, tag, seen)) return false;
        }
        best = warp_max_key(best);
        if (lane < TPW_WORLD_SIZE) store_word<Scope::sys>(result_word(p.mailboxes[lane], block(), step, row, p.rank), best, tag);
        return true;
    }

    // The best keys of several rows over all ranks: lane i * TPW_WORLD_SIZE + rank waits for that rank's word of the i-th row,
    // `row` and `previous` being the lane's. Afterwards `key` is the row's best on all lanes of the row. Lanes that aren't
    // `active` only take part.
    __device__ __forceinline__ bool receive(int lane, bool active, int step, int row, u32 previous, u64& key) const {
        const u64 tag = step_tag(block(), step, previous);
        const u32 source = lane % TPW_WORLD_SIZE;
        const char* result = result_word(mailbox(), block(), step, row, source);
        Word word{0, tag};
        for (u32 polls = 1;; ++polls) {
            if (active) word = load_word<Scope::sys>(result);
            if (__all_sync(kFullWarp, word.tag == tag)) break;
            if (polls % POLLS_PER_LOOK == 0 && gives_up(word.tag != tag, {TPW_WAIT_RESULT, source, u32(step), u32(row)}, tag, word.tag)) return false;
        }
        key = word.key;
#pragma unroll
        for (int distance = 1; distance < TPW_WORLD_SIZE; distance *= 2) key = max(key, __shfl_xor_sync(kFullWarp, key, distance));
        return true;
    }

    // One thread, once every CTA has read all that a block may read of the line that this changes. Not after a failure, which
    // keeps out all launches until the host resets the mailbox.
    __device__ __forceinline__ void close(u64 last_tokens) const {
        atomicExch(reinterpret_cast<u32*>(mailbox() + TPW_IN_FLIGHT_OFFSET), 0u);
        store_control(mailbox(), TPW_LAST_TOKENS_OFFSET, last_tokens);
        store_control(mailbox(), TPW_BLOCK_OFFSET, block() + 1);
    }

    // By a whole warp, every few polls: true when the wait must be given up.
    __device__ __forceinline__ bool gives_up(bool stuck, Site site, u64 expected, u64 seen) const {
        return __any_sync(kFullWarp, stuck && hopeless(watch(), site, expected, seen));
    }

  private:
    __device__ __forceinline__ bool is_second() const {
        if (!is_second_in_flight(watch())) return false;
        fail(watch(), TPW_CODE_OVERLAP, {TPW_WAIT_HEADER, static_cast<u32>(p.rank), 0, 0}, 0, 0, 0);
        return true;
    }

    template <typename Hashed>
    __device__ __forceinline__ void send_header(int lane, int batch, const Hashed& hashed) const {
        constexpr int kTensors = static_cast<int>(HeaderTensor::count);
        u64 sums[kTensors] = {};
        for (int row = lane; row < batch; row += kWarpSize)
#pragma unroll
            for (int tensor = 0; tensor < kTensors; ++tensor) sums[tensor] += row_hash(row, hashed(row, static_cast<HeaderTensor>(tensor)));
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor)
#pragma unroll
            for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sums[tensor] += __shfl_xor_sync(kFullWarp, sums[tensor], distance);
        const u64 last_tokens = load_control(mailbox(), TPW_LAST_TOKENS_OFFSET);
        const u64 words[TPW_HEADER_WORDS] = {
            p.launch_fields | u64(batch) << TPW_HEADER_NUM_VALID_SHIFT,
            hash_field<TPW_HEADER_ANCHORS_BITS>(sums[0]) << TPW_HEADER_ANCHORS_SHIFT |
                hash_field<TPW_HEADER_TEMPERATURES_BITS>(sums[1]) << TPW_HEADER_TEMPERATURES_SHIFT,
            hash_field<TPW_HEADER_KEY_BITS>(sums[2]) << TPW_HEADER_KEY_SHIFT | hash_field<TPW_HEADER_OFFSET_BITS>(sums[3]) << TPW_HEADER_OFFSET_SHIFT |
                hash_field<TPW_HEADER_ROWS_BITS>(sums[4]) << TPW_HEADER_ROWS_SHIFT |
                hash_field<TPW_HEADER_LAST_TOKENS_BITS>(last_tokens) << TPW_HEADER_LAST_TOKENS_SHIFT};
        if constexpr (kPeerLogits) fence_system();
        if (lane < TPW_WORLD_SIZE)
#pragma unroll
            for (int word = 0; word < TPW_HEADER_WORDS; ++word)
                store_word<Scope::sys>(header_word(p.mailboxes[lane], block(), p.rank, word), words[word], header_tag(block()));
    }
};

}  // namespace tpw

// Waits that end: on the word, on a rank's poison, on divergence, or at the deadline. A failure fills in the status block
// and poisons every rank; then all CTAs of all ranks drain, each at its next look. Nothing traps, the context lives on.
// The device twin of tp_walk/status.py; every number is a macro from its status_defines().
//
// Ordering: the status block is the one message made of several locations. One thread, the one that claims it, stores the
// fields and then the code as a store-release of system scope; the host reads the code first and finds the fields behind
// it. Poison is one word, so needs none. Both are sticky until the host resets the runtime.
#pragma once

#include "mailbox.cuh"

namespace tpw {

// Looking for poison and at the clock costs more than a poll, and a wait that goes well ends within tens of polls.
constexpr u32 POLLS_PER_LOOK = 64;

struct Exchange {
    char* const* mailboxes;  // [TPW_WORLD_SIZE] every rank's mailbox as seen from this GPU, its own included
    char* status;            // device address of the status block: TPW_STATUS_BYTES of mapped host memory
    u32 rank;
    u64 block;
    u64 expiry;  // ns of globaltimer

    __device__ __forceinline__ char* mine() const { return mailboxes[rank]; }
};

// When a rank is missing, who waits for it holds up the others, and all their waits would expire together. The less a wait
// tells, the longer it lasts, so that the status names who is missing: a header is owed by its rank alone, a result also by
// ranks (this one too) that wait for a header, a slot also by CTAs that wait for a result. Many looks apart, and more than the
// turns of ranks that share a GPU in tests, during which nobody looks.
constexpr u32 GRACE_NS = 50'000'000;

// What a thread waits for: TPW_WAIT_*, the rank (or for a slot the CTA) that owes it, and where.
struct Site {
    u32 wait;
    u32 source;
    u32 step;
    u32 row;

    // After the launch's expiry.
    __device__ __forceinline__ u32 patience_ns() const {
        return wait == TPW_WAIT_HEADER ? 0 : wait == TPW_WAIT_SLOT ? 2 * GRACE_NS : GRACE_NS;
    }
};

__device__ __forceinline__ u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// ---- failures --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_status(char* status, u32 offset, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(status + offset)), "r"(value) : "memory");
}

__device__ __forceinline__ void store_status(char* status, u32 offset, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(status + offset)), "l"(value) : "memory");
}

__device__ __forceinline__ void write_status(char* status, u32 code, u32 origin, const Site& site, u32 field,
                                             u64 expected, u64 seen, u64 block) {
    store_status(status, TPW_STATUS_ORIGIN_OFFSET, origin);
    store_status(status, TPW_STATUS_WAIT_OFFSET, site.wait);
    store_status(status, TPW_STATUS_SOURCE_OFFSET, site.source);
    store_status(status, TPW_STATUS_STEP_OFFSET, site.step);
    store_status(status, TPW_STATUS_ROW_OFFSET, site.row);
    store_status(status, TPW_STATUS_FIELD_OFFSET, field);
    store_status(status, TPW_STATUS_EXPECTED_OFFSET, expected);
    store_status(status, TPW_STATUS_SEEN_OFFSET, seen);
    store_status(status, TPW_STATUS_BLOCK_OFFSET, block);
    asm volatile("st.release.sys.global.u32 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(status + TPW_STATUS_CODE_OFFSET)), "r"(code) : "memory");
}

// An anchor out of range can't stop a captured graph: it is clamped, and the host told of the last such block and row.
__device__ __forceinline__ void flag_clamped_anchor(const Exchange& exchange, u32 row) {
    store_status(exchange.status, TPW_STATUS_CLAMPED_ROW_OFFSET, row);
    store_status(exchange.status, TPW_STATUS_CLAMPED_BLOCK_OFFSET, exchange.block);
}

// True for the one thread of the rank that writes the status block, once between two resets.
__device__ __forceinline__ bool claim_status(const Exchange& exchange) {
    return atomicExch(reinterpret_cast<u32*>(exchange.mine() + TPW_CLAIM_OFFSET), 1u) == 0;
}

// By one thread of a launch, before any word of the block is touched: true if another launch of this rank is under way.
// Both would go by the same block number. Streams keep eager walks apart; graphs that are replayed at once are found here.
__device__ __forceinline__ bool is_second_in_flight(const Exchange& exchange) {
    return atomicExch(reinterpret_cast<u32*>(exchange.mine() + TPW_IN_FLIGHT_OFFSET), 1u) != 0;
}

__device__ constexpr u64 poison_key(u32 code, const Site& site, u32 field) {
    return u64(code) << TPW_POISON_CODE_SHIFT | u64(site.wait) << TPW_POISON_WAIT_SHIFT |
           u64(site.source) << TPW_POISON_SOURCE_SHIFT | u64(site.step) << TPW_POISON_STEP_SHIFT |
           u64(site.row) << TPW_POISON_ROW_SHIFT | u64(field) << TPW_POISON_FIELD_SHIFT;
}

template <u32 shift, u32 bits>
__device__ constexpr u32 poison_field(u64 key) {
    return u32(key >> shift) & ((1u << bits) - 1);
}

// This thread found the failure. The first of the rank tells the host and then every rank, its own included: the own word
// is what the rank's other CTAs drain on.
__device__ __forceinline__ void fail(const Exchange& exchange, u32 code, const Site& site, u32 field, u64 expected,
                                     u64 seen) {
    if (!claim_status(exchange)) return;
    write_status(exchange.status, code, exchange.rank, site, field, expected, seen, exchange.block);
    for (u32 destination = 0; destination < TPW_WORLD_SIZE; ++destination) {
        store_word<Scope::sys>(poison_word(exchange.mailboxes[destination], exchange.rank),
                               poison_key(code, site, field), header_tag(exchange.block));
    }
}

// A peer found the failure: its host knows, and now this one's does.
__device__ __forceinline__ void adopt(const Exchange& exchange, u32 origin, const Word& poison) {
    if (!claim_status(exchange)) return;
    const Site site{poison_field<TPW_POISON_WAIT_SHIFT, TPW_POISON_WAIT_BITS>(poison.key),
                    poison_field<TPW_POISON_SOURCE_SHIFT, TPW_POISON_SOURCE_BITS>(poison.key),
                    poison_field<TPW_POISON_STEP_SHIFT, TPW_POISON_STEP_BITS>(poison.key),
                    poison_field<TPW_POISON_ROW_SHIFT, TPW_POISON_ROW_BITS>(poison.key)};
    write_status(exchange.status, poison_field<TPW_POISON_CODE_SHIFT, TPW_POISON_CODE_BITS>(poison.key), origin, site,
                 poison_field<TPW_POISON_FIELD_SHIFT, TPW_POISON_FIELD_BITS>(poison.key), 0, 0, tag_block(poison.tag));
}

// True once any rank, this one too, has failed since the last reset. Every launch looks before it does anything.
__device__ __forceinline__ bool poisoned(const Exchange& exchange) {
    for (u32 origin = 0; origin < TPW_WORLD_SIZE; ++origin) {
        const Word poison = load_word<Scope::sys>(poison_word(exchange.mine(), origin));
        if (poison.tag != 0) {
            adopt(exchange, origin, poison);
            return true;
        }
    }
    return false;
}

// ---- waits -----------------------------------------------------------------------------------------------------------

// The slow look of a wait that has last seen `seen` in place of `expected`: true when the wait must be given up.
__device__ __noinline__ bool hopeless(const Exchange exchange, const Site site, u64 expected, u64 seen) {
    if (poisoned(exchange)) return true;
    if (diverged(expected, seen)) {
        fail(exchange, TPW_CODE_MISMATCH, site, 0, expected, seen);
        return true;
    }
    if (now_ns() >= exchange.expiry + site.patience_ns()) {
        fail(exchange, TPW_CODE_TIMEOUT, site, 0, expected, seen);
        return true;
    }
    return false;
}

// Waits for `tag` in `word`. False when the walk has failed: the thread must drain, and `key` is unchanged.
template <Scope scope>
__device__ __forceinline__ bool await_word(const Exchange& exchange, const char* word, u64 tag, const Site& site,
                                           u64& key) {
    for (u32 polls = 1;; ++polls) {
        const Word seen = load_word<scope>(word);
        if (seen.tag == tag) {
            key = seen.key;
            return true;
        }
        if (polls % POLLS_PER_LOOK == 0 && hopeless(exchange, site, tag, seen.tag)) return false;
    }
}

// Waits for word `word` of rank `source`'s header and compares it with this rank's own. False when the walk has failed.
__device__ __forceinline__ bool header_agrees(const Exchange& exchange, u32 source, u32 word, u64 own) {
    const Site site{TPW_WAIT_HEADER, source, 0, 0};
    u64 theirs = own;
    if (!await_word<Scope::sys>(exchange, header_word(exchange.mine(), exchange.block, source, word),
                                header_tag(exchange.block), site, theirs)) {
        return false;
    }
    if (theirs == own) return true;
    // The position of the lowest differing bit names the field on the host.
    fail(exchange, TPW_CODE_MISMATCH, site, word * 64 + __ffsll(own ^ theirs) - 1, own, theirs);
    return false;
}

}  // namespace tpw

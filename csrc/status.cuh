// How a kernel tells of a failure: the status block in mapped host memory, and the poison word of every rank's mailbox.
// The device twin of tp_walk/status.py; every number is a macro from its status_defines().
//
// Ordering: the status block is the one message made of several locations. One thread, the one that claims it, stores the
// fields and then the code as a store-release of system scope; the host reads the code first and finds the fields behind
// it. Poison is one word, so needs none. Both are sticky until the host resets the runtime.
#pragma once

#include "mailbox.cuh"

namespace tpw {

enum class WalkCode : uint32_t { kTimeout = TPW_CODE_TIMEOUT, kMismatch = TPW_CODE_MISMATCH };

enum WaitingFor : uint32_t {
    kWaitingForHeader = TPW_WAITING_FOR_HEADER,
    kWaitingForCta = TPW_WAITING_FOR_CTA,
    kWaitingForRank = TPW_WAITING_FOR_RANK,
};

struct WalkStatus;  // TPW_STATUS_BYTES bytes, at the offsets TPW_STATUS_*_OFFSET

// What failed, and where. source: the rank that was waited for, or the CTA. field: position of the lowest bit in which two
// headers differ, word * 64 + bit. expected, seen: tags, or where headers differ the keys.
struct Failure {
    WalkCode code;
    WaitingFor waiting_for;
    uint32_t source;
    uint32_t step;
    uint32_t row;
    uint32_t field;
    uint64_t expected;
    uint64_t seen;
};

__device__ __forceinline__ uint64_t status_address(WalkStatus* status, int offset) {
    return __cvta_generic_to_global(reinterpret_cast<unsigned char*>(status) + offset);
}

__device__ __forceinline__ void store_status(WalkStatus* status, int offset, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(status_address(status, offset)), "r"(value) : "memory");
}

__device__ __forceinline__ void store_status(WalkStatus* status, int offset, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(status_address(status, offset)), "l"(value) : "memory");
}

__device__ __forceinline__ void write_status(WalkStatus* status, const Failure& failure, int origin, uint64_t block) {
    store_status(status, TPW_STATUS_ORIGIN_OFFSET, static_cast<uint32_t>(origin));
    store_status(status, TPW_STATUS_WAITING_FOR_OFFSET, static_cast<uint32_t>(failure.waiting_for));
    store_status(status, TPW_STATUS_SOURCE_OFFSET, failure.source);
    store_status(status, TPW_STATUS_STEP_OFFSET, failure.step);
    store_status(status, TPW_STATUS_ROW_OFFSET, failure.row);
    store_status(status, TPW_STATUS_FIELD_OFFSET, failure.field);
    store_status(status, TPW_STATUS_EXPECTED_OFFSET, failure.expected);
    store_status(status, TPW_STATUS_SEEN_OFFSET, failure.seen);
    store_status(status, TPW_STATUS_BLOCK_OFFSET, block);
    asm volatile("st.release.sys.global.u32 [%0], %1;"
                 ::"l"(status_address(status, TPW_STATUS_CODE_OFFSET)), "r"(static_cast<uint32_t>(failure.code)) : "memory");
}

// An anchor out of range can't stop a captured graph: it is clamped, and the host told of the last such block and row.
__device__ __forceinline__ void flag_clamped_anchor(WalkStatus* status, uint64_t block, int row) {
    store_status(status, TPW_STATUS_CLAMPED_ROW_OFFSET, static_cast<uint32_t>(row));
    store_status(status, TPW_STATUS_CLAMPED_BLOCK_OFFSET, block);
}

// True for the one thread of the rank that writes the status block, once between two resets.
__device__ __forceinline__ bool claim_status(unsigned char* mailbox) {
    return atomicExch(reinterpret_cast<uint32_t*>(mailbox + TPW_CLAIM_OFFSET), 1u) == 0;
}

__device__ constexpr uint64_t poison_key(const Failure& failure) {
    return uint64_t(failure.code) << TPW_POISON_CODE_SHIFT | uint64_t(failure.waiting_for) << TPW_POISON_WAITING_FOR_SHIFT |
           uint64_t(failure.source) << TPW_POISON_SOURCE_SHIFT | uint64_t(failure.step) << TPW_POISON_STEP_SHIFT |
           uint64_t(failure.row) << TPW_POISON_ROW_SHIFT | uint64_t(failure.field) << TPW_POISON_FIELD_SHIFT;
}

template <int shift, int bits>
__device__ constexpr uint32_t poison_field(uint64_t key) {
    return static_cast<uint32_t>(key >> shift) & ((1u << bits) - 1);
}

__device__ constexpr Failure failure_of(uint64_t key) {
    return {WalkCode(poison_field<TPW_POISON_CODE_SHIFT, TPW_POISON_CODE_BITS>(key)),
            WaitingFor(poison_field<TPW_POISON_WAITING_FOR_SHIFT, TPW_POISON_WAITING_FOR_BITS>(key)),
            poison_field<TPW_POISON_SOURCE_SHIFT, TPW_POISON_SOURCE_BITS>(key),
            poison_field<TPW_POISON_STEP_SHIFT, TPW_POISON_STEP_BITS>(key),
            poison_field<TPW_POISON_ROW_SHIFT, TPW_POISON_ROW_BITS>(key),
            poison_field<TPW_POISON_FIELD_SHIFT, TPW_POISON_FIELD_BITS>(key),
            0,
            0};
}

// This thread found a failure. The first of its rank tells the host and then every rank, its own included: the own word is
// what the rank's other CTAs give up on.
__device__ __forceinline__ void raise_failure(unsigned char* const* mailboxes, WalkStatus* status, int rank, uint64_t block,
                                              const Failure& failure) {
    if (!claim_status(mailboxes[rank])) return;
    write_status(status, failure, rank, block);
    for (int destination = 0; destination < TPW_WORLD_SIZE; ++destination)
        store_word<Scope::kSys>(poison_word(mailboxes[destination], rank), {poison_key(failure), header_tag(block)});
}

// This thread found rank `origin`'s poison: that rank's host knows, and now this one's does.
__device__ __forceinline__ void adopt_failure(unsigned char* mailbox, WalkStatus* status, int origin, Word poison) {
    if (claim_status(mailbox)) write_status(status, failure_of(poison.key), origin, tag_block(poison.tag));
}

}  // namespace tpw

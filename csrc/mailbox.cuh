// The words through which CTAs and ranks agree on a token: the device twin of tp_walk/mailbox.py.
// Every number is a macro TPW_* from MailboxLayout.defines(); none is written twice.
//
// Memory ordering
// ---------------
// A word is {key, tag}, 16 bytes, 16-byte aligned, stored by one st.relaxed.b128 and read by one ld.relaxed.b128.
// .b128 is a scalar type, so the rule of the PTX memory model that splits *vector* accesses into separate operations in
// no particular order (v2.b64) doesn't apply: a load takes key and tag from one store. A pair of accesses is morally
// strong when both are strong (.relaxed is), overlap completely (same word) and have each other's thread in scope. Hence
//   slot    st.gpu by a CTA              -> ld.gpu by its row's aggregator, same GPU
//   result  st.sys by an aggregator      -> ld.sys by every CTA of the destination, another GPU
//   header  st.sys by CTA 0              -> ld.sys by CTA 0 and the aggregators of the destination
//   poison  st.sys by the failing thread -> ld.sys by whoever polls
// Coherence orders the stores to a word; a reader that sees the tag it waits for has the key of that very store. The key
// is all that the reader uses: no *other* location is read on the strength of a word, so nothing has to be published
// before it and no release or acquire is needed. What remains is that no word is overwritten before its last reader:
//   slot k -> k+1                   same place, next step. A CTA stores k+1 after it has read all results of k; they
//                                   exist only once the row's aggregator had read every slot of k
//   result k -> k+2                 same place, two steps on. A rank publishes k+2 after results k+1 of all ranks; those
//                                   need a slot k+1 of each CTA, which that CTA stores after it has read the results of k
//   result, header, block n -> n+2  a rank enters n+2 once it has seen every peer's header of n+1 (CTA 0 waits for them
//                                   even when no row is valid), and a peer stores that after its launch n is complete
// Each is a chain of loads, of stores whose value or execution depends on them, and of loads that observe those stores.
// Losing a word to its successor would close the chain into a cycle, which the no-thin-air axiom forbids; no fence is
// involved. It binds the kernel to this much:
//   - all threads of a CTA that read results of step k are past a __syncthreads() before the CTA stores a slot of k+1;
//   - an aggregator stores nothing of a block before it has seen and compared every peer's header of that block;
//   - launches of one rank don't overlap: no word is touched before the launch before is complete (stream order, or
//     griddepcontrol.wait under programmatic dependent launch);
//   - a GPU names a location by one address: its own mailbox by its own pointer, never through an IPC mapping.
// tests/test_protocol_model.py walks through every interleaving of a small case; tests/test_ptx.py holds the compiled
// kernels to these instructions.
#pragma once

#include "types.cuh"

#ifndef TPW_RESULTS_OFFSET
#error "compile with the macros of MailboxLayout.defines()"
#endif

namespace tpw {

enum class Scope { kGpu, kSys };

struct __align__(16) Word {
    uint64_t key;
    uint64_t tag;
};

static_assert(sizeof(Word) == TPW_WORD_BYTES, "a word is one 128-bit access");

template <Scope scope>
__device__ __forceinline__ void store_word(unsigned char* address, Word word) {
    const uint64_t at = __cvta_generic_to_global(address);
    if constexpr (scope == Scope::kSys) {
        asm volatile("{ .reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.sys.global.b128 [%0], w; }"
                     ::"l"(at), "l"(word.key), "l"(word.tag) : "memory");
    } else {
        asm volatile("{ .reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.gpu.global.b128 [%0], w; }"
                     ::"l"(at), "l"(word.key), "l"(word.tag) : "memory");
    }
}

template <Scope scope>
__device__ __forceinline__ Word load_word(const unsigned char* address) {
    const uint64_t at = __cvta_generic_to_global(address);
    Word word;
    if constexpr (scope == Scope::kSys) {
        asm volatile("{ .reg .b128 w; ld.relaxed.sys.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
                     : "=l"(word.key), "=l"(word.tag) : "l"(at) : "memory");
    } else {
        asm volatile("{ .reg .b128 w; ld.relaxed.gpu.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
                     : "=l"(word.key), "=l"(word.tag) : "l"(at) : "memory");
    }
    return word;
}

// ---- tags ------------------------------------------------------------------------------------------------------------

__device__ constexpr uint32_t chain(uint32_t previous) {
    return (previous * uint32_t{TPW_CHAIN_MULTIPLIER}) >> (32 - TPW_CHAIN_BITS);
}

// Of a row's words at `step`, reached through token `previous` (the anchor at step 0). Tags are compared for equality
// alone, so that wrap-around of the block number is harmless.
__device__ constexpr uint64_t step_tag(uint64_t block, int step, uint32_t previous) {
    return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | uint64_t{chain(previous)} << TPW_PHASE_BITS | uint32_t(step + 1);
}

__device__ constexpr uint64_t header_tag(uint64_t block) {
    return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | TPW_HEADER_PHASE;
}

__device__ constexpr uint64_t tag_block(uint64_t tag) { return tag >> (TPW_PHASE_BITS + TPW_CHAIN_BITS); }

// Same block and phase, reached through another token: the writer and the reader disagree about an earlier step. The
// word that is waited for will never come.
__device__ constexpr bool diverged(uint64_t expected, uint64_t seen) {
    constexpr uint64_t kChainMask = ((1ull << TPW_CHAIN_BITS) - 1) << TPW_PHASE_BITS;
    return expected != seen && ((expected ^ seen) & ~kChainMask) == 0;
}

// ---- addresses -------------------------------------------------------------------------------------------------------
// The offsets are constexpr so that a test can compare them with MailboxLayout's where there is no GPU.

__device__ constexpr uint32_t poison_offset(int source) { return TPW_POISON_OFFSET + source * TPW_WORD_BYTES; }

__device__ constexpr uint32_t header_offset(uint64_t block, int source, int word) {
    return TPW_HEADERS_OFFSET + uint32_t(block & 1) * TPW_HEADERS_BLOCK_STRIDE + source * TPW_HEADERS_SOURCE_STRIDE +
           word * TPW_WORD_BYTES;
}

__device__ constexpr uint32_t result_offset(uint64_t block, int step, int row, int source) {
    return TPW_RESULTS_OFFSET + uint32_t(block & 1) * TPW_RESULTS_BLOCK_STRIDE + (step & 1) * TPW_RESULTS_STEP_STRIDE +
           row * TPW_RESULTS_ROW_STRIDE + source * TPW_WORD_BYTES;
}

__device__ constexpr uint32_t slot_offset(int row, int cta) {
    return TPW_SLOTS_OFFSET + row * TPW_SLOTS_ROW_STRIDE + cta * TPW_WORD_BYTES;
}

__device__ __forceinline__ unsigned char* poison_word(unsigned char* mailbox, int source) {
    return mailbox + poison_offset(source);
}

__device__ __forceinline__ unsigned char* header_word(unsigned char* mailbox, uint64_t block, int source, int word) {
    return mailbox + header_offset(block, source, word);
}

__device__ __forceinline__ unsigned char* result_word(unsigned char* mailbox, uint64_t block, int step, int row, int source) {
    return mailbox + result_offset(block, step, row, source);
}

__device__ __forceinline__ unsigned char* slot_word(unsigned char* mailbox, int row, int cta) {
    return mailbox + slot_offset(row, cta);
}

// ---- header fields ---------------------------------------------------------------------------------------------------

// A header key's share of one field: header_field(v, TPW_HEADER_<NAME>_SHIFT, TPW_HEADER_<NAME>_BITS). Hashes are cut.
__device__ constexpr uint64_t header_field(uint64_t value, int shift, int bits) {
    return (value & ((1ull << bits) - 1)) << shift;
}

// ---- this rank's own line --------------------------------------------------------------------------------------------
// Written by the launch before, or by the host while nothing runs: complete before this launch starts. Relaxed, because
// a CTA with nothing to do may look while CTA 0 is already done; such a CTA uses no word of the block.

__device__ __forceinline__ uint64_t load_own(const unsigned char* mailbox, int offset) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(value) : "l"(__cvta_generic_to_global(mailbox + offset)) : "memory");
    return value;
}

__device__ __forceinline__ void store_own(unsigned char* mailbox, int offset, uint64_t value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(mailbox + offset)), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_block(const unsigned char* mailbox) { return load_own(mailbox, TPW_BLOCK_OFFSET); }

__device__ __forceinline__ void store_block(unsigned char* mailbox, uint64_t block) {
    store_own(mailbox, TPW_BLOCK_OFFSET, block);
}

}  // namespace tpw

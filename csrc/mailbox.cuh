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
//   post    st.sys by a CTA              -> ld.sys by every CTA of the destination
//   header  st.sys by CTA 0              -> ld.sys by CTA 0 of the destination, and those of its CTAs that store into peers' memory
//   poison  st.sys by the failing thread -> ld.sys by whoever polls
//   partial st.gpu by a CTA              -> ld.gpu by its row's aggregator, same GPU
//   sum     st.sys by an aggregator      -> ld.sys by CTA 0 of the destination
//   columns st.sys by a CTA              -> ld.sys by CTA 0 of the destination; the one that publishes other memory (below)
// Coherence orders the stores to a word; a reader that sees the tag it waits for has the key of that very store. The key
// is all that the reader uses: no *other* location is read on the strength of a word, so nothing has to be published
// before it and no release or acquire is needed. What remains is that no word is overwritten before its last reader:
//   slot k -> k+1                   same place, next step. A CTA stores k+1 after it has read all results of k; they
//                                   exist only once the row's aggregator had read every slot of k
//   result k -> k+2                 same place, two steps on. A rank publishes k+2 after results k+1 of all ranks; those
//                                   need a slot k+1 of each CTA, which that CTA stores after it has read the results of k
//   post k -> k+2                   same place, two steps on. A CTA posts k+2 after it has read the posts k+1 of all CTAs of
//                                   all ranks, each of which was stored after its CTA had read all posts of k
//   result, header, post, block n -> n+2
//                                   a rank enters n+2 once it has seen every peer's header of n+1 (CTA 0 waits for them
//                                   even when no row is valid), and a peer stores that after its launch n is complete.
//                                   Results and posts are protected twice: by this, and by their writers' wait for headers
//   partial k -> k+2                as a result or post: its aggregator reads the partials of k before it publishes, or posts, k+1
//   sum, columns, block n -> n+1    whoever stores them has seen the destination's header of n+1, or its CTA has, and that
//                                   is sent after launch n of the destination, which reads them, is complete
// Where every rank holds all of W2 (int8, int8_split), ranks don't agree on each step; a block then is either one rank's
// affair, or begins with csrc/spread.cu, every CTA of which waits for all ranks' headers before it sends anything:
//   header n -> m   a rank sends m after its spread n is complete, so after the arrivals n of every peer's CTAs, each of
//                   which had seen all headers of n
//   arrival n -> m, token n -> m   same place, the next spread block. A rank sends them once it has seen the destination's
//                   header m, which that stores after its launches of n are complete
// What an arrival announces lies elsewhere: those words alone are released and acquired; csrc/spread.cu has that argument.
// Each is a chain of loads, of stores whose value or execution depends on them, and of loads that observe those stores.
// Losing a word to its successor would close the chain into a cycle, which the no-thin-air axiom forbids; no fence is
// involved. It binds the kernel to this much:
//   - the warp of a CTA that reads a row's results of step k is the one that stores the row's slot of k+1. The posts of k are
//     read by all service warps of a CTA, which meet before one of them posts k+1;
//   - who publishes to peers (an aggregator, or every CTA that posts) stores nothing of a block before its CTA has seen and
//     compared every peer's header of that block (one warp does; the others follow it through the barriers of the first
//     pass, which none has keys of before);
//   - launches of one rank don't overlap: no word is touched before the launch before is complete (stream order, or
//     griddepcontrol.wait under programmatic dependent launch);
//   - a GPU names a location by one address: its own mailbox by its own pointer, never through an IPC mapping.
//
// Logits in peers' memory (logits "full") are not words, so here order matters:
//   a kernel ends with all columns  CTA: columns to every rank, barrier, fence.acq_rel.sys, columns word to every rank.
//                                   CTA 0 of the destination: all columns words, fence.acq_rel.sys, end of the kernel.
//                                   What follows in the destination's stream sees the columns (causality order)
//   no column comes too early       Readers of block n are before launch n+1 in the destination's stream. CTA 0 of n+1:
//                                   fence.acq_rel.sys, header. EVERY CTA that will write there: header, fence.acq_rel.sys,
//                                   columns. So in such a kernel all CTAs wait for headers, not aggregators alone;
//                                   but none that writes nothing, when no row is valid: CTA 0 doesn't wait for its CTAs then
// After a failure neither holds until the reset: a peer that hasn't looked yet may still be writing, for a pass at most.
// tests/test_protocol_model.py and tests/test_logits_model.py walk through every interleaving of small cases; tests/test_ptx.py holds
// the compiled kernels to these instructions.
#pragma once

#ifndef TPW_RESULTS_OFFSET
#error "compile with the macros of MailboxLayout.defines()"
#endif

namespace tpw {

using u32 = unsigned int;
using u64 = unsigned long long;

enum class Scope { gpu, sys };

struct Word {
    u64 key;
    u64 tag;
};

static_assert(sizeof(Word) == TPW_WORD_BYTES, "a word is one 128-bit access");

template <Scope scope>
__device__ __forceinline__ void store_word(char* address, u64 key, u64 tag) {
    const u64 at = __cvta_generic_to_global(address);
    if constexpr (scope == Scope::sys) {
        asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.sys.global.b128 [%0], word; }"
                     ::"l"(at), "l"(key), "l"(tag) : "memory");
    } else {
        asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }"
                     ::"l"(at), "l"(key), "l"(tag) : "memory");
    }
}

template <Scope scope>
__device__ __forceinline__ Word load_word(const char* address) {
    const u64 at = __cvta_generic_to_global(address);
    Word word;
    if constexpr (scope == Scope::sys) {
        asm volatile("{ .reg .b128 word; ld.relaxed.sys.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
                     : "=l"(word.key), "=l"(word.tag) : "l"(at) : "memory");
    } else {
        asm volatile("{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
                     : "=l"(word.key), "=l"(word.tag) : "l"(at) : "memory");
    }
    return word;
}

// Into `word` if `wanted`: several of them side by side without a branch.
__device__ __forceinline__ void load_word_if(bool wanted, const char* address, Word& word) {
    const u64 at = __cvta_generic_to_global(address);
    asm volatile("{ .reg .b128 word; .reg .pred wanted; setp.ne.u32 wanted, %3, 0; mov.b128 word, {%0, %1};\n"
                 "  @wanted ld.relaxed.sys.global.b128 word, [%2];\n  mov.b128 {%0, %1}, word; }"
                 : "+l"(word.key), "+l"(word.tag) : "l"(at), "r"(u32(wanted)) : "memory");
}

// ---- tags ------------------------------------------------------------------------------------------------------------

__device__ constexpr u32 chain(u32 previous) {
    return (previous * u32(TPW_CHAIN_MULTIPLIER)) >> (32 - TPW_CHAIN_BITS);
}

// Of a row's words at `step`, reached through token `previous` (the anchor at step 0). Tags are compared for equality
// alone, so that wrap-around of the block number is harmless.
__device__ constexpr u64 step_tag(u64 block, u32 step, u32 previous) {
    return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | u64(chain(previous)) << TPW_PHASE_BITS | (step + 1);
}

__device__ constexpr u64 header_tag(u64 block) {
    return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | TPW_HEADER_PHASE;
}

__device__ constexpr u64 logits_tag(u64 block) { return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | TPW_LOGITS_PHASE; }

__device__ constexpr u64 lse_tag(u64 block, u32 step) { return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | (step + 1); }

__device__ constexpr u64 tag_block(u64 tag) { return tag >> (TPW_PHASE_BITS + TPW_CHAIN_BITS); }

// Same block and phase, reached through another token: the writer and the reader disagree about an earlier step, and the
// word that is waited for will never come.
__device__ constexpr bool diverged(u64 expected, u64 seen) {
    constexpr u64 chain_mask = ((1ull << TPW_CHAIN_BITS) - 1) << TPW_PHASE_BITS;
    return expected != seen && ((expected ^ seen) & ~chain_mask) == 0;
}

// ---- addresses -------------------------------------------------------------------------------------------------------
// The offsets are constexpr so that a test can compare them with MailboxLayout's where there is no GPU.

__device__ constexpr u32 poison_offset(u32 source) { return TPW_POISON_OFFSET + source * TPW_WORD_BYTES; }

__device__ constexpr u32 header_offset(u64 block, u32 source, u32 word) {
    return TPW_HEADERS_OFFSET + u32(block & 1) * TPW_HEADERS_BLOCK_STRIDE + source * TPW_HEADERS_SOURCE_STRIDE +
           word * TPW_WORD_BYTES;
}

__device__ constexpr u32 result_offset(u64 block, u32 step, u32 row, u32 source) {
    return TPW_RESULTS_OFFSET + u32(block & 1) * TPW_RESULTS_BLOCK_STRIDE + (step & 1) * TPW_RESULTS_STEP_STRIDE +
           row * TPW_RESULTS_ROW_STRIDE + source * TPW_WORD_BYTES;
}

__device__ constexpr u32 slot_offset(u32 row, u32 cta) {
    return TPW_SLOTS_OFFSET + row * TPW_SLOTS_ROW_STRIDE + cta * TPW_WORD_BYTES;
}

// `word`: source rank * CTAs of a rank + CTA.
__device__ constexpr u32 post_offset(u64 block, u32 step, u32 copy, u32 word) {
    return TPW_POSTS_OFFSET + u32(block & 1) * TPW_POSTS_BLOCK_STRIDE + (step & 1) * TPW_POSTS_STEP_STRIDE + copy * TPW_POSTS_COPY_STRIDE +
           word * TPW_WORD_BYTES;
}

__device__ constexpr u32 arrival_offset(u32 source, u32 cta) {
    return TPW_ARRIVALS_OFFSET + source * TPW_ARRIVALS_SOURCE_STRIDE + cta * TPW_ARRIVALS_CTA_STRIDE;
}

__device__ constexpr u32 token_offset(u32 row, u32 step) {
    return TPW_TOKENS_OFFSET + row * TPW_TOKENS_ROW_STRIDE + step * TPW_WORD_BYTES;
}

__device__ constexpr u32 partial_offset(u32 step, u32 row, u32 cta) {
    return TPW_PARTIALS_OFFSET + (step & 1) * TPW_PARTIALS_STEP_STRIDE + row * TPW_PARTIALS_ROW_STRIDE + cta * TPW_WORD_BYTES;
}

__device__ constexpr u32 sum_offset(u32 step, u32 row, u32 source) {
    return TPW_SUMS_OFFSET + step * TPW_SUMS_STEP_STRIDE + row * TPW_SUMS_ROW_STRIDE + source * TPW_WORD_BYTES;
}

__device__ constexpr u32 columns_offset(u32 source, u32 cta) {
    return TPW_COLUMNS_OFFSET + source * TPW_COLUMNS_SOURCE_STRIDE + cta * TPW_WORD_BYTES;
}

__device__ __forceinline__ char* poison_word(char* mailbox, u32 source) { return mailbox + poison_offset(source); }

__device__ __forceinline__ char* header_word(char* mailbox, u64 block, u32 source, u32 word) {
    return mailbox + header_offset(block, source, word);
}

__device__ __forceinline__ char* result_word(char* mailbox, u64 block, u32 step, u32 row, u32 source) {
    return mailbox + result_offset(block, step, row, source);
}

__device__ __forceinline__ char* slot_word(char* mailbox, u32 row, u32 cta) { return mailbox + slot_offset(row, cta); }

__device__ __forceinline__ char* post_word(char* mailbox, u64 block, u32 step, u32 copy, u32 word) {
    return mailbox + post_offset(block, step, copy, word);
}

__device__ __forceinline__ char* arrival_word(char* mailbox, u32 source, u32 cta) {
    return mailbox + arrival_offset(source, cta);
}

__device__ __forceinline__ char* token_word(char* mailbox, u32 row, u32 step) { return mailbox + token_offset(row, step); }

__device__ __forceinline__ char* partial_word(char* mailbox, u32 step, u32 row, u32 cta) { return mailbox + partial_offset(step, row, cta); }

__device__ __forceinline__ char* sum_word(char* mailbox, u32 step, u32 row, u32 source) { return mailbox + sum_offset(step, row, source); }

__device__ __forceinline__ char* columns_word(char* mailbox, u32 source, u32 cta) { return mailbox + columns_offset(source, cta); }

// Orders all that this thread knows of, also by a barrier, before and after, for all GPUs: around a word that publishes
// other memory.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- header fields ---------------------------------------------------------------------------------------------------

// A 64-bit finaliser (Stafford's mix 13, as in splitmix64).
__device__ constexpr u64 mix64(u64 value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

// A tensor's hash is the wrapping sum of its elements' row_hash, in any order; a header field takes its upper bits.
__device__ constexpr u64 row_hash(u32 row, u64 value) { return mix64(value + mix64(row + 1)); }

template <u32 bits>
__device__ constexpr u64 hash_field(u64 sum) {
    return sum >> (64 - bits);
}

// ---- this rank's own line --------------------------------------------------------------------------------------------
// Written by the launch before, or by the host while nothing runs: complete before this launch starts. Relaxed, because
// a CTA with nothing to do may look while CTA 0 is already done; such a CTA uses no word of the block.

__device__ __forceinline__ u64 load_control(const char* mailbox, u32 offset) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(value) : "l"(__cvta_generic_to_global(mailbox + offset)) : "memory");
    return value;
}

__device__ __forceinline__ void store_control(char* mailbox, u32 offset, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(mailbox + offset)), "l"(value) : "memory");
}

}  // namespace tpw

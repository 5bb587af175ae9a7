// What one launch of the walk is given. `kernels.WalkParams` is the host half: same fields, same order; tests/test_walk_params.py
// compares every offset.
#pragma once

#include "types.cuh"

namespace tpw {

constexpr int kMaxWorld = 8;

struct WalkParams {
    // weights, fixed for the life of a runtime
    const uint4* w2_fragments;   // this rank's rows of W2 in MMA fragment order: [tile][k step][lane] of 16 bytes
    const float* row_scales;     // int8 only: [shard width] fp32, one a row of W2
    const uint4* u_rows;         // [target vocabulary] of 2 r bytes: what u is made from, see URow
    const float* u_scales;       // int8 only: [target vocabulary] fp32
    const int64_t* d2t;          // [vocabulary] or null: drafted id -> target id
    char* mailboxes[kMaxWorld];  // every rank's mailbox as this rank sees it
    char* status;                // host-mapped
    uint64_t startup_deadline_ns;
    uint64_t steady_deadline_ns;
    int64_t vocab_size;          // ids that may be drafted
    int64_t target_vocab_size;   // rows of W1, so of u_rows
    int32_t shard_start;
    int32_t shard_width;
    int32_t rank;

    // this launch
    const void* base_logits;     // column 0 is this shard's first id
    int64_t base_stride_row;     // in elements
    int64_t base_stride_step;
    const void* anchors;
    int64_t anchors_stride;
    const float* temperatures;   // [batch] or null: all greedy
    int64_t temperatures_stride;
    const int64_t* key_pointer;  // null: `key` is literal
    const int64_t* rows;         // null: the batch slot
    int64_t* offset_pointer;     // null: `offset` is literal; else read, and advanced by one at the end
    uint64_t key;
    uint64_t offset;
    int64_t key_stride;          // 0: one key for the batch
    int64_t rows_stride;
    int64_t offset_stride;
    int64_t* tokens;
    int64_t tokens_stride_row;
    int64_t tokens_stride_step;
    void* logits[kMaxWorld];     // where this rank's columns go: [0] alone, or (logits "full") every rank's memory; null: nowhere
    int64_t logits_stride_row;
    int64_t logits_stride_step;
    float* lse;                  // [batch, gamma] contiguous, or null
    const int32_t* num_valid;    // null: all rows
    uint64_t launch_fields;      // what all ranks must agree on, packed by mailbox.pack_header
    int32_t batch;
    int32_t gamma;
    int32_t anchors_are_int32;
    int32_t logits_sampled_rows_only;
    int32_t shares;              // ranks that the batch is split over; 1: this one walks all of it
    int32_t is_opened;           // a launch of this block came before, csrc/spread.cu: it has compared headers
    int32_t base_aligned;        // base logits of every row and step begin on the size of four
    const int32_t* batch_rows;   // null, or [rows]: row i of the walk is this row of the batch, of all that is given and written
    const int32_t* first_step;   // null: 0; else the steps before are skipped, and their last token is found in `tokens`
};

static_assert(sizeof(WalkParams) == TPW_PARAMS_BYTES, "host and device have the same fields");

}  // namespace tpw

// The rows of the batch as a launch is given them, and which of them this rank walks.
#pragma once

#include "types.cuh"
#include "walk_params.cuh"

namespace tpw {

// Ranks that W2 is split over, and that so agree on every token; 1 where each rank holds all of W2.
constexpr int kAgreeingRanks = TPW_AGREEING_RANKS;

// Rows of the batch that are valid.
__device__ __forceinline__ int valid_rows(const WalkParams& p) { return p.num_valid ? min(max(*p.num_valid, 0), p.batch) : p.batch; }

// ---- the batch split over the ranks ----------------------------------------------------------------------------------
// Rank i walks the rows i, i + shares, i + 2 * shares, ...: whatever num_valid is, shares differ by one row at most.

constexpr bool kMaySplit = TPW_WORLD_SIZE > 1 && kAgreeingRanks == 1;

__device__ __forceinline__ bool is_split(const WalkParams& p) { return kMaySplit && p.shares > 1; }

// Row `row` of the walk as a row of the base logits: where only some rows are walked they are chosen by batch_rows; a share's
// base logits come without those of others.
__device__ __forceinline__ int base_row(const WalkParams& p, int row) { return p.batch_rows ? p.batch_rows[row] : row; }

// Row `row` of this rank's share, or of the rows that were chosen, as a row of the batch.
__device__ __forceinline__ int batch_row(const WalkParams& p, int row) { return is_split(p) ? row * p.shares + p.rank : base_row(p, row); }

// Of `valid` rows, how many are rank `rank`'s.
__device__ __forceinline__ int share_of(int valid, int shares, int rank) { return shares > 1 ? (valid + shares - 1 - rank) / shares : valid; }

// ---- a row's elements, by its place in the batch ---------------------------------------------------------------------

__device__ __forceinline__ uint64_t noise_key(const WalkParams& p, int row) {
    return p.key_pointer ? static_cast<uint64_t>(p.key_pointer[row * p.key_stride]) : p.key;
}

__device__ __forceinline__ uint64_t noise_offset(const WalkParams& p, int row) {
    return p.offset_pointer ? static_cast<uint64_t>(p.offset_pointer[row * p.offset_stride]) : p.offset;
}

__device__ __forceinline__ uint64_t noise_slot(const WalkParams& p, int row) { return static_cast<uint64_t>(p.rows ? p.rows[row * p.rows_stride] : row); }

__device__ __forceinline__ int64_t anchor(const WalkParams& p, int row) {
    return p.anchors_are_int32 ? static_cast<const int32_t*>(p.anchors)[row * p.anchors_stride]
                               : static_cast<const int64_t*>(p.anchors)[row * p.anchors_stride];
}

// Before the first step: the anchor, or where steps are skipped the last token of those.
__device__ __forceinline__ int64_t first_token(const WalkParams& p, int row, int first_step) {
    return first_step > 0 ? p.tokens[row * p.tokens_stride_row + (first_step - 1) * p.tokens_stride_step] : anchor(p, row);
}

// Of W1 there is: an anchor out of range can't stop a captured graph (exchange.cuh flags it).
__device__ __forceinline__ int64_t clamped(const WalkParams& p, int64_t token) { return min(max(token, int64_t{0}), p.target_vocab_size - 1); }

// What ranks compare of a block's tensors, as hashes: in this order.
enum class HeaderTensor : int { anchors, temperatures, key, offset, rows, count };

__device__ __forceinline__ uint64_t header_element(const WalkParams& p, int row, HeaderTensor tensor) {
    switch (tensor) {
        case HeaderTensor::anchors: return static_cast<uint64_t>(anchor(p, row));
        case HeaderTensor::temperatures: return p.temperatures ? __float_as_uint(p.temperatures[row * p.temperatures_stride]) : 0;
        case HeaderTensor::key: return noise_key(p, row);
        case HeaderTensor::offset: return noise_offset(p, row);
        default: return noise_slot(p, row);
    }
}

}  // namespace tpw

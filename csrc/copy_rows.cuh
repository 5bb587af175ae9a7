// What csrc/spread.cu copies: one rank's columns of base logits into the whole rows of those who walk them. Plain loads and
// stores: tests/test_copy_rows.py runs this on the host.
#pragma once

#include "rows.cuh"

namespace tpw {

// spread.SpreadParams is the host half: same fields, same order.
struct SpreadParams {
    char* buffers[kMaxWorld];  // every rank's rows, [row of its share][step][step_stride], 16-byte aligned, as this rank sees them
    int64_t step_stride;       // in elements, a multiple of 16 bytes
    int32_t shard_start;       // this rank's columns
    int32_t shard_width;       // 0: all ranks have whole rows, and only compare headers
};

static_assert(sizeof(SpreadParams) == TPW_SPREAD_PARAMS_BYTES, "spread.SpreadParams has other fields");

#if TPW_BASE_FP32
using Element = uint32_t;
#else
using Element = uint16_t;
#endif

constexpr int kPiece = 16 / sizeof(Element);  // elements of a 16-byte store
constexpr int kPiecesPerLane = 4;             // loads in flight

// 16 bytes from an address that is a multiple of sizeof(Part).
template <typename Part>
__device__ __forceinline__ uint4 load_piece(const Element* source) {
    union {
        Part parts[16 / sizeof(Part)];
        uint4 piece;
    } loaded;
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Part)); ++i) loaded.parts[i] = reinterpret_cast<const Part*>(source)[i];
    return loaded.piece;
}

// A warp's share of a row: up to kPiecesPerLane 16-byte pieces a lane, from piece `first` on.
template <typename Part>
__device__ __forceinline__ void copy_pieces(const Element* source, Element* destination, int first, int pieces) {
    uint4 loaded[kPiecesPerLane];
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i)
        if (first + i * kWarpSize < pieces) loaded[i] = load_piece<Part>(source + (first + i * kWarpSize) * kPiece);
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i)
        if (first + i * kWarpSize < pieces) *reinterpret_cast<uint4*>(destination + (first + i * kWarpSize) * kPiece) = loaded[i];
}

// This rank's columns of all rows that `owner` walks, into its buffer. By `warps` warps, of which this is number `warp`.
__device__ __forceinline__ void copy_rows(const WalkParams& p, const SpreadParams& spread, int valid, int owner, int warp, int warps, int lane) {
    const int rows = share_of(valid, p.shares, owner), width = spread.shard_width;
    // Destinations are stored in whole pieces; a shard may start inside of one. Sources may start on any element.
    const int head = min((kPiece - spread.shard_start % kPiece) % kPiece, width);
    const int pieces = (width - head) / kPiece, tail = width - head - pieces * kPiece;
    constexpr int kChunk = kWarpSize * kPiecesPerLane;
    const int chunks = max((pieces + kChunk - 1) / kChunk, 1);
    for (int unit = warp; unit < rows * p.gamma * chunks; unit += warps) {
        const int line = unit / chunks, chunk = unit - line * chunks, row = line / p.gamma, step = line - row * p.gamma;
        const int given = p.shares > 1 ? row * p.shares + owner : row;
        const Element* source = static_cast<const Element*>(p.base_logits) + given * p.base_stride_row + step * p.base_stride_step;
        Element* destination = reinterpret_cast<Element*>(spread.buffers[owner]) + line * spread.step_stride + spread.shard_start;
        if (chunk == 0 && lane < head) destination[lane] = source[lane];
        if (chunk == chunks - 1 && lane < tail) destination[width - tail + lane] = source[width - tail + lane];
        source += head;
        destination += head;
        const int first = chunk * kChunk + lane;
        switch (reinterpret_cast<uint64_t>(source) & 15) {
            case 0: copy_pieces<uint4>(source, destination, first, pieces); break;
            case 8: copy_pieces<uint2>(source, destination, first, pieces); break;
            case 4:
            case 12: copy_pieces<uint32_t>(source, destination, first, pieces); break;
            default: copy_pieces<Element>(source, destination, first, pieces);
        }
    }
}

}  // namespace tpw

// Before a walk that needs whole rows: base logits that lie sharded over the ranks go to those who walk their rows, by stores
// into the peers' memory. int8: every rank gets all rows. int8_split: each rank gets the rows of its share.
//
// One launch before the walk's, on all SMs. A CTA copies its part of this rank's columns, tells the CTA of the same number on
// every rank that it has, and waits for those of all ranks. So the launch ends when all that the walk will read is here.
//
// Memory ordering
// ---------------
// Base logits are stored by weak stores and read by the walk's copies: they aren't words that carry a tag (mailbox.cuh), so
// each transfer of a buffer from one side to the other is a release and an acquire, by the fences here.
//   written -> read      the CTA's stores; bar.sync; fence.acq_rel.sys and the arrival, by one thread a destination. There:
//                        the arrival seen, fence.acq_rel.sys, the end of the launch, the walk. bar.sync and launches in
//                        stream order carry causality, and fences are cumulative, so that the walk's reads come after.
//   read -> overwritten  the walk; the end of its launch; fence.acq_rel.sys and the header of the next spread. There: the
//                        header seen, fence.acq_rel.sys, bar.sync, the stores. So one buffer will do: a CTA stores into a
//                        peer's only after that peer's header of this very block, before which its walk was complete.
//                        What a rank copies within its own buffer needs stream order alone, and so hides that hop.
// The walk reads by bulk copies, which are of the async proxy; the end of a launch orders all proxies.
// A failure leaves any bytes in the buffers: it poisons every rank, and the walk that follows reads none of them.
#include "exchange.cuh"

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

constexpr int kSpreadWarps = TPW_SPREAD_WARPS;
constexpr int kPiece = 16 / sizeof(Element);  // elements of a 16-byte store
constexpr int kPiecesPerLane = 4;             // loads in flight

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

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

extern "C" __global__ void __launch_bounds__(TPW_SPREAD_WARPS * 32)
    spread(const __grid_constant__ tpw::WalkParams p, const __grid_constant__ tpw::SpreadParams spread) {
    using namespace tpw;
    __shared__ uint64_t block, expiry;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, cta = blockIdx.x, ctas = gridDim.x;
    const int valid = valid_rows(p);
    if (threadIdx.x == 0) WalkExchange::start(p, &block, &expiry);
    __syncthreads();
    const WalkExchange exchange{p, &block, &expiry};
    bool agrees = true;
    if (warp == 0) {
        fence_sys();
        agrees = exchange.open(lane, cta, valid) && exchange.compare_headers(lane, cta, valid, true);
        fence_sys();
    } else if (spread.shard_width > 0) {
        copy_rows(p, spread, valid, p.rank, (warp - 1) * ctas + cta, (kSpreadWarps - 1) * ctas, lane);
    }
    if (!__syncthreads_and(agrees)) return;
    if (spread.shard_width > 0) {
        // Each rank begins with another peer.
        for (int i = 1; i < TPW_WORLD_SIZE; ++i) copy_rows(p, spread, valid, (p.rank + i) % TPW_WORLD_SIZE, warp * ctas + cta, kSpreadWarps * ctas, lane);
    }
    __syncthreads();
    if (threadIdx.x < TPW_WORLD_SIZE) {
        const u32 peer = threadIdx.x;
        const Exchange watch = exchange.watch();
        const u64 tag = header_tag(block);
        fence_sys();
        store_word<Scope::sys>(arrival_word(p.mailboxes[peer], p.rank, cta), 0, tag);
        u64 key;
        await_word<Scope::sys>(watch, arrival_word(exchange.mailbox(), peer, cta), tag, {TPW_WAIT_ARRIVAL, peer, 0, static_cast<u32>(cta)}, key);
        fence_sys();
    }
}

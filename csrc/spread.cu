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
#include "copy_rows.cuh"
#include "exchange.cuh"

namespace tpw {

constexpr int kSpreadWarps = TPW_SPREAD_WARPS;

}  // namespace tpw

extern "C" __global__ void __launch_bounds__(TPW_SPREAD_WARPS * 32)
    spread(const __grid_constant__ tpw::WalkParams p, const __grid_constant__ tpw::SpreadParams spread) {
    using namespace tpw;
    __shared__ uint64_t block, expiry;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, cta = blockIdx.x, ctas = gridDim.x;
    const int valid = valid_rows(p);
    if (threadIdx.x == 0) WalkExchange::start(p, &block, &expiry);
    __syncthreads();
    const WalkExchange exchange{p, block, expiry};
    bool agrees = true;
    if (warp == 0) {
        fence_system();
        agrees = exchange.open(lane, cta, valid) && exchange.compare_headers(lane, cta, valid, true);
        fence_system();
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
        fence_system();
        store_word<Scope::sys>(arrival_word(p.mailboxes[peer], p.rank, cta), 0, tag);
        u64 key;
        await_word<Scope::sys>(watch, arrival_word(exchange.mailbox(), peer, cta), tag, {TPW_WAIT_ARRIVAL, peer, 0, static_cast<u32>(cta)}, key);
        fence_system();
    }
}

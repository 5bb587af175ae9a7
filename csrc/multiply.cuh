// The multiply warps' part of a pass: dot products, base logits, noise, and of each request the best rows that a lane or warp has.
#pragma once

#include "multiply_narrow.cuh"
#include "multiply_warpgroup.cuh"
#include "weight_stream.cuh"

namespace tpw {

// kReg register tiles from `first` on and kShared tiles of shared memory from the warp's `shared_slot`th on, side by side: their
// independent accumulators hide the latency of a row's dependent MMAs.
template <int kReg, int kShared>
__device__ __forceinline__ void dot_products(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int first, int shared_slot,
                                             const unsigned char* const (&b)[kColumnGroups], Dot::Accumulator (*acc)[kColumnGroups][4]) {
    constexpr int kTiles = kReg + kShared;
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + (shared_slot * kMultiplyWarps + cta.warp) * kTileBytes) + cta.lane;
    // What k step `k` needs from shared memory.
    struct Operands {
        uint2 u[kColumnGroups];
        Fragment a[kTiles];
    };
    const auto load = [&](int k) {
        Operands now;
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) now.u[group] = *reinterpret_cast<const uint2*>(b[group] + 32 * k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
            now.a[i] = i < kReg ? weights[i < kReg ? first + i : 0][k] : shared[((i - kReg) * kMultiplyWarps * kSteps + k) * kWarpSize];
        return now;
    };
    // Of shared memory alone a step's few MMAs are over before the next one's operands have come.
    constexpr int kAhead = kReg == 0 ? 2 : 1;
    Operands ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ahead[k] = load(k);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const Operands now = ahead[k % kAhead];
        if (k + kAhead < kSteps) ahead[k % kAhead] = load(k + kAhead);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group) Dot::mma(acc[i][group], now.a[i], now.u[group]);
        // Loads don't move across this, so the steps stay in order. In one piece of straight code the assembler loads all of u
        // first and then finishes one tile after the other, to save registers: each MMA waits 35 cycles for the one before it.
        __syncwarp();
    }
}

template <int kFirst, int kReg, int kShared>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                               int shared_slot, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kColumnGroups][4] = {};
    dot_products<kReg, kShared>(s, cta, weights, kFirst, shared_slot, b, acc);
    // A branch ends the dot products before what follows them.
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
        int slots[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) slots[i] = i < kReg ? kFirst + i : kRegTiles + shared_slot + i - kReg;
        mine.add_tiles<kTiles>(p, s, cta, pass, slots, acc);
    }
}

// The same tiles in pairs of one kind a turn, the last of shared memory, if it has no partner, beside the last of registers. All
// pairs' noise is drawn and added by the same instructions: a copy of them for each kind is 40 KB more than every pass would go
// through. Of an SM quarter's two warps each begins with another kind: see multiply().
__device__ __forceinline__ void multiply_in_turns(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                  const Fragment (&weights)[kRegTiles][kSteps], const unsigned char* const (&b)[kColumnGroups],
                                                  int shared_slots, LaneRequests& mine) {
    constexpr int kRegPairs = kRegTiles / 2;
    const int shared_pairs = shared_slots / 2, pairs = shared_pairs + kRegPairs;
    const bool left_over = shared_slots % 2;
    int index = cta.warp < kMultiplyWarps / 2 ? shared_pairs : 0;
#pragma unroll 1
    for (int turn = 0; turn < pairs; ++turn) {
        Dot::Accumulator acc[3][kColumnGroups][4] = {};
        int slot = kRegTiles + 2 * index;
        bool alone = false;
        if (index < shared_pairs) {
            dot_products<0, 2>(s, cta, weights, 0, 2 * index, b, acc);
        } else {
            slot = 2 * (index - shared_pairs);
            alone = left_over && index == pairs - 1;
#pragma unroll
            for (int first = 0; first < kRegTiles; first += 2) {
                if (first != slot) continue;
                if (first + 2 == kRegTiles && alone)
                    dot_products<2, 1>(s, cta, weights, first, shared_slots - 1, b, acc);
                else
                    dot_products<2, 0>(s, cta, weights, first, 0, b, acc);
            }
        }
        if (cta.rows > 0) {
            asm volatile("" ::: "memory");
            const int both[2] = {slot, slot + 1}, one[1] = {kRegTiles + shared_slots - 1};
            if (alone) mine.add_tiles<1>(p, s, cta, pass, one, acc + 2);  // first: then its registers are free
            mine.add_tiles<2>(p, s, cta, pass, both, acc);
        }
        if (++index == pairs) index = 0;
    }
}

// Register tiles, with up to kBeside of the warp's tiles in shared memory at their side, from the `slot`th on. A chunk ends at an
// even slot unless it is the last.
template <int kFirst, int kReg, int kBeside>
__device__ __forceinline__ void multiply_register_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegTiles][kSteps], const unsigned char* const (&b)[kColumnGroups],
                                                        int shared_slots, int& slot, LaneRequests& mine) {
    if constexpr (kBeside > 0) {
        const int left = shared_slots - slot;
        if (left < kBeside || (left > kBeside && (kReg + kBeside) % 2))
            return multiply_register_tiles<kFirst, kReg, kBeside - 1>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    }
    multiply_tiles<kFirst, kReg, kBeside>(p, s, cta, pass, weights, slot, b, mine);
    slot += kBeside;
}

// A streamed tile that doesn't come through slots: loaded once u is there, 8 fragments at a time.
__device__ __forceinline__ void multiply_loaded(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int shared_slot,
                                                const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    const Fragment* source = p.w2_fragments +
                             (static_cast<int64_t>(cta.index) * kTilesPerCta + (kRegTiles + shared_slot) * kMultiplyWarps + cta.warp) * (kSteps * kWarpSize) + cta.lane;
    Dot::Accumulator acc[1][kColumnGroups][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kChunkSteps) {
        Fragment a[kChunkSteps];
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i) a[i] = load_weights(source + (first + i) * kWarpSize);
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
                Dot::mma(acc[0][group], a[i], *reinterpret_cast<const uint2*>(b[group] + 32 * (first + i)));
    }
    const int slots[1] = {kRegTiles + shared_slot};
    mine.add_tiles<1>(p, s, cta, pass, slots, acc);
}

// The warp's streamed tiles in these slots, one after the other.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const WeightStream& stream, int first,
                                                  int end, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
#pragma unroll 1
    for (int slot = first; slot < end; ++slot) {
        Dot::Accumulator acc[1][kColumnGroups][4] = {};
#pragma unroll 1
        for (int part = 0; part < kTileChunks; ++part) {
            const int chunk = (slot - stream.first_slot()) * kTileChunks + part;
            const Fragment* a = stream.take(pass, chunk);
#pragma unroll
            for (int k = 0; k < kChunkSteps; ++k)
#pragma unroll
                for (int group = 0; group < kColumnGroups; ++group)
                    Dot::mma(acc[0][group], a[k * kWarpSize], *reinterpret_cast<const uint2*>(b[group] + 32 * (part * kChunkSteps + k)));
            stream.release(pass, chunk);
        }
        const int slots[1] = {slot};
        mine.add_tiles<1>(p, s, cta, pass, slots, acc);
    }
}

// All tiles of this warp; leaves its lanes' best rows in shared memory. `mine` is of this pass, and new. ready(): of one request in
// int8, waits for u; false if the walk has failed: then the resident tiles are left out, and what is left there is of no use.
template <typename Ready>
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                         LaneRequests& mine, [[maybe_unused]] const WeightStream& stream, [[maybe_unused]] const Ready& ready) {
    const unsigned char* b[kColumnGroups];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) b[group] = mine.u[group];
    if constexpr (!kQuadsShare || kStreams) mine.load_u_scales(s, cta, pass);

    constexpr int kMaxSlots = (kSmemTiles + kMultiplyWarps - 1) / kMultiplyWarps;
    const int shared_slots = kSmemTiles % kMultiplyWarps == 0 ? kMaxSlots : kMaxSlots - (cta.warp >= kSmemTiles % kMultiplyWarps);
    // Every chunk of tiles reads all of u, so few and large ones are best. One group of columns leaves the registers for tiles of
    // both kinds at once, two for one more. An odd number of register tiles needs the partner of its last.
    constexpr int kBeside = kColumnGroups == 1 ? 3 : kRegTiles % 2;
    constexpr int kChunk = kRegTiles < 2 ? kRegTiles : 2;
    constexpr bool kTakesLast = kColumnGroups > 1 && kRegTiles % 2 == 0;
    int slot = 0;
    const int end = kTakesLast ? shared_slots / 2 * 2 : shared_slots;
    const auto register_tiles = [&]() {
        constexpr int kFirst = kChunk < kRegTiles ? kChunk : 0;
        if constexpr (kChunk < kRegTiles) multiply_register_tiles<0, kChunk, kRegTiles % 2 ? 0 : kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
        if (kTakesLast && end < shared_slots)
            multiply_tiles<kFirst, kRegTiles - kFirst, 1>(p, s, cta, pass, weights, end, b, mine);
        else
            multiply_register_tiles<kFirst, kRegTiles - kFirst, kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    };
    const auto shared_tiles = [&]() {
#pragma unroll 1
        for (; slot + 1 < end; slot += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, slot, b, mine);
        if (!kTakesLast && slot < end) multiply_tiles<0, 0, 1>(p, s, cta, pass, weights, slot, b, mine);
    };
    const auto resident_tiles = [&]() {
        // In turns alone where it was faster: 223 µs a block of 64 requests instead of 254. int8 took 405 instead of 369, greedy walks
        // 113 instead of 111, whose copies are small.
        if constexpr (kQuadsShare) {
            const bool all = kSmemTiles % kMultiplyWarps == 0 || shared_slots == kMaxSlots;
            return all ? multiply_narrow<kMaxSlots>(p, s, cta, pass, weights, b[0], mine, ready)
                       : multiply_narrow<kMaxSlots == 0 ? 0 : kMaxSlots - 1>(p, s, cta, pass, weights, b[0], mine, ready);
        } else if constexpr (kByWarpgroups) {
            multiply_by_warpgroups<kColumnGroups>(p, s, cta, pass, weights, mine);
        } else if constexpr (kTilesTakeTurns) {
            multiply_in_turns(p, s, cta, pass, weights, b, shared_slots, mine);
        } else if constexpr (kTakesLast) {
            // Register tiles keep the tensor cores busy, shared ones the loads: of an SM quarter's two warps, which go through a pass
            // in step, each begins with another kind. With one group of columns that costs 0.5 µs a step: too few MMAs side by side.
            const bool shared_first = cta.warp >= kMultiplyWarps / 2;
#pragma unroll 1
            for (int turn = 0; turn < 2; ++turn) {
                if ((turn == 0) == shared_first)
                    shared_tiles();
                else
                    register_tiles();
            }
        } else {
            register_tiles();
            // Code that isn't there doesn't have to be fetched.
            constexpr int kTaken = kRegTiles < 2 * kChunk ? kBeside : 2 * kBeside - 1;
            if constexpr (kMaxSlots > kTaken) shared_tiles();
        }
        return true;
    };
    if constexpr (kStreams) {
        // First the tiles that are in the slots, or begin there: what follows them comes while the resident tiles are multiplied.
        // Every chunk is taken, whether the resident tiles were multiplied or the walk has failed. A loop: one copy of the code.
        const int first = stream.first_slot(), middle = min(first + (kStreamSlots + kTileChunks - 1) / kTileChunks, stream.end_slot());
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            multiply_streamed(p, s, cta, pass, stream, turn == 0 ? first : middle, turn == 0 ? middle : stream.end_slot(), b, mine);
            if (turn == 0) resident_tiles();
        }
    } else {
        if (!resident_tiles()) return;
        // In the same order; which warp has one follows from its number alone.
        for (int tile = kRegTiles * kMultiplyWarps + kSmemTiles; tile < kTilesPerCta; ++tile)
            if (tile % kMultiplyWarps == cta.warp) multiply_loaded(p, s, cta, pass, tile / kMultiplyWarps - kRegTiles, b, mine);
    }

    Best* out = s.best + pass.buffer() * kRequests * kBestStride;
#if TPW_SAMPLED || TPW_ROUNDING == 2
    if constexpr (kLanesReduce) {
        constexpr int kCount = kColumnGroups * Dot::kLaneRequests;
        Best best[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) best[i] = mine.best[i / Dot::kLaneRequests][i % Dot::kLaneRequests];
        const int left = reduce_over_lanes(best, cta.lane);
        const int request = left / Dot::kLaneRequests * Dot::kRequests + Dot::lane_request(cta.lane, left % Dot::kLaneRequests);
        if (cta.lane < 4 * kCount) out[request * kBestStride + cta.warp] = best[0];
        return;
    }
#endif
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
            out[request * kBestStride + cta.warp * kWarpEntries + (kQuadsShare ? cta.lane : cta.lane >> 2)] = mine.best[group][which];
        }
}

}  // namespace tpw

// The multiply warps' part of a pass: dot products, base logits, noise, and of each request the best rows that a lane or warp has.
#pragma once

#include "multiply_narrow.cuh"
#include "multiply_warpgroup.cuh"
#include "weight_stream.cuh"

namespace tpw {

// kReg register tiles from `first` on and kShared tiles of shared memory from the warp's `shared_slot`th on, side by side: their
// independent accumulators hide the latency of a row's dependent MMAs.
template <int kReg, int kShared, int kGroups>
__device__ __forceinline__ void dot_products(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int first, int shared_slot,
                                             const unsigned char* const (&u)[kGroups], Dot::Accumulator (*acc)[kGroups][4]) {
    constexpr int kTiles = kReg + kShared;
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + (shared_slot * kMultiplyWarps + cta.warp) * kTileBytes) + cta.lane;
    // What k step `k` needs from shared memory.
    struct Operands {
        uint2 u[kGroups];
        Fragment a[kTiles];
    };
    const auto load = [&](int k) {
        Operands now;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) now.u[group] = *reinterpret_cast<const uint2*>(u[group] + 32 * k);
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
            for (int group = 0; group < kGroups; ++group) Dot::mma(acc[i][group], now.a[i], now.u[group]);
        // Loads don't move across this, so the steps stay in order. In one piece of straight code the assembler loads all of u
        // first and then finishes one tile after the other, to save registers: each MMA waits 35 cycles for the one before it.
        __syncwarp();
    }
}

template <int kFirst, int kReg, int kShared, int kGroups>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                               int shared_slot, LaneRequests<kGroups>& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kGroups][4] = {};
    dot_products<kReg, kShared>(s, cta, weights, kFirst, shared_slot, mine.u, acc);
    // A branch ends the dot products before what follows them.
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
        int slots[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) slots[i] = i < kReg ? kFirst + i : kRegTiles + shared_slot + i - kReg;
        mine.template add_tiles<kTiles>(p, s, cta, pass, slots, acc);
    }
}

// The same tiles a group of columns at a time, by the same instructions: more than one copy of those that draw and add noise is more
// than an SM has room for. What is known of the requests takes half the registers then, and four tiles side by side hide the MMAs'
// latencies as two of two groups do. A tile of shared memory without a partner is shared out, a group a warp: what a warp does in a pass
// takes it longer than its instructions take to issue, so a pass takes as long as the warp with the most tiles.
template <int kGroups>
__device__ __forceinline__ void multiply_group_by_group(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegTiles][kSteps], int shared_slots, LaneRequests<kGroups>& mine) {
    static_assert(kGroups == 1 && kRegTiles == 2, "a pair in registers");
    constexpr int kLeastPairs = kSmemTiles / kMultiplyWarps / 2;
#pragma unroll 1
    while (true) {
        if (kLeastPairs > 0 || shared_slots >= 2)
            multiply_tiles<0, 2, 2>(p, s, cta, pass, weights, 0, mine);
        else
            multiply_tiles<0, 2, 0>(p, s, cta, pass, weights, 0, mine);
#pragma unroll 1
        for (int slot = 2; slot + 1 < shared_slots; slot += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, slot, mine);
#pragma unroll 1
        for (int item = cta.warp; item < Singles::kItems; item += kMultiplyWarps) {
            const Singles single(item);
            if (single.group == mine.first_group) multiply_tiles<0, 0, 1>(p, s, single.of(cta), pass, weights, Singles::kIndex, mine);
        }
        mine.leave(s, cta, pass);
        const int next = mine.first_group + 1;
        if (next == kColumnGroups || pass.requests <= next * Dot::kRequests) break;  // the last group, or the last that has requests
        mine = LaneRequests<kGroups>(p, s, cta, pass, mine.pass_noise, next);
    }
}

// The same tiles two by two, one group of columns of each pair after the other, where there are tiles that are read again: those are added
// by one copy of a large code, and these by another. A group at a time with all of these, which takes a third, took 64 requests 22 %
// longer (one GPU, V = 151,936). Of an SM quarter's two warps each begins with tiles of another kind: see
// multiply_resident.
__device__ __forceinline__ void multiply_pair_by_pair(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                      const Fragment (&weights)[kRegTiles][kSteps], int shared_slots, LaneRequests<kColumnGroups>& mine) {
    const int shared_pairs = shared_slots / 2;  // behind which is the pair in registers, and beside that a tile without a partner
    int pair = cta.warp < kMultiplyWarps / 2 ? shared_pairs : 0;
#pragma unroll 1
    for (int turn = 0; turn <= shared_pairs; ++turn) {
        Dot::Accumulator acc[3][kColumnGroups][4] = {};
        const bool is_shared = pair < shared_pairs, has_third = !is_shared && shared_slots % 2;
        if (is_shared)
            dot_products<0, 2>(s, cta, weights, 0, 2 * pair, mine.u, acc);
        else if (has_third)
            dot_products<2, 1>(s, cta, weights, 0, shared_slots - 1, mine.u, acc);
        else
            dot_products<2, 0>(s, cta, weights, 0, 0, mine.u, acc);
        if (cta.rows > 0) {
            asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
            const int first = is_shared ? kRegTiles + 2 * pair : 0, slots[2] = {first, first + 1}, third[1] = {kRegTiles + shared_slots - 1};
            if (has_third) mine.add_tiles<1>(p, s, cta, pass, third, acc + 2);  // first: then its registers are free
            mine.add_tiles<2>(p, s, cta, pass, slots, acc);
        }
        pair = pair == shared_pairs ? 0 : pair + 1;
    }
}

// Register tiles, with up to kBeside of the warp's tiles in shared memory at their side, from the `slot`th on. A chunk ends at an
// even slot unless it is the last.
template <int kFirst, int kReg, int kBeside, int kGroups>
__device__ __forceinline__ void multiply_register_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegTiles][kSteps], int shared_slots, int& slot,
                                                        LaneRequests<kGroups>& mine) {
    if constexpr (kBeside > 0) {
        const int left = shared_slots - slot;
        if (left < kBeside || (left > kBeside && (kReg + kBeside) % 2))
            return multiply_register_tiles<kFirst, kReg, kBeside - 1>(p, s, cta, pass, weights, shared_slots, slot, mine);
    }
    multiply_tiles<kFirst, kReg, kBeside>(p, s, cta, pass, weights, slot, mine);
    slot += kBeside;
}

// A streamed tile that doesn't come through slots: loaded once u is there, 8 fragments at a time.
__device__ __forceinline__ void multiply_loaded(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int shared_slot,
                                                LaneRequests<kColumnGroups>& mine) {
    const int64_t tile = static_cast<int64_t>(cta.index) * kTilesPerCta + (kRegTiles + shared_slot) * kMultiplyWarps + cta.warp;
    const Fragment* source = p.w2_fragments + tile * (kSteps * kWarpSize) + cta.lane;
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
                Dot::mma(acc[0][group], a[i], *reinterpret_cast<const uint2*>(mine.u[group] + 32 * (first + i)));
    }
    const int slots[1] = {kRegTiles + shared_slot};
    mine.add_tiles<1>(p, s, cta, pass, slots, acc);
}

// The warp's streamed tiles in these slots, one after the other.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const WeightStream& stream, int first,
                                                  int end, LaneRequests<kColumnGroups>& mine) {
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
                    Dot::mma(acc[0][group], a[k * kWarpSize], *reinterpret_cast<const uint2*>(mine.u[group] + 32 * (part * kChunkSteps + k)));
            stream.release(pass, chunk);
        }
        const int slots[1] = {slot};
        mine.add_tiles<1>(p, s, cta, pass, slots, acc);
    }
}

// The tiles of this warp that are in registers and shared memory. ready(): of one request in int8, waits for u; false if the walk has
// failed: then they are left out.
template <int kGroups, typename Ready>
__device__ __forceinline__ bool multiply_resident(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                  const Fragment (&weights)[kRegTiles][kSteps], LaneRequests<kGroups>& mine, [[maybe_unused]] const Ready& ready) {
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
        if constexpr (kChunk < kRegTiles) multiply_register_tiles<0, kChunk, kRegTiles % 2 ? 0 : kBeside>(p, s, cta, pass, weights, shared_slots, slot, mine);
        if (kTakesLast && end < shared_slots)
            multiply_tiles<kFirst, kRegTiles - kFirst, 1>(p, s, cta, pass, weights, end, mine);
        else
            multiply_register_tiles<kFirst, kRegTiles - kFirst, kBeside>(p, s, cta, pass, weights, shared_slots, slot, mine);
    };
    const auto shared_tiles = [&]() {
#pragma unroll 1
        for (; slot + 1 < end; slot += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, slot, mine);
        if (!kTakesLast && slot < end) multiply_tiles<0, 0, 1>(p, s, cta, pass, weights, slot, mine);
    };
    if constexpr (kQuadsShare) {
        const bool all = kSmemTiles % kMultiplyWarps == 0 || shared_slots == kMaxSlots;
        return all ? multiply_narrow<kMaxSlots>(p, s, cta, pass, weights, mine, ready)
                   : multiply_narrow<kMaxSlots == 0 ? 0 : kMaxSlots - 1>(p, s, cta, pass, weights, mine, ready);
    } else if constexpr (kByWarpgroups) {
        multiply_by_warpgroups<kColumnGroups>(p, s, cta, pass, weights, mine);
    } else if constexpr (kGroupsTakeTurns) {
        multiply_group_by_group(p, s, cta, pass, weights, shared_slots, mine);
    } else if constexpr (kPairsTakeTurns) {
        multiply_pair_by_pair(p, s, cta, pass, weights, shared_slots, mine);
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
}

// Of the warp's tiles that aren't resident, by parts: first those that are in the slots, or begin there; what follows them comes while
// the resident tiles are multiplied. Without slots the second part is all of them, in the same order: which warp has one follows from its
// number alone.
__device__ __forceinline__ void multiply_part(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, [[maybe_unused]] const WeightStream& stream,
                                              [[maybe_unused]] int part, LaneRequests<kColumnGroups>& mine) {
    if constexpr (kStreams) {
        const int first = stream.first_slot(), middle = min(first + (kStreamSlots + kTileChunks - 1) / kTileChunks, stream.end_slot());
        multiply_streamed(p, s, cta, pass, stream, part == 0 ? first : middle, part == 0 ? middle : stream.end_slot(), mine);
    } else {
        for (int tile = kRegTiles * kMultiplyWarps + kSmemTiles; tile < kTilesPerCta; ++tile)
            if (tile % kMultiplyWarps == cta.warp) multiply_loaded(p, s, cta, pass, tile / kMultiplyWarps - kRegTiles, mine);
    }
}

// All tiles of this warp; leaves its lanes' best rows in shared memory. `mine` is of this pass, and new. If ready() is false, what is left
// there is of no use.
template <int kGroups, typename Ready>
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                         LaneRequests<kGroups>& mine, [[maybe_unused]] const WeightStream& stream, const Ready& ready) {
    if constexpr (!kQuadsShare || kStreams) mine.load_u_scales(s, cta, pass);
    if constexpr (kStreams) {
        // Every chunk is taken, whether the resident tiles were multiplied or the walk has failed. A loop: one copy of the code.
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
            multiply_part(p, s, cta, pass, stream, part, mine);
            if (part == 0) multiply_resident(p, s, cta, pass, weights, mine, ready);
        }
    } else {
        if (!multiply_resident(p, s, cta, pass, weights, mine, ready)) return;
        if constexpr (kReadsAgain) multiply_part(p, s, cta, pass, stream, 1, mine);
    }
    if constexpr (!kGroupsTakeTurns) mine.leave(s, cta, pass);
}

}  // namespace tpw

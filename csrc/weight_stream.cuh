// Tiles of W2 that have no room on the chip: read again in each pass, from L2 or HBM, through slots of shared memory.
//
// W2 doesn't depend on the token. So a warp's bulk copies run kStreamSlots chunks ahead of it, over its tiles in their order and
// from the last one of a pass on to the first one of the next, while the warp waits for u. By loads into registers, 8 fragments at a
// time and none before u was there, a step of V = 248,320 on two GPUs took 9.9 µs.
#pragma once

#include "cta.cuh"

namespace tpw {

constexpr bool kStreams = kStreamSlots > 0;
constexpr int kTileChunks = kSteps / kChunkSteps;
static_assert(kSteps % kChunkSteps == 0, "whole chunks");

struct WeightStream {
    const WalkParams& p;
    const Smem& s;
    const Cta& cta;
    int passes;  // of the block

    // The warp's streamed tiles, as slots of its own: tile `slot * kMultiplyWarps + warp` of the CTA.
    __device__ __forceinline__ int first_slot() const {
        constexpr int kResident = kRegTiles * kMultiplyWarps + kSmemTiles;
        return kResident / kMultiplyWarps + (cta.warp < kResident % kMultiplyWarps);
    }
    __device__ __forceinline__ int end_slot() const { return kTilesPerCta / kMultiplyWarps + (cta.warp < kTilesPerCta % kMultiplyWarps); }

    // What is taken first in a block, on its way. By one lane, once the barriers exist.
    __device__ __forceinline__ void start() const {
        const int per_pass = chunks();
        if (per_pass == 0) return;
        for (int i = 0; i < kStreamSlots; ++i) ask(i, i, per_pass);
    }

    // Chunk `chunk` of the warp's in this pass, once it is there.
    __device__ __forceinline__ const Fragment* take(const Pass& pass, int chunk) const {
        const int taken = pass.index * chunks() + chunk;
        mbarrier_wait(arrived(taken), taken / kStreamSlots & 1);
        return reinterpret_cast<const Fragment*>(slot(taken)) + cta.lane;
    }

    // All lanes have read it: the slot's next chunk may come.
    __device__ __forceinline__ void release(const Pass& pass, int chunk) const {
        const int per_pass = chunks();
        __syncwarp();
        if (cta.lane != 0) return;
        fence_async_proxy();
        ask(pass.index * per_pass + chunk + kStreamSlots, chunk + kStreamSlots, per_pass);
    }

  private:
    __device__ __forceinline__ int chunks() const { return (end_slot() - first_slot()) * kTileChunks; }
    __device__ __forceinline__ unsigned char* slot(int number) const { return s.stream + (cta.warp * kStreamSlots + number % kStreamSlots) * kChunkBytes; }
    __device__ __forceinline__ uint64_t* arrived(int number) const { return s.stream_arrived + cta.warp * kStreamSlots + number % kStreamSlots; }

    // number: of the block. chunk: of its pass, or beyond its end of a later one.
    __device__ __forceinline__ void ask(int number, int chunk, int per_pass) const {
        // Every copy that is started is waited for: one that lands after its CTA's end would hit the next kernel's.
        if (number >= passes * per_pass) return;
        while (chunk >= per_pass) chunk -= per_pass;
        const int tile = (first_slot() + chunk / kTileChunks) * kMultiplyWarps + cta.warp;
        const Fragment* source = p.w2_fragments +
                                 ((static_cast<int64_t>(cta.index) * kTilesPerCta + tile) * kSteps + chunk % kTileChunks * kChunkSteps) * kWarpSize;
        mbarrier_expect(arrived(number), kChunkBytes);
        bulk_load(slot(number), source, kChunkBytes, arrived(number));
    }
};

}  // namespace tpw

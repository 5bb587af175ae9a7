// Dot products by four warps at once (a warpgroup): wgmma.mma_async of 64 rows, 16 of each warp, and 16 columns.
//
// A warp's fragments of A and D are those of mma.sync, side by side: of A its 16 rows, of D two groups of 8 columns. B always lies in
// shared memory, A may; both as core matrices of 8 rows (of B: columns) x 16 bytes, one row after another, which a descriptor finds by
// two strides: from one 16 bytes of k to the next, and from 8 rows to the next. They are read by the asynchronous proxy: whoever
// has stored them fences (fence_async_proxy) before it tells the others.
//
// The instructions (Dot::wgmma) run on while the warps do other things: registers of D, and of A, belong to them until wgmma_wait
// says otherwise. All four warps must come to each of them.
#pragma once

#include "async_copy.cuh"
#include "dot.cuh"

namespace tpw {

// Before the first of a group, whose registers other instructions have written or read.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than kPending groups are on their way. `acc` is of one that isn't any more: nothing that reads it moves before this.
template <int kPending, int kTiles, int kGroups>
__device__ __forceinline__ void wgmma_wait(Dot::Accumulator (&acc)[kTiles][kGroups][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#if TPW_INT8
                asm volatile("" : "+r"(acc[tile][group][i])::"memory");
#else
                asm volatile("" : "+f"(acc[tile][group][i])::"memory");
#endif
            }
}

// Of core matrices without swizzle; all three are multiples of 16 bytes. A descriptor n * 16 bytes on is this one + n.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t k_stride, uint32_t row_stride) {
    return static_cast<uint64_t>(row_stride >> 4) << 32 | (k_stride >> 4) << 16 | (address & 0x3ffff) >> 4;
}

}  // namespace tpw

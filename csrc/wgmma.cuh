// Dot products by four warps at once (a warpgroup): wgmma.mma_async of 64 rows, 16 of each warp, and 32 columns.
//
// A warp's fragments of A and D are those of mma.sync, side by side: of A its 16 rows, of D four groups of 8 columns. B always
// lies in shared memory, A may; both as core matrices of 8 rows (of B: columns) x 16 bytes, one row after another, which a
// descriptor finds by two strides: from one 16 bytes of k to the next, and from 8 rows to the next. They are read by the
// asynchronous proxy: whoever has stored them fences (fence_before_wgmma) before it tells the others.
//
// The instructions run on while the warps do other things: registers of D, and of A, belong to them until wgmma_wait says
// otherwise. All four warps must come to each of them.
#pragma once

#include "types.cuh"

namespace tpw {

__device__ __forceinline__ void fence_before_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first of a group, whose registers other instructions have written or read.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than kPending groups are on their way. `acc` is of one that isn't any more: nothing that reads it moves before this.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(float (&acc)[4][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
    for (int group = 0; group < 4; ++group)
        asm volatile("" : "+f"(acc[group][0]), "+f"(acc[group][1]), "+f"(acc[group][2]), "+f"(acc[group][3])::"memory");
}

// Of core matrices without swizzle; all three are multiples of 16 bytes. A descriptor n * 16 bytes on is this one + n.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t k_stride, uint32_t row_stride) {
    return static_cast<uint64_t>(row_stride >> 4) << 32 | (k_stride >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// acc = A x B + (adds ? acc : 0) of bf16, 16 in k.
__device__ __forceinline__ void wgmma(float (&acc)[4][4], const uint4& a, uint64_t b, bool adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n"
        "}"
        : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3]),
          "+f"(acc[2][0]), "+f"(acc[2][1]), "+f"(acc[2][2]), "+f"(acc[2][3]), "+f"(acc[3][0]), "+f"(acc[3][1]), "+f"(acc[3][2]), "+f"(acc[3][3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(adds)));
}

__device__ __forceinline__ void wgmma(float (&acc)[4][4], uint64_t a, uint64_t b, bool adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, adds, 1, 1, 0, 0;\n"
        "}"
        : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3]),
          "+f"(acc[2][0]), "+f"(acc[2][1]), "+f"(acc[2][2]), "+f"(acc[2][3]), "+f"(acc[3][0]), "+f"(acc[3][1]), "+f"(acc[3][2]), "+f"(acc[3][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}

}  // namespace tpw

// The dot products of a step: how a plan holds W2 and u, and multiplies them. All that differs between the plans is here.
//
// One MMA shape a plan, one accumulator a row, k ascending: the sum of a row and a request is then the same bits whatever the
// tile, the batch or the placement, because a column of an MMA sees neither its neighbours nor the rows beside it.
//   tp_bf16  mma.m16n8k16, 8 columns = 8 requests
//   int8     mma.m16n8k32, 8 columns = 4 requests x {hi, lo} planes of u, so that 256 * hi + lo meet in one lane. A single
//            request's planes take turns in two of the columns for each of four pairs of tiles (see multiply_narrow.cuh)
// Two groups of columns of greedy requests are multiplied by wgmma where all of W2 is on the chip, four warps' rows at once
// (multiply_warpgroup.cuh). That its sums of bf16 are those of mma.m16n8k16 to the bit no manual says: it was measured on an H200, 173
// million sums of data of ten kinds (spread exponents, cancellation, denormals, overflow, NaN, ties), and the GPU tests compare the
// tokens of all kernels.
#pragma once

#include "score.cuh"
#include "types.cuh"

namespace tpw {

constexpr int kTileRows = 16;

// W2 in fragment order: a tile's k steps lie one after another, each 32 lanes x 16 bytes, so that every load of a fragment,
// from HBM or shared memory, is one 512-byte run without bank conflicts.
using Fragment = uint4;

__device__ __forceinline__ Fragment load_weights(const Fragment* address) {
    Fragment f;  // volatile: keeps the loads where they are written, ahead of all waits, instead of beside their first use
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
                 : "l"(address));
    return f;
}

#if TPW_INT8

struct Dot {
    using Accumulator = int32_t;
    static constexpr int kStepK = 32;
    static constexpr int kRequests = 4;  // of the 8 columns of an MMA
    static constexpr int kLaneRequests = 1;
    static constexpr int kBytesPerElement = 1;

    __device__ static __forceinline__ void mma(Accumulator (&acc)[4], const Fragment& a, const uint2& b) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    }

    // acc = A x B + (adds ? acc : 0) for 64 rows, 16 of each warp of a warpgroup, and 16 columns; goes on by itself: see wgmma.cuh.
    __device__ static __forceinline__ void wgmma(Accumulator (&acc)[2][4], const Fragment& a, uint64_t b, bool adds) {
        asm volatile(
            "{\n"
            ".reg .pred adds;\n"
            "setp.ne.b32 adds, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, adds;\n"
            "}"
            : "+r"(acc[0][0]), "+r"(acc[0][1]), "+r"(acc[0][2]), "+r"(acc[0][3]), "+r"(acc[1][0]), "+r"(acc[1][1]), "+r"(acc[1][2]), "+r"(acc[1][3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(adds)));
    }

    __device__ static __forceinline__ void wgmma(Accumulator (&acc)[2][4], uint64_t a, uint64_t b, bool adds) {
        asm volatile(
            "{\n"
            ".reg .pred adds;\n"
            "setp.ne.b32 adds, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds;\n"
            "}"
            : "+r"(acc[0][0]), "+r"(acc[0][1]), "+r"(acc[0][2]), "+r"(acc[0][3]), "+r"(acc[1][0]), "+r"(acc[1][1]), "+r"(acc[1][2]), "+r"(acc[1][3])
            : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
    }

    // Which of the columns' requests the lane's accumulators belong to.
    __device__ static __forceinline__ int lane_request(int lane, int) { return TPW_SINGLE ? 0 : lane & 3; }

    // Two fp32 products in this order are the definition of an int8 bias.
    __device__ static __forceinline__ float bias(const Accumulator* acc, int half, int, float u_scale, float row_scale) {
        const int32_t sum = 256 * acc[2 * half] + acc[2 * half + 1];
        return __fmul_rn(__fmul_rn(__int2float_rn(sum), u_scale), row_scale);
    }
};

#else

struct Dot {
    using Accumulator = float;
    static constexpr int kStepK = 16;
    // Narrow: every other column stays empty, and a lane has the two rows of one request instead of a row of each of two: half
    // the work behind the dot products.
    static constexpr int kRequests = TPW_NARROW ? 4 : 8;
    static constexpr int kLaneRequests = TPW_NARROW ? 1 : 2;
    static constexpr int kBytesPerElement = 2;

    __device__ static __forceinline__ void mma(Accumulator (&acc)[4], const Fragment& a, const uint2& b) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    }

    __device__ static __forceinline__ void wgmma(Accumulator (&acc)[2][4], const Fragment& a, uint64_t b, bool adds) {
        asm volatile(
            "{\n"
            ".reg .pred adds;\n"
            "setp.ne.b32 adds, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, adds, 1, 1, 0;\n"
            "}"
            : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(adds)));
    }

    __device__ static __forceinline__ void wgmma(Accumulator (&acc)[2][4], uint64_t a, uint64_t b, bool adds) {
        asm volatile(
            "{\n"
            ".reg .pred adds;\n"
            "setp.ne.b32 adds, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1, 0, 0;\n"
            "}"
            : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3])
            : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
    }

    __device__ static __forceinline__ int lane_request(int lane, int which) { return kLaneRequests * (lane & 3) + which; }

    __device__ static __forceinline__ float bias(const Accumulator* acc, int half, int which, float, float) {
        return acc[2 * half + which];
    }
};

#endif

// The four lanes that hold the same rows of a tile share the pairs of tiles of one request, instead of having a request each.
constexpr bool kQuadsShare = TPW_INT8 && TPW_SINGLE;
constexpr int kSteps = TPW_RANK / Dot::kStepK;
constexpr int kColumns = 8;
constexpr int kTileBytes = kSteps * kWarpSize * static_cast<int>(sizeof(Fragment));
// A column of u, then 32 bytes that shift the banks: the lanes of a B fragment (8 columns x 4 words x 8 bytes) meet no conflict.
constexpr int kColumnBytes = TPW_RANK * Dot::kBytesPerElement + 32;
// For warpgroups: core matrices of 8 columns x 16 bytes, one k after the other, and 16 bytes that shift the banks, as a lane stores 16
// bytes of each.
constexpr bool kByWarpgroups = TPW_BY_WARPGROUPS;
constexpr int kMatrixBytes = kColumns * 16, kUMatrixBytes = kMatrixBytes + 16;
constexpr int kUBytes = kByWarpgroups ? TPW_RANK * Dot::kBytesPerElement / 16 * kUMatrixBytes : kColumns * kColumnBytes;  // of one group of columns

// Where the B fragment of k step 0 lies for this lane; a step further is 32 bytes on. Columns past the last one in use read
// its words (a broadcast, free), and what they compute is never looked at. Of a single request in int8 all columns have planes.
__device__ __forceinline__ const unsigned char* b_fragments(const unsigned char* u, int lane, int columns) {
    const int column = kQuadsShare ? lane >> 2 & 1 : max(min(lane >> 2, columns - 1), 0) & (TPW_NARROW ? ~1 : ~0);
    return u + column * kColumnBytes + (lane & 3) * 8;
}

// What a step's u is made from, 2 r bytes a token, on its way into B, 16 bytes a lane and vector. tp_bf16: the token's row of
// W1. int8: its two planes, made once for every token (kernels.to_plane_rows): the divisions of making them here, at each step
// and by every CTA, took 700 cycles of its 6,500.
struct URow {
    static constexpr int kVectors = TPW_RANK / (kWarpSize * 8);
    uint4 words[kVectors];
    float scale;

    __device__ __forceinline__ void load(const uint4* row, const float* row_scale, int lane) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) words[v] = __ldg(row + v * kWarpSize + lane);
        if (TPW_INT8) scale = __ldg(row_scale);
    }

    // As column(s) of request `request` of a column group.
    __device__ __forceinline__ void store(unsigned char* u, float* u_scale, int request, int lane) const {
#if TPW_INT8
        if (lane == 0) *u_scale = scale;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int at = (v * kWarpSize + lane) * 16;  // of the hi plane, then the lo plane, each as it lies in fragments of B
            const int column = 2 * request + at / TPW_RANK, k = at % TPW_RANK / 32;
            if constexpr (kByWarpgroups) {
                // Two lanes' words of a k step, of each the first half of its k range and the second one.
                unsigned char* to = u + 2 * k * kUMatrixBytes + column * 16 + (lane & 1) * 8;
                *reinterpret_cast<uint2*>(to) = make_uint2(words[v].x, words[v].z);
                *reinterpret_cast<uint2*>(to + kUMatrixBytes) = make_uint2(words[v].y, words[v].w);
            } else {
                *reinterpret_cast<uint4*>(u + column * kColumnBytes + at % TPW_RANK) = words[v];
            }
        }
#else
        if constexpr (kByWarpgroups) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) *reinterpret_cast<uint4*>(u + (v * kWarpSize + lane) * kUMatrixBytes + request * 16) = words[v];
            return;
        }
        // Of one k step a lane's words hold the first or the second half of the k range; a B fragment pairs words of both.
        unsigned char* column = u + request * (kColumns / Dot::kRequests) * kColumnBytes;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const uint32_t w[4] = {words[v].x, words[v].y, words[v].z, words[v].w};
            const int first_k = (v * kWarpSize + lane) * 8;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k = first_k + 2 * i;
                const int at = (k / 16) * 32 + ((k % 8) / 2) * 8 + ((k % 16) / 8) * 4;
                *reinterpret_cast<uint32_t*>(column + at) = w[i];
            }
        }
#endif
    }
};

}  // namespace tpw

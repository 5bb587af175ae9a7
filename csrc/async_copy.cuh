// Bulk asynchronous copies into shared memory, and the mbarrier that says when they are there.
#pragma once

#include "types.cuh"

namespace tpw {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    // The copy engine (another proxy) must see the barrier before it counts on it.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread copies `count` pieces of `piece_bytes`, which lie one after another on both sides.
__device__ __forceinline__ void bulk_load(void* target, const void* source, int count, int piece_bytes, uint64_t* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count * piece_bytes) : "memory");
    for (int piece = 0; piece < count; ++piece)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(target) + piece * piece_bytes),
                     "l"(static_cast<const unsigned char*>(source) + static_cast<int64_t>(piece) * piece_bytes), "r"(piece_bytes), "r"(shared_address(barrier))
                     : "memory");
}

// Waits for the barrier's first phase. Bounded by the hardware: a copy ends or faults.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], 0;\n"
        "@!arrived bra again;\n"
        "}" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace tpw

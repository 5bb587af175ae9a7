// Bulk asynchronous copies into shared memory, and the mbarrier that says when they are there; and out of it.
#pragma once

#include "types.cuh"

namespace tpw {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    // The copy engine (another proxy) must see the barrier before it counts on it.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival of those that the phase waits for. Releases what this thread did before, and by __syncwarp its warp.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The barrier's phase ends when so many bytes have been copied.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(void* target, const void* source, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(target)), "l"(source), "r"(bytes),
                 "r"(shared_address(barrier))
                 : "memory");
}

// From shared memory into global memory, a peer's too. Addresses and size as above. Part of this thread's next group.
__device__ __forceinline__ void bulk_store(void* target, const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(target)), "r"(shared_address(source)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void end_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the copies of all this thread's groups have read their sources, or (the second) have been written as well.
__device__ __forceinline__ void await_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void await_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders ordinary accesses to shared memory that this thread knows of, by a barrier, before the bulk copies that it starts.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the barrier's phase of this parity. Who arrives is either the copy engine, or warps whose own waits are bounded.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// So many threads of the CTA meet, whole warps; barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Those who arrive so are counted, and go on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace tpw

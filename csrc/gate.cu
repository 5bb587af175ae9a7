// What timing needs on the device: a gate that holds every rank at the same place, and a kernel that does nothing.
// The host half is tp_walk/timing.py.
//
// Behind the gate a GPU's queue already holds event, walk, event. It opens once the rank's own host has said that they
// are enqueued and every rank's GPU has arrived, so that neither a host's launch overhead nor the skew between hosts is
// inside a figure. What remains is how far apart ranks see the last arrival: one hop.
#include "watch.cuh"

namespace tpw {

// timing.GateParams is the host half: same fields, same order.
struct Gate {
    char* arrivals[TPW_GATE_RANKS];  // every rank's arrival words, [source rank], as seen from this GPU
    u64* host;                       // mapped: [0] the pass that the host lets through, [1] who was missing
    u64 pass;                        // 1, 2, ...: passes are numbered alike on every rank
    u64 deadline_ns;
    u64 rank;
};

static_assert(sizeof(Gate) == TPW_GATE_BYTES, "timing.GateParams has other fields");

// host[1] where a gate gave up: 1 + the rank that didn't arrive, or this for the own host.
constexpr u64 MISSING_HOST = TPW_WORLD_SIZE + 1;

__device__ __forceinline__ u64 load_host(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
    return value;
}

// One thread a rank: thread s tells rank s and waits for it. Numbers only grow, so a word of a later pass is an arrival,
// too, and a slot needs no second copy.
__device__ __forceinline__ void pass_gate(const Gate& gate) {
    const u32 peer = threadIdx.x;
    const u64 expiry = now_ns() + gate.deadline_ns;
    u64 missing = 0;
    while (load_host(gate.host) < gate.pass && missing == 0) {
        if (now_ns() >= expiry) missing = MISSING_HOST;
    }
    store_word<Scope::sys>(gate.arrivals[peer] + gate.rank * TPW_WORD_BYTES, gate.pass, gate.pass);
    const char* arrival = gate.arrivals[gate.rank] + peer * TPW_WORD_BYTES;
    while (load_word<Scope::sys>(arrival).tag < gate.pass && missing == 0) {
        if (now_ns() >= expiry) missing = 1 + peer;
    }
    if (missing != 0) {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
                     ::"l"(__cvta_generic_to_global(gate.host + 1)), "l"(missing) : "memory");
    }
}

}  // namespace tpw

extern "C" __global__ void gate(const __grid_constant__ tpw::Gate gate) { tpw::pass_gate(gate); }

extern "C" __global__ void empty() {}

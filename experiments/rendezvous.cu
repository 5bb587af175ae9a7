// How CTAs agree on the largest key once a step, stripped of the walk's other work: each design is a set of RDV_* macros of
// this one kernel. experiments/rendezvous.py lists them, launches them and says what is measured.
//
// A step of a row, by one warp of each CTA:
//   gather      the members of a cluster push their keys into the leader's shared memory        (RDV_CLUSTER > 1)
//   contribute  a voter (a CTA, or a cluster's leader) stores its {key, tag} in its slot, or enters it into an accumulator
//   aggregate   RDV_AGGREGATORS CTAs of a row reduce all slots; each stores the best into its share of the RDV_COPIES of
//               every rank's result
//   receive     the voters (all CTAs without RDV_PUSH) poll the result, one word a rank; or all the slots (RDV_ALL)
//   push        leaders push the result into their members' shared memory                        (RDV_PUSH)
//
// Steps are numbered through launches: tag = step number + 1, so that nothing is reset. Every word has two places, of even
// and odd steps. A voter stores a slot of k + 2 after a result of k + 1, which needs slots k + 1 of all voters of all ranks;
// each of those was stored after its CTA had read a result of k, and so after the aggregator that it listens to had read all
// slots of k. Some voter of each rank listens to each aggregator: hence no slot or result is lost to its successor.
// Every wait ends at a deadline; a failure sets a word that makes the launches behind it return at once.
#include "mailbox.cuh"

namespace tpw {

constexpr u32 kWorld = TPW_WORLD_SIZE, kRows = RDV_ROWS, kCtas = RDV_CTAS, kSteps = RDV_STEPS, kWarmup = RDV_WARMUP;
constexpr u32 kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes, kAllLanes = 0xffffffffu;
constexpr u32 kCluster = RDV_CLUSTER, kVoters = kCtas / kCluster;
constexpr u32 kAggregators = RDV_AGGREGATORS, kAggregatorWarps = RDV_AGGREGATOR_WARPS, kCopies = RDV_COPIES;
constexpr bool kAtomic = RDV_ATOMIC, kAll = RDV_ALL, kDirect = RDV_DIRECT, kPush = RDV_PUSH && kCluster > 1;

constexpr bool kSlotsEverywhere = kDirect || kAll;  // a slot in every rank's mailbox, not just in this rank's
constexpr u32 kSlotSources = kSlotsEverywhere ? kWorld : 1, kSlots = kSlotSources * kVoters;
constexpr u32 kResultSources = kDirect ? 1 : kWorld;  // an aggregator that has seen all ranks publishes to its own only
constexpr Scope kSlotScope = kSlotSources > 1 ? Scope::sys : Scope::gpu;
constexpr Scope kResultScope = RDV_RESULTS_SYS && !kDirect ? Scope::sys : Scope::gpu;

static_assert(kRows <= kWarps && kCtas % kCluster == 0 && (kSteps + kWarmup) % 2 == 0, "");
static_assert(kRows * kAggregators <= kVoters && kCopies % kAggregators == 0 && kCopies * kWorld <= kLanes, "");

constexpr u32 kFailure = 0, kResults = 128;
constexpr u32 kResultStride = kCopies > 1 ? 128 : kResultSources * TPW_WORD_BYTES;  // copies lie on lines of their own
constexpr u32 kSlotsOffset = kResults + (2 * kRows * kCopies * kResultStride + 127) / 128 * 128;
constexpr u32 kAccumulators = kSlotsOffset + 2 * kRows * kSlots * TPW_WORD_BYTES;
constexpr u32 kAccumulatorBytes = 32, kHalfBytes = (kSteps + kWarmup) * kRows * kAccumulatorBytes;
static_assert(kAccumulators + 2 * kHalfBytes <= RDV_MAILBOX_BYTES, "");

struct Params {
    char* mailboxes[TPW_WORLD_SIZE];
    u64* elapsed_ns;  // of the measured steps
    u64 first_step;
    u64 deadline_ns;
    u32 rank;
    u32 half;  // of the accumulators: the one that this launch uses, while it clears the other
};

enum Wait : u32 { kGather = 1, kSlot, kResult, kPushed, kWrongKey };

struct Step {
    const Params& p;
    u64 expiry, tag;
    u32 number, row, lane;  // number: within the launch

    __device__ char* mine() const { return p.mailboxes[p.rank]; }
    __device__ u32 parity() const { return number & 1; }
    __device__ u32 result(u32 copy, u32 source) const {
        return kResults + ((parity() * kRows + row) * kCopies + copy) * kResultStride + source * TPW_WORD_BYTES;
    }
    __device__ u32 slot(u32 source, u32 voter) const {
        return kSlotsOffset + (((parity() * kRows + row) * kSlotSources + source) * kVoters + voter) * TPW_WORD_BYTES;
    }
    __device__ bool fail(Wait wait) const {
        if (lane == 0) atomicCAS(reinterpret_cast<u64*>(mine() + kFailure), 0ull, u64(number) << 32 | row << 8 | wait);
        return false;
    }
};

__device__ u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// The keys: the winner moves from CTA to CTA, and is known to all without a look at the others' keys.
__device__ u32 winner(u64 step, u32 row) { return (u32(step) * 61 + row * 29) % (kWorld * kCtas); }
__device__ u64 best_key(u64 step, u32 row) { return 1ull << 63 | (step & 0x7fffffff) << 32 | winner(step, row); }
__device__ u64 key_of(u64 step, u32 row, u32 id) {
    if (id == winner(step, row)) return best_key(step, row);
    return u64((id * 0x9e3779b1u ^ u32(step) * 0x85ebca6bu) >> 1) << 32 | id;
}

__device__ u64 warp_max(u64 key) {
    const u32 high = __reduce_max_sync(kAllLanes, u32(key >> 32));
    return u64(high) << 32 | __reduce_max_sync(kAllLanes, u32(key >> 32) == high ? u32(key) : 0);
}

// ---- waits, all by whole warps -------------------------------------------------------------------------------------

// Up to `most` words a lane, `first` and every `stride` bytes on, until all of the warp's carry the tag; their largest key.
// RDV_STAGGER > 0: two polls in flight, the second that many clocks behind the first.
template <Scope scope, u32 most, u32 stride>
__device__ bool await_words(const Step& step, Wait wait, const char* first, u32 count, u64& best) {
    Word now[most], later[most];
    const auto load = [&](Word(&words)[most]) {
#pragma unroll
        for (u32 i = 0; i < most; ++i)
            if (i < count) words[i] = load_word<scope>(first + i * stride);
    };
    const auto arrived = [&](const Word(&words)[most]) {
        bool all = true;
        best = 0;
#pragma unroll
        for (u32 i = 0; i < most; ++i)
            if (i < count) all &= words[i].tag == step.tag, best = max(best, words[i].key);
        return __all_sync(kAllLanes, all);
    };
    load(now);
    if (RDV_STAGGER > 0)
        for (const u32 start = clock(); clock() - start < RDV_STAGGER;) {}
    for (u32 polls = 1;; ++polls) {
        if (RDV_STAGGER > 0) load(later);
        if (arrived(now)) break;
        load(now);
        if (RDV_STAGGER > 0 && arrived(later)) break;
        if (polls % 64 == 0 && __any_sync(kAllLanes, now_ns() > step.expiry)) return step.fail(wait);
    }
    best = warp_max(best);
    return true;
}

__device__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// Once a step, by the barrier's own CTA: arrive, expecting `bytes` pushed, and wait for them.
__device__ bool await_pushed(const Step& step, Wait wait, u64* barrier, u32 bytes) {
    if (step.lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    __syncwarp();
    for (u32 polls = 1;; ++polls) {
        u32 done;
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(step.parity()) : "memory");
        if (__all_sync(kAllLanes, done)) return true;
        if (polls % 16 == 0 && __any_sync(kAllLanes, now_ns() > step.expiry)) return step.fail(wait);
    }
}

// Into the shared memory of CTA `rank` of the cluster, which has the same variables at the same places.
__device__ void push(u32 rank, u64* at, u64* barrier, u64 key) {
    asm volatile("{ .reg .u32 to, bar; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;"
                 "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %3, [bar]; }"
                 ::"r"(shared_address(at)), "r"(shared_address(barrier)), "r"(rank), "l"(key) : "memory");
}

__device__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// ---- parts of a step -----------------------------------------------------------------------------------------------

struct Shared {
    u64 gather_arrived[kRows], result_arrived[kRows];  // mbarriers
    u64 gathered[2][kRows][kCluster], result[2][kRows];
    u64 partial[kWarps];
};

// An aggregator's share of the copies, on every rank that polls them.
__device__ void publish(const Step& step, u32 aggregator, u64 best) {
    constexpr u32 share = kCopies / kAggregators;
    const u32 rank = kDirect ? step.p.rank : step.lane / share, source = kDirect ? 0 : step.p.rank;
    if (step.lane < (kDirect ? 1 : kWorld) * share)
        store_word<kResultScope>(step.p.mailboxes[rank] + step.result(aggregator * share + step.lane % share, source), best, step.tag);
}

__device__ void contribute(const Step& step, u32 voter, u64 key) {
    if constexpr (kAtomic) {
        char* accumulator = step.mine() + kAccumulators + step.p.half * kHalfBytes + (step.number * kRows + step.row) * kAccumulatorBytes;
        bool last = false;
        u64 best = 0;
        if (step.lane == 0) {
            const u64 at = __cvta_generic_to_global(accumulator);
            u32 before;
            asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(key) : "memory");
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at + 8) : "memory");
            last = before == kVoters - 1;
            if (last) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(best) : "l"(at) : "memory");
        }
        if (__any_sync(kAllLanes, last)) publish(step, 0, __shfl_sync(kAllLanes, best, 0));
    } else if (step.lane < kSlotSources) {
        char* mailbox = step.p.mailboxes[kSlotsEverywhere ? step.lane : step.p.rank];
        store_word<kSlotScope>(mailbox + step.slot(kSlotsEverywhere ? step.p.rank : 0, voter), key, step.tag);
    }
}

// By kAggregatorWarps warps, `warp` counting them.
__device__ bool aggregate(const Step& step, Shared& s, u32 aggregator, u32 warp) {
    constexpr u32 lanes = kAggregatorWarps * kLanes, most = (kSlots + lanes - 1) / lanes;
    const u32 first = warp * kLanes + step.lane;
    u64 best = 0;
    const bool ok = await_words<kSlotScope, most, lanes * TPW_WORD_BYTES>(
        step, kSlot, step.mine() + step.slot(0, first), first < kSlots ? (kSlots - first + lanes - 1) / lanes : 0, best);
    if constexpr (kAggregatorWarps > 1) {  // joined by a warp that has failed too
        if (step.lane == 0) s.partial[warp] = best;
        __syncwarp();
        if (warp > 0) {
            asm volatile("barrier.cta.arrive 1, %0;" ::"n"(lanes) : "memory");
            return ok;
        }
        asm volatile("barrier.cta.sync 1, %0;" ::"n"(lanes) : "memory");
#pragma unroll
        for (u32 i = 1; i < kAggregatorWarps; ++i) best = max(best, s.partial[i]);
    }
    if (ok) publish(step, aggregator, best);
    return ok;
}

// kAll: every slot of every rank; else this voter's copy of the result.
__device__ bool receive(const Step& step, u32 voter, u64& best) {
    const u32 lane = step.lane;
    if constexpr (kAll) {
        constexpr u32 most = (kSlots + kLanes - 1) / kLanes;
        return await_words<kSlotScope, most, kLanes * TPW_WORD_BYTES>(step, kSlot, step.mine() + step.slot(0, lane),
                                                                     lane < kSlots ? (kSlots - lane + kLanes - 1) / kLanes : 0, best);
    }
    return await_words<kResultScope, 1, 0>(step, kResult, step.mine() + step.result(voter % kCopies, lane), lane < kResultSources, best);
}

}  // namespace tpw

extern "C" __global__ void __launch_bounds__(tpw::kThreads, 1) rendezvous(const __grid_constant__ tpw::Params p) {
    using namespace tpw;
    __shared__ Shared s;
    const u32 warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const u32 member = blockIdx.x % kCluster, voter = blockIdx.x / kCluster;
    const bool leads = member == 0;
    if (threadIdx.x < 2 * kRows) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.gather_arrived[0] + threadIdx.x)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (kAtomic)
        for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < kHalfBytes / 8; i += kCtas * kThreads)
            reinterpret_cast<u64*>(p.mailboxes[p.rank] + kAccumulators + (1 - p.half) * kHalfBytes)[i] = 0;
    if constexpr (kCluster > 1) cluster_barrier();

    const u64 expiry = now_ns() + p.deadline_ns;
    u64 start = 0;
    bool ok = load_control(p.mailboxes[p.rank], kFailure) == 0;
    for (u32 number = 0; number < kWarmup + kSteps; ++number) {
        if (__syncthreads_or(!ok)) break;  // one answer for all threads, as each of them needs
        if (number == kWarmup) start = now_ns();
        const u64 global_step = p.first_step + number;
        const Step step{p, expiry, global_step + 1, number, warp, lane};
        u64 key = warp < kRows ? key_of(global_step, warp, p.rank * kCtas + blockIdx.x) : 0;
        if (warp < kRows) {
            if constexpr (kCluster > 1) {
                if (!leads) {
                    if (lane == 0) push(0, &s.gathered[step.parity()][warp][member], &s.gather_arrived[warp], key);
                } else if ((ok = await_pushed(step, kGather, &s.gather_arrived[warp], (kCluster - 1) * 8))) {
#pragma unroll
                    for (u32 i = 1; i < kCluster; ++i) key = max(key, s.gathered[step.parity()][warp][i]);
                }
            }
            if (leads && ok) contribute(step, voter, key);
        }
        if constexpr (!kAtomic && !kAll) {
            // Aggregator j of row r is voter r * kAggregators + j.
            const u32 row = voter / kAggregators;
            if (leads && row < kRows && (kAggregatorWarps > 1 ? warp < kAggregatorWarps : warp == row)) {
                const Step of_row{p, expiry, step.tag, number, row, lane};
                ok &= aggregate(of_row, s, voter % kAggregators, kAggregatorWarps > 1 ? warp : 0);
            }
        }
        if (warp < kRows && ok) {
            if (leads || !kPush) ok = receive(step, voter, key);
            if constexpr (kPush) {
                if (leads) {
                    if (ok && lane > 0 && lane < kCluster) push(lane, &s.result[step.parity()][warp], &s.result_arrived[warp], key);
                } else {
                    ok = await_pushed(step, kPushed, &s.result_arrived[warp], 8);
                    key = s.result[step.parity()][warp];
                }
            }
            if (ok && key != best_key(global_step, warp)) ok = step.fail(kWrongKey);
        }
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.elapsed_ns = now_ns() - start;
    if constexpr (kCluster > 1) cluster_barrier();  // nobody's shared memory goes while it may be pushed to
}

// The Markov walk: one launch for all gamma steps of a block. W2 is read once, into registers and shared memory, and the
// kernel stays alive while the CTAs of all ranks agree on each step's token through the mailboxes.
//
// One CTA an SM. CTA c owns the 16-row tiles [c * T, (c + 1) * T) of this rank's rows; multiply warp w of it the tiles w,
// w + kMultiplyWarps, ...: the first TPW_REG_TILES of those in registers, the next ones in shared memory, and what doesn't fit
// is streamed each step. A *pass* is one step of one group of requests (the columns of the MMAs).
#include "cta_best.cuh"
#include "exchange.cuh"
#include "logits.cuh"
#include "lse.cuh"
#include "multiply.cuh"

namespace tpw {

// Of named_barrier. A block's start takes two: each kind of warps waits for the other one's arrival.
constexpr int kServiceBarrier = 1, kStartBarrier = 2, kLoadingBarrier = 3;

__device__ __forceinline__ int64_t target_id(const WalkParams& p, uint64_t key) {
    const uint32_t drafted = kCandidates ? candidate_id(key) : key_id(key);
    const int64_t id = min(static_cast<int64_t>(drafted), p.vocab_size - 1);  // a corrupt key must not become an address
    return p.d2t ? p.d2t[id] : id;
}

__device__ __forceinline__ const uint4* u_row(const WalkParams& p, int64_t token) { return p.u_rows + clamped(p, token) * (TPW_RANK / 8); }

__device__ __forceinline__ void store_token(const WalkParams& p, int row, int step, int64_t token) {
    p.tokens[row * p.tokens_stride_row + step * p.tokens_stride_step] = token;
}

// A block without valid rows costs nothing it needn't.
__device__ __forceinline__ bool has_passes(const WalkParams& p, const Cta& cta, int first_step) { return cta.batch > 0 && first_step < p.gamma; }

// ---- the warps that multiply -----------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_warps(const WalkParams& p, const Smem& s, const Cta& cta, int first_step) {
    // W2 first: everything up to the first step happens in the shadow of these loads. As few instructions as can be: in a cold L2
    // each 256 bytes of them take a read of DRAM, with nothing else on its way.
    Fragment weights[kRegTiles][kSteps];
    if (has_passes(p, cta, first_step)) {
        const Fragment* cta_weights = p.w2_fragments + static_cast<int64_t>(cta.index) * kTilesPerCta * (kSteps * kWarpSize) + cta.lane;
#pragma unroll
        for (int i = 0; i < kRegTiles; ++i) {
            const int tile = min(i * kMultiplyWarps + cta.warp, kTilesPerCta - 1);  // beyond them no rows exist, whatever is multiplied
#pragma unroll
            for (int k = 0; k < kSteps; ++k) weights[i][k] = load_weights(cta_weights + tile * (kSteps * kWarpSize) + k * kWarpSize);
        }
    }
    named_barrier(kStartBarrier, kThreads);
    named_barrier_arrive(kLoadingBarrier, kThreads);
    if constexpr (kByWarpgroups) load_core_matrices(p, s, cta, has_passes(p, cta, first_step));
    const Passes passes(cta.batch, p.gamma, first_step);
    const WeightStream stream{p, s, cta, passes.count};
    if (kStreams && cta.lane == 0) stream.start();
    for (int index = 0; index < passes.count; ++index) {
        const Pass pass = passes.at(index);
        if constexpr (kNoiseAhead) {
            // Not before the others know of the pass before: all wait for that, and draws would take its issue slots. The first one's are
            // drawn by the same code, while W2 is on its way: so it is there when it has to be quick.
            if (index > 0) mbarrier_wait(&s.control->contributed[passes.at(index - 1).buffer()], passes.at(index - 1).parity());
            draw_noise(p, s, cta, pass);
        }
        LaneRequests<kLaneGroups> mine(p, s, cta, pass, PassNoise(s, cta, pass), 0);  // before the wait: of all this nothing depends on u
        const auto await_u = [&]() {
            mbarrier_wait(&s.control->u_ready[pass.buffer()], pass.parity());
            return !s.has_failed();
        };
        // One request's warps in int8 load what they can before u is there, if they don't begin with tiles that wait for nothing else.
        bool alive = true;
        if constexpr (!kQuadsShare || kStreams) alive = await_u();
        if (index == 0) mbarrier_wait(&s.control->weights_arrived, 0);
        mbarrier_wait(&s.control->base_arrived[pass.buffer()], pass.parity());
        // Copies that run ahead are taken whatever happens, and products of anything harm nobody. Nor may all of a warpgroup's warps, who
        // multiply together, have seen the same of a failure.
        if (alive || kStreams || kByWarpgroups) multiply(p, s, cta, pass, weights, mine, stream, await_u);
        __syncwarp();
        if (cta.lane == 0) mbarrier_arrive(&s.control->best_ready[pass.buffer()]);
    }
}

// ---- the warps that do all else --------------------------------------------------------------------------------------

// By one thread, before anything else: W2's other tiles are on their way into shared memory, and the barriers exist.
__device__ __forceinline__ void load_shared_tiles(const WalkParams& p, const Smem& s, const Cta& cta, int first_step) {
    // Every copy that is started is waited for: one that lands after its CTA's end would hit the next kernel's.
    const int tiles = has_passes(p, cta, first_step) ? kSmemTiles : 0;
    uint64_t* arrived = &s.control->weights_arrived;
    mbarrier_init(arrived, kByWarpgroups ? kMultiplyWarps : 1);
    if constexpr (!kByWarpgroups) {
        mbarrier_expect(arrived, tiles * kTileBytes);
        const Fragment* weights = p.w2_fragments + (static_cast<int64_t>(cta.index) * kTilesPerCta + kRegTiles * kMultiplyWarps) * (kSteps * kWarpSize);
        if (tiles > 0) bulk_load(s.weights, weights, tiles * kTileBytes, arrived);
    }
#pragma unroll
    for (int buffer = 0; buffer < 2; ++buffer) {
        mbarrier_init(&s.control->base_arrived[buffer], kStagingWarps);
        mbarrier_init(&s.control->u_ready[buffer], kServiceWarps);
        mbarrier_init(&s.control->best_ready[buffer], kMultiplyWarps);
        mbarrier_init(&s.control->contributed[buffer], kServiceWarps);
    }
#pragma unroll
    for (int i = 0; i < kMultiplyWarps * kStreamSlots; ++i) mbarrier_init(s.stream_arrived + i, 1);
    s.control->failed = 0;
}

struct Service {
    const WalkParams& p;
    const Smem& s;
    const Cta& cta;
    const Passes& passes;
    const int thread, warp, lane;
    WalkExchange exchange;  // once start() has made its block number known

    __device__ __forceinline__ Service(const WalkParams& p, const Smem& s, const Cta& cta, const Passes& passes)
        : p(p), s(s), cta(cta), passes(passes), thread(cta.warp * kWarpSize + cta.lane), warp(cta.warp), lane(cta.lane),
          exchange{p, 0, 0} {}

    // How many passes u is ahead of the results: with one group of requests a pass needs the results of the one before.
    __device__ __forceinline__ int lead() const { return passes.groups == 1 ? 1 : 2; }
    // And how many an aggregator is behind: where results have time, it doesn't wait for the slowest CTA of the present pass. With three
    // groups they are wanted a pass later: in bf16 48 requests took 95 µs so, not 87, while 24 in int8 took 75, not 77.
    __device__ __forceinline__ int lag() const { return !kPosts && passes.groups > (TPW_INT8 ? 2 : 3) ? 1 : 0; }
    __device__ __forceinline__ void fail() const { s.control->failed = 1; }
    // Made where they are used: members of this would live in memory.
    __device__ __forceinline__ LogitsOutput logits() const { return {p, s, cta}; }

    __device__ __forceinline__ void start() const {
        if (cta.warp == 0) {
            for (int index = 0; index < min(2, passes.count); ++index)
#pragma unroll 1
                for (int share = 0; share < kStagingWarps; ++share) stage_base(p, s, cta, passes.at(index), share);
            if (cta.lane == 0) WalkExchange::start(p, &s.control->block, &s.control->expiry);
        }
        load_rows(p, s, cta, passes.first_step, thread);
        if constexpr (kPosts) exchange.translate(thread);
        if constexpr (TPW_INT8)
            for (int row = thread; row < cta.rows; row += kServiceThreads) s.row_scales[row] = p.row_scales[cta.first_row + row];
    }

    __device__ __forceinline__ bool open() const {
        if (!exchange.open(lane, cta.index, cta.batch)) return false;
        if (kAgreeingRanks == 1) return true;
        // By its own posts, as an aggregator, or logits; and CTA 0 looks at the headers should no row be valid. It alone then: it
        // ends the block without the others, one of which may begin later and would wait for the next block's headers.
        const bool publishes = cta.batch > 0 && (kPosts || kPeerLogits || cta.index < cta.batch);
        return exchange.compare_headers(lane, cta.index, cta.batch, publishes || cta.index == 0);
    }

    // The tokens of a pass, once all ranks' keys are in: its rows' `previous` from now on. A warp looks after request
    // warp + kServiceWarps * i. CTA 0 writes the tokens out, as it alone writes anchors should the block fail: when it has all
    // of a block's keys nobody else of this rank waits for anything, so that a block's tokens are all its own or all anchors.
    __device__ __forceinline__ void receive(const Pass& pass, bool alive) const {
        if (!alive) return;
        // Lane i * kAgreeingRanks + rank waits for that rank's word of the warp's i-th row.
        const int request = warp + kServiceWarps * (lane / kAgreeingRanks);
        const bool active = lane < kWarpRequests * kAgreeingRanks && request < pass.requests;
        const int row = pass.first_row + (active ? request : 0);
        const uint32_t previous = active ? s.rows[row].previous : 0;  // another warp's row may be about to change
        u64 key = 0;
        if (!exchange.receive(lane, active, pass.step, row, previous, key)) return fail();
        const u64 word = key;
        key = Settle<kAgreeingRanks>{s.rows[row], pass.step}(word, 0, active, [&](int) { return word; });
        if (!active || lane % kAgreeingRanks != 0) return;
        const int64_t token = target_id(p, key);
        s.rows[row].previous = static_cast<uint32_t>(token);
        publish(pass, row, token);
    }

    // The best of all CTAs' posts, or 0 after a failure. Each warp waits for its share of them. All meet, whatever they have seen of a
    // failure.
    __device__ __forceinline__ u64 collect(const Pass& pass, bool alive) const {
        u64 key = 0;
        const RowState& row = s.rows[0];
        const Settle<kWarpSize> settle{row, pass.step};
        if (alive && !exchange.collect<kServiceThreads>(thread, pass.step, row.previous, cta.index, cta.count, key, settle)) fail();
        if (lane == 0) s.control->collected[warp] = key;
        named_barrier(kServiceBarrier, kServiceThreads);
        key = lane < kServiceWarps ? s.control->collected[lane] : 0;
        const u64 word = key;
        return settle(word, 0, 1, [&](int) { return word; });
    }

    __device__ __forceinline__ void publish(const Pass& pass, int row, int64_t token) const {
        if (cta.index != 0) return;
        store_token(p, batch_row(p, row), pass.step, token);
        if (is_split(p)) exchange.send_token(pass.step, batch_row(p, row), token);
    }

    // receive(pass), then stage_u(next), of one request, whose token the first warp has in a register: what isn't u is done while that
    // is on its way, or once the multiply warps have it.
    __device__ __forceinline__ void follow(const Pass& pass, const Pass& next, bool alive) const {
        const u64 key = collect(pass, alive);
        const bool wants_u = next.index < passes.count;
        int64_t token = 0;
        if (warp == 0) {
            token = key != 0 ? target_id(p, key) : s.rows[0].previous;
            URow u;
            const uint32_t previous = static_cast<uint32_t>(token);
            if (wants_u) u.load(u_row(p, previous), p.u_scales + clamped(p, previous), lane);
            __syncwarp();  // all lanes have read the one before
            if (lane == 0) s.rows[0].previous = previous;
            if (wants_u) u.store(s.u + next.buffer() * kColumnGroups * kUBytes, &s.control->u_scale[next.buffer()][0], 0, lane);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&s.control->u_ready[next.buffer()]);  // behind the last pass nobody waits for it
        if (thread == 0 && key != 0) publish(pass, 0, token);
    }

    // u = W1[previous] of this warp's requests. With it the pass is ready.
    __device__ __forceinline__ void stage_u(const Pass& pass) const {
        URow u[kWarpRequests];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kWarpRequests; ++i) {
            const int request = cta.warp + kServiceWarps * i;
            if (request < pass.requests) {
                const uint32_t previous = s.rows[pass.first_row + request].previous;
                u[i].load(u_row(p, previous), p.u_scales + clamped(p, previous), lane);
            }
        }
        static_assert(Dot::kRequests % kServiceWarps == 0, "all warps' i-th requests are of one group");
#pragma unroll
        for (int i = 0; i < kWarpRequests; ++i) {
            const int request = cta.warp + kServiceWarps * i;
            if (request < pass.requests)
                u[i].store(s.u + (pass.buffer() * kColumnGroups + kServiceWarps * i / Dot::kRequests) * kUBytes, &s.control->u_scale[pass.buffer()][request],
                           cta.warp + kServiceWarps * i % Dot::kRequests, cta.lane);
        }
        if constexpr (kByWarpgroups) fence_async_proxy();
        __syncwarp();
        if (cta.lane == 0) mbarrier_arrive(&s.control->u_ready[pass.buffer()]);
    }

    // Whether there is anything to bring for the pass at `index`: u, or behind the last pass the last token of a single request. That CTA 0
    // alone wants, and takes it by the same code as those before: a copy of it would be fetched from DRAM when all else is done.
    __device__ __forceinline__ bool brings(int index) const { return index < passes.count || (kPosts && cta.index == 0); }

    // u of a pass, by the tokens of the step before.
    __device__ __forceinline__ void bring_u(const Pass& next, bool alive) const {
        const bool needs_token = next.index >= passes.groups;
        if (kPosts && needs_token) return follow(passes.at(next.index - 1), next, alive);
        if (needs_token) receive(passes.at(next.index - passes.groups), alive);
        stage_u(next);
    }

    // One of these rows of W1 is the next u, and this early it is in L2 in time. By the first of `lanes` lanes.
    __device__ __forceinline__ void prefetch_u(u64 key, int lane) const {
        if (key != 0 && lane < TPW_RANK / 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(u_row(p, target_id(p, key)) + lane * 8));
    }

    __device__ __forceinline__ void contribute(const Pass& pass) const {
        constexpr int kLanes = kWarpSize / kWarpRequests;
        const int request = warp + kServiceWarps * (lane / kLanes), row = pass.first_row + request;
        const bool active = request < pass.requests;
        const u64 key = cta_best_keys(p, s, cta, pass, request, active);
        if (!active) return;
        if constexpr (kPosts)
            exchange.post(lane, pass.step, s.rows[row].previous, cta.index, cta.count, key);
        else if (lane % kLanes == 0)
            exchange.contribute(pass.step, row, s.rows[row].previous, cta.index, key);
        // Beyond a few requests this would be more traffic than it saves.
        if (passes.groups == 1) prefetch_u(key, lane % kLanes);
    }

    // The rows that this CTA aggregates are cta.index, cta.index + cta.count, ...; of a pass there is one, or none.
    __device__ __forceinline__ void aggregate(const Pass& pass) const {
        for (int row = cta.index; row < pass.first_row + pass.requests; row += cta.count) {
            if (row < pass.first_row || (row - pass.first_row) % kServiceWarps != warp) continue;
            u64 best;
            const RowState& state = s.rows[row];
            if (!exchange.aggregate(lane, pass.step, row, state.previous, cta.count, best, Settle<kWarpSize>{state, pass.step})) return fail();
            prefetch_u(best, lane);  // most likely the next u
        }
    }

    // Base logits of the pass after next, into the buffer of pass `index`, which all have read. By the last warps, as the first one may
    // have a single request's token to look after.
    __device__ __forceinline__ void stage_next_base(int index) const {
        const int share = warp - (kServiceWarps - kStagingWarps);
        if (share < 0 || index + 2 >= passes.count) return;
        if constexpr (kLogits && kStagingWarps == 1) await_bulk_reads();  // of this warp's own copies
        fence_async_proxy();
        stage_base(p, s, cta, passes.at(index + 2), share);
    }

    // After a failure all warps of both kinds go on through the remaining passes, without the work (but what is streamed is
    // multiplied all the same): each pass keeps its arrivals, barriers and copies, so that nobody waits for a warp that has left.
    __device__ __forceinline__ void run() {
        start();
        named_barrier_arrive(kStartBarrier, kThreads);
        // Nothing here needs what the multiply warps do before. But their loads come first: without this wait a block of one request
        // took 41 µs instead of 40.
        named_barrier(kLoadingBarrier, kThreads);
        exchange.block = s.control->block;
        exchange.expiry = s.control->expiry;
        if (cta.warp == kServiceWarps - 1 && !open()) fail();
        for (int index = 0; index < min(lead(), passes.count); ++index) stage_u(passes.at(index));
        mbarrier_wait(&s.control->weights_arrived, 0);
        exchange.prefetch(thread, kServiceThreads, kPosts, cta.batch, cta.index, cta.count);
        for (int index = 0;; ++index) {
            if (index > 0) combine_sums(passes.at(index - 1));
            if (index == passes.count) break;
            const Pass pass = passes.at(index);
            mbarrier_wait(&s.control->best_ready[pass.buffer()], pass.parity());
            const bool alive = !s.has_failed();
            if (alive) contribute(pass);
            if constexpr (kNoiseAhead) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&s.control->contributed[pass.buffer()]);
            }
            if (alive) {
                if constexpr (kLogits && !kPeerLogits) logits().start(pass);
                if (!kPosts && index >= lag()) aggregate(passes.at(index - lag()));
                if constexpr (kLogits) {
                    if constexpr (!kPeerLogits) logits().copy(pass);
                    if (p.lse) contribute_lse(p, s.weights, pass);
                }
            }
            // Base logits come where others, or the logits made from them, have been read by all. With one group of requests they have time
            // until the step after next, with several until the next pass.
            if constexpr (kPeerLogits) {
                if constexpr (kColumnGroups == 1) {
                    named_barrier(kServiceBarrier, kServiceThreads);
                    if (index > 0) stage_next_base(index - 1);
                }
                // Behind u: ahead of it the exchange's words wait for the columns on their way. 8 sampled requests on two GPUs took 91 µs,
                // now 86; 1 and 64 take 1 % more. But the last ones needn't wait for the last token. A loop: one copy of the code.
                if constexpr (kPosts) {
                    const bool columns_first = index + lead() >= passes.count;
#pragma unroll 1
                    for (int turn = columns_first; turn < 2 + columns_first; ++turn) {
                        if (turn != 1 && brings(index + lead())) bring_u(passes.at(index + lead()), alive);
                        if (turn == 1 && alive) logits().start(pass), logits().copy(pass);
                    }
                } else {
                    if (index + lead() < passes.count) bring_u(passes.at(index + lead()), alive);
                    if (alive) logits().start(pass), logits().copy(pass);
                }
                if constexpr (kColumnGroups > 1) {
                    await_bulk_reads();
                    named_barrier(kServiceBarrier, kServiceThreads);
                    stage_next_base(index);
                }
            } else {
                if constexpr (kLogits && kColumnGroups > 1) await_bulk_reads();
                if constexpr (kKeepsLogits) named_barrier(kServiceBarrier, kServiceThreads);
                if constexpr (kColumnGroups > 1) stage_next_base(index);
                if (!brings(index + lead())) continue;
                bring_u(passes.at(index + lead()), alive);
                if constexpr (kColumnGroups == 1) stage_next_base(index);
            }
        }
        if (lag() > 0 && !s.has_failed()) aggregate(passes.at(passes.count - 1));
        if constexpr (kLogits) {
            logits().finish();
            if constexpr (kPeerLogits) {
                named_barrier(kServiceBarrier, kServiceThreads);
                if (passes.count > 0 && !s.has_failed()) logits().announce(exchange);
            }
        }
        if (cta.index == 0) finish();
    }

    // Of the pass before: its parts are in by now. And not later, as mailbox.cuh has it: results of the rows' next step follow.
    __device__ __forceinline__ void combine_sums(const Pass& pass) const {
        if constexpr (kLogits)
            if (p.lse && !s.has_failed() && !combine_lse(p, s.weights, pass)) fail();
    }

    // CTA 0, once it has the last results: then all CTAs have read all that it is about to change.
    __device__ __forceinline__ void finish() const {
        const int rows = valid_rows(p);
        const bool alive = !s.has_failed();
        // A single request's are here already.
        for (int index = kPosts ? passes.count : passes.count - passes.groups; index < passes.count; ++index) receive(passes.at(index), alive);
        if (is_split(p) && !s.has_failed()) receive_tokens(rows);
        if constexpr (kLogits) {
            if (p.lse && !s.has_failed() && !finish_lse(p, s.weights)) fail();
            if (kPeerLogits && passes.count > 0 && !s.has_failed() && !logits().arrived(exchange)) fail();
        }
        named_barrier(kServiceBarrier, kServiceThreads);
        if (!s.control->failed) {
            if (thread != 0) return;
            uint64_t last_tokens = 0;
#pragma unroll(kPosts ? 1 : 4)  // of one request few instructions, which nobody has executed before
            for (int row = 0; row < rows; ++row) last_tokens += row_hash(row, last_token(row));
            exchange.close(last_tokens);
            if (p.temperatures && p.offset_pointer)
                for (int row = 0; row < (p.offset_stride ? rows : 1); ++row) p.offset_pointer[row * p.offset_stride] += 1;
        } else {
            for (int i = thread; i < rows * p.gamma; i += kServiceThreads) {
                const int row = base_row(p, i / p.gamma);  // of the batch: shares choose none
                store_token(p, row, i % p.gamma, anchor(p, row));
            }
        }
    }

    // Those of the rows that other ranks walk.
    __device__ __forceinline__ void receive_tokens(int rows) const {
        for (int i = thread; i < rows * p.gamma; i += kServiceThreads) {
            const int row = i / p.gamma, step = i % p.gamma;
            if (row % p.shares == p.rank) continue;
            u64 token;
            if (!exchange.receive_token(step, row, token)) {
                fail();
                break;
            }
            store_token(p, row, step, static_cast<int64_t>(token));
        }
        __syncwarp();
    }

    // Of a row of the batch, once all its tokens are stored.
    __device__ __forceinline__ uint32_t last_token(int row) const {
        if (!is_split(p)) return s.rows[row].previous;
        return static_cast<uint32_t>(p.tokens[row * p.tokens_stride_row + (p.gamma - 1) * p.tokens_stride_step]);
    }
};

}  // namespace tpw

extern "C" __global__ void __launch_bounds__(tpw::kThreads, 1) walk(const __grid_constant__ tpw::WalkParams p) {
    using namespace tpw;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Smem s(shared_memory);
    const Cta cta(p);
    // Plan certified left nothing, on no rank: they have agreed on that, and this launch isn't a block.
    if (p.batch_rows && cta.batch == 0) return;
    const int first_step = p.first_step ? min(max(*p.first_step, 0), p.gamma) : 0;
    // The registers of the SM go to those who hold W2 in them (warp groups of four change theirs together).
    if (cta.warp < kMultiplyWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TPW_MULTIPLY_REGISTERS));
        multiply_warps(p, s, cta, first_step);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TPW_SERVICE_REGISTERS));
        const Cta of_service = Cta::of_service(p);
        if (of_service.warp == 0 && cta.lane == 0) load_shared_tiles(p, s, cta, first_step);
        __syncwarp();
        Service(p, s, of_service, Passes(cta.batch, p.gamma, first_step)).run();
    }
}

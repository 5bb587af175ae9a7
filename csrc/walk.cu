// The Markov walk: one launch for all gamma steps of a block. W2 is read once, into registers and shared memory, and the
// kernel stays alive while the CTAs of all ranks agree on each step's token through the mailboxes.
//
// One CTA an SM. CTA c owns the 16-row tiles [c * T, (c + 1) * T) of this rank's rows; warp w of it the tiles w, w + kWarps,
// ...: the first TPW_REG_TILES of those in registers, the next ones in shared memory, and what doesn't fit is streamed each
// step. A *pass* is one step of one group of requests (the columns of the MMAs). With several groups the exchange of one is
// hidden behind the dot products of the others.
#include "exchange.cuh"
#include "multiply.cuh"

namespace tpw {

__device__ __forceinline__ int64_t target_id(const WalkParams& p, uint64_t key) {
    const uint32_t id = key_id(key);
    return p.d2t ? p.d2t[id] : id;
}

__device__ __forceinline__ const bf16* w1_row(const WalkParams& p, int64_t token) {
    return p.w1 + min(max(token, int64_t{0}), p.target_vocab_size - 1) * TPW_RANK;
}

__device__ __forceinline__ void store_token(const WalkParams& p, int row, int step, int64_t token) {
    p.tokens[row * p.tokens_stride_row + step * p.tokens_stride_step] = token;
}

__device__ __forceinline__ void copy_logits(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass) {
    for (int request = 0; request < pass.requests; ++request) {
        const int row = pass.first_row + request;
        if (kSampled && p.logits_sampled_rows_only && s.rows[row].temperature == 0.0f) continue;
        const BaseLogit* staged = staged_base(p, s, cta, pass, request);
        const int64_t at = row * p.logits_stride_row + pass.step * p.logits_stride_step + cta.first_row;
#pragma unroll
        for (int rank = 0; rank < (kLogits == 2 ? TPW_WORLD_SIZE : 1); ++rank) {
            Logit* out = static_cast<Logit*>(p.logits[rank]) + at;
            for (int i = threadIdx.x; i < cta.rows; i += kThreads) out[i] = *reinterpret_cast<const Logit*>(staged + i);
        }
    }
}

}  // namespace tpw

extern "C" __global__ void __launch_bounds__(tpw::kThreads, 1) walk(const __grid_constant__ tpw::WalkParams p) {
    using namespace tpw;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Smem s(shared_memory, p);
    Cta cta;
    cta.lane = threadIdx.x % kWarpSize;
    cta.warp = threadIdx.x / kWarpSize;
    cta.index = blockIdx.x;
    cta.count = gridDim.x;
    cta.first_row = blockIdx.x * p.tiles_per_cta * kTileRows;
    cta.rows = min(max(p.shard_width - cta.first_row, 0), p.tiles_per_cta * kTileRows);
    cta.batch = p.num_valid ? min(max(*p.num_valid, 0), p.batch) : p.batch;
    const int groups = (cta.batch + kRequests - 1) / kRequests;
    const auto pass_of = [&](int index, int step, int group) { return Pass{index, step, group * kRequests, min(kRequests, cta.batch - group * kRequests)}; };

    // W2 first: everything up to the first step happens in the shadow of these loads.
    const Fragment* cta_weights = p.w2_fragments + static_cast<int64_t>(blockIdx.x) * p.tiles_per_cta * (kSteps * kWarpSize);
    if (cta.warp == 0) {
        const int tails = kTailSteps > 0 ? min(max(p.tiles_per_cta - (kRegTiles - 1) * kWarps, 0), kWarps) : 0;
        if (cta.lane == 0) {
            s.control->failed = 0;
            WalkExchange::start(p, &s.control->block, &s.control->expiry);
            mbarrier_init(&s.control->weights_arrived, 1);
            mbarrier_init(&s.control->base_arrived[0], 1);
            mbarrier_init(&s.control->base_arrived[1], 1);
            mbarrier_expect(&s.control->weights_arrived, p.smem_tiles * kTileBytes + tails * kTailBytes);
        }
        __syncwarp();
        if (cta.lane < tails)
            bulk_load(s.tails + cta.lane * kTailBytes, cta_weights + (((kRegTiles - 1) * kWarps + cta.lane) * kSteps + kSteps - kTailSteps) * kWarpSize, kTailBytes,
                      &s.control->weights_arrived);
        for (int tile = cta.lane; tile < p.smem_tiles; tile += kWarpSize)
            bulk_load(s.weights + tile * kTileBytes, cta_weights + (kRegTiles * kWarps + tile) * (kSteps * kWarpSize), kTileBytes, &s.control->weights_arrived);
        if (groups > 0) stage_base(p, s, cta, pass_of(0, 0, 0));
    }
    Fragment weights[kRegFragments];
#pragma unroll
    for (int i = 0; i < kRegFragments; ++i) {
        const int tile = i / kSteps * kWarps + cta.warp;
        const Fragment* source = cta_weights + (tile * kSteps + i % kSteps) * kWarpSize + cta.lane;
        weights[i] = tile < p.tiles_per_cta ? load_weights(source) : make_uint4(0, 0, 0, 0);
    }

    const WalkExchange exchange{p, &s.control->block, &s.control->expiry};
    const auto fail = [&] { s.control->failed = 1; };
    load_rows(p, s, cta);
    if constexpr (TPW_INT8)
        for (int row = threadIdx.x; row < cta.rows; row += kThreads) s.row_scales[row] = p.row_scales[cta.first_row + row];
    __syncthreads();
    if constexpr (kSampled)
        if (groups > 0) draw_noise(p, s, cta, pass_of(0, 0, 0));
    const auto hashed = [&](int row, HeaderTensor tensor) -> uint64_t {
        switch (tensor) {
            case HeaderTensor::anchors: return static_cast<uint64_t>(anchor(p, row));
            case HeaderTensor::temperatures: return p.temperatures ? __float_as_uint(p.temperatures[row * p.temperatures_stride]) : 0;
            case HeaderTensor::key: return noise_key(p, row);
            case HeaderTensor::offset: return noise_offset(p, row);
            default: return noise_slot(p, row);
        }
    };
    if (cta.warp == kWarps - 1 && !exchange.open(cta.lane, cta.index, cta.batch, hashed)) fail();

    // A warp looks after request cta.warp + kWarps * i of a pass; where it waits for results, lane i * TPW_WORLD_SIZE + rank does.
    struct Mine {
        bool active;
        int row;
        u32 previous;
    };
    const auto mine_of = [&](const Pass& pass) {
        const int request = cta.warp + kWarps * (cta.lane / TPW_WORLD_SIZE), row = pass.first_row + request;
        const bool active = cta.lane < kWarpRequests * TPW_WORLD_SIZE && request < pass.requests;
        return Mine{active, row, active ? s.rows[row].previous : 0};
    };
    // The tokens of `step`, once all ranks' results are in: the rows' `previous` from now on. CTA 0 writes them out, as it alone
    // writes anchors should the block fail: when it has all of a block's results nobody else of this rank waits for anything,
    // so that a block's tokens are either all its own or all anchors.
    const auto receive = [&](int step, const Mine& mine, Word& word) {
        if (!exchange.receive(cta.lane, mine.active, step, mine.row, mine.previous, word)) return fail();
        if (!mine.active || cta.lane % TPW_WORLD_SIZE != 0) return;
        const int64_t token = target_id(p, word.key);
        s.rows[mine.row].previous = static_cast<uint32_t>(token);
        if (cta.index == 0) store_token(p, mine.row, step, token);
    };
    // u = W1[previous] of this warp's rows of a pass.
    URow u[kWarpRequests];
    const auto load_u = [&](const Pass& pass) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kWarpRequests; ++i)
            if (cta.warp + kWarps * i < pass.requests) u[i].load(w1_row(p, s.rows[pass.first_row + cta.warp + kWarps * i].previous), cta.lane);
    };
    const auto store_u = [&](const Pass& pass) {
#pragma unroll
        for (int i = 0; i < kWarpRequests; ++i) {
            const int request = cta.warp + kWarps * i;
            if (request < pass.requests)
                u[i].store(s.u + request / Dot::kRequests * kUBytes, &s.control->u_scale[request], request % Dot::kRequests, cta.lane);
        }
    };
    const auto prefetch_u = [&](u64 key) {
        if (key != 0 && cta.lane < TPW_RANK / 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(w1_row(p, target_id(p, key)) + cta.lane * 64));
    };
    const auto aggregate = [&](const Pass& pass) {
        for (int request = cta.warp; request < pass.requests; request += kWarps) {
            const int row = pass.first_row + request;
            if (!cta.aggregates(row)) continue;
            u64 best;
            if (!exchange.aggregate(cta.lane, pass.step, row, s.rows[row].previous, cta.count, best)) return fail();
            // Most likely the next u: have it in L2 by then.
            prefetch_u(best);
        }
    };

    if (groups > 0) {
        load_u(pass_of(0, 0, 0));
        store_u(pass_of(0, 0, 0));
    }
    int index = 0;
    for (int step = 0; step < p.gamma; ++step) {
        for (int group = 0; group < groups; ++group, ++index) {
            const Pass pass = pass_of(index, step, group);
            const bool last_group = group + 1 == groups;
            const Pass next = pass_of(index + 1, step + last_group, last_group ? 0 : group + 1);
            const bool has_next = next.step < p.gamma;
            if constexpr (kKeepsLogits) fence_before_bulk_loads();
            __syncthreads();
            if (s.control->failed) goto drained;
            if (has_next && cta.warp == kWarps - 1) stage_base(p, s, cta, next);
            if (index == 0) mbarrier_wait(&s.control->weights_arrived, 0);
            mbarrier_wait(&s.control->base_arrived[pass.buffer()], (index >> 1) & 1);
            // With several groups, the results that the next pass waits for are here already as a rule: look before the dot
            // products, and have its rows of W1 under way while this pass is contributed.
            const Mine mine = mine_of(next);
            const bool waits = has_next && next.step > 0;
            Word word{0, 0};
            if (groups > 1 && waits) word = exchange.peek(cta.lane, mine.active, next.step - 1, mine.row, mine.previous);
            multiply(p, s, cta, pass, weights);
            __syncthreads();
            const bool early = groups > 1 && waits && exchange.arrived(word, next.step - 1, mine.previous);
            if (early) {
                receive(next.step - 1, mine, word);
                load_u(next);
            }
            for (int request = cta.warp; request < pass.requests; request += kWarps) {
                const int row = pass.first_row + request;
                const uint64_t key = cta_best_key(p, s, cta, pass, request);
                exchange.contribute(cta.lane, step, row, s.rows[row].previous, cta.index, key);
                // One of these is the next u, and this early its row of W1 arrives in time. Beyond a few requests it would be
                // more traffic than it saves.
                if (groups == 1) prefetch_u(key);
            }
            // What the aggregator of a group's rows owes: at once when there is one group; with more, one pass later, when
            // the slots have long arrived.
            if (groups == 1)
                aggregate(pass);
            else if (index > 0)
                aggregate(pass_of(0, group > 0 ? step : step - 1, group > 0 ? group - 1 : groups - 1));
            if constexpr (kLogits != 0) copy_logits(p, s, cta, pass);
            if (has_next) {
                // The noise buffer's last readers, the dot products, are behind a barrier.
                if constexpr (kSampled) draw_noise(p, s, cta, next);
                if (!early) {
                    if (waits) receive(next.step - 1, mine, word);
                    load_u(next);
                }
                store_u(next);
            }
        }
    }
    if (groups > 1) aggregate(pass_of(0, p.gamma - 1, groups - 1));
    if (cta.index != 0) return;
    // The last results, and with them the end of all reading of what CTA 0 is about to change.
    for (int group = 0; group < groups; ++group) {
        const Mine mine = mine_of(pass_of(0, p.gamma - 1, group));
        Word word{0, 0};
        receive(p.gamma - 1, mine, word);
    }
    __syncthreads();
drained:
    if (cta.index != 0) return;
    if (s.control->failed) {
        for (int i = threadIdx.x; i < cta.batch * p.gamma; i += kThreads) store_token(p, i / p.gamma, i % p.gamma, anchor(p, i / p.gamma));
        return;
    }
    if (threadIdx.x == 0) {
        uint64_t last_tokens = 0;
        for (int row = 0; row < cta.batch; ++row) last_tokens += row_hash(row, s.rows[row].previous);
        exchange.close(last_tokens);
        if (p.temperatures && p.offset_pointer)
            for (int row = 0; row < (p.offset_stride ? cta.batch : 1); ++row) p.offset_pointer[row * p.offset_stride] += 1;
    }
}

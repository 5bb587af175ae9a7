// Plan certified, the first of its two launches: tokens from a few candidates and a bound on all other ids. The second is the
// walk kernel, for the requests and steps that couldn't be certified; as a rule none, and it returns before it has told anybody.
//
// No CTA waits for the whole grid. Warps choose the candidates of all steps (candidates.cuh) and push them to every rank; then each
// CTA takes the steps that are its own, in the order of the walk, and waits for just their candidates and the token before (chase.cuh).
// A step's token comes from an earlier step, whose CTA is on the GPU, too (the launch is cooperative), and takes its steps in the
// same order: so nobody waits for ever. A helper and who asks it wait for each other, which have no other step, either of them. CTA 0
// collects the tokens, and alone writes tokens, or anchors should the block have failed. It ends the block behind everybody who waits for
// a word of it: those by whom a token came, and the helpers.
#include "chase.cuh"

namespace tpw {

__device__ __noinline__ void advance_offsets(const CertifyParams& p, int batch) {
    const WalkParams& walk = p.walk;
    // The walk that follows draws by the same offsets, and would advance the caller's a second time.
    for (int row = 0; row < batch; ++row) p.offsets[row] = static_cast<int64_t>(noise_offset(walk, row));
    for (int row = 0; row < (walk.offset_stride ? batch : 1); ++row) walk.offset_pointer[row * walk.offset_stride] += 1;
}

// CTA 0, after its own steps.
struct Finish {
    const CertifyParams& p;
    const WalkExchange& exchange;
    const ChaseSmem& s;
    int batch;  // valid rows

    __device__ __forceinline__ void store_token(int row, int step, int64_t token) const {
        p.walk.tokens[row * p.walk.tokens_stride_row + step * p.walk.tokens_stride_step] = token;
    }

    // Tokens up to the step that failed, and which rows did. False when the walk has failed.
    __device__ __forceinline__ bool collect(u64& last_tokens) const {
        const Exchange watch = exchange.watch();
        const int steps = p.walk.gamma;
        int32_t* first_failed = reinterpret_cast<int32_t*>(s.rows);  // [batch]
        unsigned long long* hash = &s.control->hash;
        if (threadIdx.x == 0) *hash = 0;
        for (int row = threadIdx.x; row < batch; row += kCertifyThreads) first_failed[row] = steps;
        bool alive = true;
        int certified = 0, scored = 0;
        __syncthreads();
        for (int at = threadIdx.x; at < batch * steps && alive; at += kCertifyThreads) {
            const int row = at % batch, step = at / batch, owner = u32(row) % u32(p.owners);
            const bool is_own = p.owners == 1 || owner == p.walk.rank;
            const Site site{is_own ? TPW_WAIT_SLOT : TPW_WAIT_TOKEN, is_own ? 0 : u32(owner), u32(step), u32(row)};
            u64 key;
            if (p.helpers > 0 && step > 0 && is_own) alive = await_word<Scope::gpu>(watch, helper_word(p, step, row), header_tag(watch.block), site, key);
            alive = alive && await_word<Scope::sys>(watch, step_word(p, step, row), header_tag(watch.block), site, key);
            if (!alive) break;
            const u64 token = key & kTokenMask;
            if (token & kFailed)
                atomicMin(first_failed + row, static_cast<int32_t>(token & ~kFailed));
            else
                store_token(row, step, static_cast<int64_t>(token));
            certified += !(token & kFailed);
            scored += static_cast<int>((key & ~kTokenMask) >> kScoredShift);
            if (step == steps - 1) atomicAdd(hash, row_hash(row, token));
        }
        if (__syncthreads_or(!alive)) return false;
        last_tokens = *hash;
        certified = __reduce_add_sync(kFullWarp, certified);
        scored = __reduce_add_sync(kFullWarp, scored);
        if (threadIdx.x % kWarpSize == 0) {
            add(Count::certified_steps, certified);
            add(Count::candidates_scored, scored);
        }
        if (threadIdx.x < kWarpSize) write_fallback(first_failed);
        return true;
    }

    __device__ __forceinline__ void write_fallback(const int32_t* first_failed) const {
        int failed = 0, first_step = p.walk.gamma;
        for (int first = 0; first < batch; first += kWarpSize) {
            const int row = first + static_cast<int>(threadIdx.x);
            const int step = row < batch ? first_failed[row] : p.walk.gamma;
            const uint32_t those = __ballot_sync(kFullWarp, step < p.walk.gamma);
            if (step < p.walk.gamma) p.fallback->rows[failed + __popc(those & ((1u << threadIdx.x) - 1))] = row;
            failed += __popc(those);
            first_step = min(first_step, __reduce_min_sync(kFullWarp, step));
        }
        if (threadIdx.x != 0) return;
        p.fallback->num_failed = failed;
        p.fallback->first_step = first_step;
        add(Count::blocks, batch);
        add(Count::steps, batch * p.walk.gamma);
        add(Count::certified_blocks, batch - failed);
        add(Count::fallbacks, failed);
    }

    __device__ __forceinline__ void add(Count what, int more) const {
        if (more > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + static_cast<int>(what)), static_cast<unsigned long long>(more));
    }

    __device__ __forceinline__ void succeed(u64 last_tokens) const {
        if (p.walk.temperatures && p.walk.offset_pointer) advance_offsets(p, batch);
        exchange.close(last_tokens);
    }

    __device__ __forceinline__ void give_up() const {
        for (int i = threadIdx.x; i < batch * p.walk.gamma; i += kCertifyThreads) store_token(i / p.walk.gamma, i % p.walk.gamma, anchor(p.walk, i / p.walk.gamma));
        if (threadIdx.x == 0) p.fallback->num_failed = 0;
    }
};

// By the last warp of each CTA. CTA 0's sends this launch's header and compares all ranks'; the others look for poison. A call: what one
// warp runs would lie between what the others do.
__device__ __noinline__ void begin(const CertifyParams& p, unsigned char* shared_memory, int batch) {
    const ChaseSmem s(shared_memory);
    const int lane = threadIdx.x % kWarpSize, cta = blockIdx.x;
    if (lane == 0) {
        WalkExchange::start(p.walk, &s.control->block, &s.control->expiry);
        s.control->failed = 0;
        s.control->phase = 0;
        mbarrier_init(&s.control->rows_barrier, 1);
    }
    __syncwarp();
    const WalkExchange exchange{p.walk, s.control->block, s.control->expiry};
    const bool open = exchange.open(lane, cta, batch) && (kAgreeingRanks == 1 || exchange.compare_headers(lane, cta, batch, cta == 0));
    if (!open && lane == 0) s.control->failed = 1;
}

}  // namespace tpw

extern "C" __global__ void __launch_bounds__(tpw::kCertifyThreads, 1) certify(const __grid_constant__ tpw::CertifyParams p) {
    using namespace tpw;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const ChaseSmem s(shared_memory);
    const WalkParams& walk = p.walk;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, cta = blockIdx.x, ctas = gridDim.x;
    const int batch = valid_rows(walk);
    // Whoever chooses needs no more of the exchange than the block's number, and that late: where candidates are sent.
    const u64 block = load_control(walk.mailboxes[walk.rank], TPW_BLOCK_OFFSET);
    // And whether this rank has failed: then a peer may still be in this very block, whose candidates of this rank must stay.
    const u32 claim = static_cast<u32>(load_control(walk.mailboxes[walk.rank], TPW_CLAIM_OFFSET));

    if (warp == kCertifyWarps - 1) begin(p, shared_memory, batch);

    const int pairs = batch * walk.gamma;
    const int first_row = p.owners > 1 ? walk.rank : 0, own_rows = max(batch - first_row + p.owners - 1, 0) / p.owners;
    // The base logits of the next unit are on their way while one is chosen from. (One copy of all code: this loads as late as it can.)
    uint4 pieces[kPieces];
    Unit unit;
    for (int item = cta + ctas * (warp - kCertifyWarps); item < pairs * p.units; item += ctas * kCertifyWarps) {
        uint4 next[kPieces];
        Unit next_unit;
        if (item + ctas * kCertifyWarps < pairs * p.units) {
            next_unit = Unit(p, item + ctas * kCertifyWarps, batch);
            load_pieces(p, next_unit, lane, next, s.chosen(warp));
        }
        if (item >= 0 && __all_sync(kFullWarp, claim == 0)) choose(p, block, read_row(walk, unit.batch_row, 0), unit, lane, pieces, s.chosen(warp));
        unit = next_unit;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) pieces[i] = next[i];
    }
    __syncthreads();
    const WalkExchange exchange{walk, s.control->block, s.control->expiry};

    bool alive = !s.control->failed;
    const int members = p.team + p.helpers, items = own_rows * walk.gamma * members;
    // From the last CTA on: CTA 0, which waited for headers, comes late to its steps.
    for (int item = ctas - 1 - cta; item < items && alive; item += ctas) {
        const u32 pair = u32(item) / u32(members), step = pair / u32(own_rows), row = first_row + pair % u32(own_rows) * p.owners;
        alive = Chase(p, s, exchange.watch(), read_row(walk, row, 0), row, step, u32(item) % u32(members)).run();
        __syncthreads();  // the next step takes over the shared memory
    }
    if (cta != 0) return;
    const Finish finish{p, exchange, s, batch};
    u64 last_tokens = 0;
    if (alive && finish.collect(last_tokens)) {
        if (threadIdx.x == 0) finish.succeed(last_tokens);
    } else {
        finish.give_up();
    }
}

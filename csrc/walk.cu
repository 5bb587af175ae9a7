// The Markov walk: one launch for all gamma steps of a block. W2 is read once, into registers and shared memory, and the
// kernel stays alive while the CTAs of all ranks agree on each step's token through the mailboxes.
//
// One CTA an SM. CTA c owns the 16-row tiles [c * T, (c + 1) * T) of this rank's rows; warp w of it the tiles w, w + 12, ...:
// the first TPW_REG_TILES of those in registers, the next ones in shared memory, and what doesn't fit is streamed each step.
// A *pass* is one step of one group of requests (the columns of an MMA). With several groups the exchange of one is hidden
// behind the dot products of the next.
//
// Specialised by -D: TPW_INT8, TPW_RANK (r), TPW_REG_TILES, TPW_FUSED_TILES (shared-memory tiles a warp multiplies together
// with its register tiles), TPW_ROUNDING, TPW_BASE_FP32, TPW_SAMPLED, TPW_LOGITS, and the numbers of MailboxLayout.
#include "async_copy.cuh"
#include "dot.cuh"
#include "exchange.cuh"
#include "noise.cuh"
#include "score.cuh"
#include "types.cuh"
#include "walk_params.cuh"

namespace tpw {

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRegTiles = TPW_REG_TILES;
constexpr int kFusedTiles = TPW_FUSED_TILES;
constexpr int kRequests = Dot::kRequests;
constexpr int kLaneRequests = Dot::kLaneRequests;
constexpr int kKeyEntries = kWarps * 8;           // a warp leaves one key a request for each of its 8 row groups
constexpr int kKeyStride = kKeyEntries + 2;       // in 8-byte keys; the pad spreads the requests over the banks
constexpr int kRounding = TPW_ROUNDING;

#if TPW_BASE_FP32
using BaseLogit = float;
__device__ __forceinline__ float base_to_float(float value) { return value; }
#else
using BaseLogit = bf16;
__device__ __forceinline__ float base_to_float(bf16 value) { return bf16_to_float(value); }
#endif

#if TPW_ROUNDING == 2
using Logit = float;
__device__ __forceinline__ Logit to_logit(float value) { return value; }
#else
using Logit = bf16;
__device__ __forceinline__ Logit to_logit(float value) { return static_cast<bf16>(__float_as_uint(value) >> 16); }
#endif
// A logit takes the place of the base logit it was made from until it is copied out.
static_assert(TPW_LOGITS == 0 || sizeof(Logit) <= sizeof(BaseLogit), "the host widens bf16 base logits when the logits are fp32");

struct __align__(16) Control {
    uint64_t weights_arrived;  // mbarrier of the bulk copies
    u64 last_tokens;           // sum of their row_hash
    int32_t failed;
    float u_scale[kRequests];
    float temperature[kRequests];
};
static_assert(sizeof(Control) <= TPW_CONTROL_BYTES, "placement.CONTROL_BYTES holds Control");

// Shared memory, in this order: weights, u, keys, staged base logits (two buffers), noise, row scales, Control, the previous
// token of each row. The host half is placement.place.
struct Smem {
    unsigned char* weights;
    unsigned char* u;
    uint64_t* keys;
    uint32_t* base;
    float* noise;
    float* row_scales;
    Control* control;
    uint32_t* previous;  // [batch]; row r is touched by warp r % kRequests alone

    __device__ __forceinline__ Smem(unsigned char* start, const WalkParams& p) {
        const int rows = p.tiles_per_cta * kTileRows;
        weights = start;
        u = weights + p.smem_tiles * kTileBytes;
        keys = reinterpret_cast<uint64_t*>(u + kUBytes);
        base = reinterpret_cast<uint32_t*>(keys + kRequests * kKeyStride);
        noise = reinterpret_cast<float*>(base + 2 * kRequests * p.base_stage_words);
        row_scales = noise + (TPW_SAMPLED ? kRequests * rows : 0);
        control = reinterpret_cast<Control*>(row_scales + (TPW_INT8 ? rows : 0));
        previous = reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(control) + TPW_CONTROL_BYTES);
    }
};

// What a CTA knows about itself and the block.
struct Cta {
    int lane, warp, index, count;
    int first_row, rows;        // of this rank's shard
    int batch;                  // rows of the batch that are valid
    __device__ __forceinline__ bool aggregates(int row) const { return row % count == index; }
};

// ---- base logits -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ const BaseLogit* base_row(const WalkParams& p, const Cta& cta, int row, int step) {
    return static_cast<const BaseLogit*>(p.base_logits) + row * p.base_stride_row + step * p.base_stride_step + cta.first_row;
}

// A row may start on any element, and asynchronous copies move 4 bytes: copy whole words from the one that holds the first
// element on. The few bytes beside the row that come along belong to the same words, so to the same allocation.
__device__ __forceinline__ int base_shift(const BaseLogit* row) {
    return sizeof(BaseLogit) == 4 ? 0 : static_cast<int>(reinterpret_cast<uint64_t>(row) >> 1) & 1;
}

__device__ __forceinline__ void stage_base(const WalkParams& p, const Smem& s, const Cta& cta, int buffer, int step, int first_request, int requests) {
    uint32_t* stage = s.base + buffer * kRequests * p.base_stage_words;
    for (int r = 0; r < requests; ++r) {
        const BaseLogit* row = base_row(p, cta, first_request + r, step);
        const int words = (cta.rows + base_shift(row)) * static_cast<int>(sizeof(BaseLogit)) + 3 >> 2;
        const uint64_t source = reinterpret_cast<uint64_t>(row) & ~3ull;
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(stage + r * p.base_stage_words));
        for (int word = threadIdx.x; word < words; word += kThreads)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target + 4 * word), "l"(source + 4 * word) : "memory");
    }
}

__device__ __forceinline__ void wait_for_base() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- noise -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t element(const int64_t* pointer, int64_t stride, int row) { return pointer[row * stride]; }

__device__ __forceinline__ uint64_t noise_key(const WalkParams& p, int row) {
    return p.key_pointer ? static_cast<uint64_t>(element(p.key_pointer, p.key_stride, row)) : p.key;
}

__device__ __forceinline__ uint64_t noise_offset(const WalkParams& p, int row) {
    return p.offset_pointer ? static_cast<uint64_t>(element(p.offset_pointer, p.offset_stride, row)) : p.offset;
}

__device__ __forceinline__ uint64_t noise_row(const WalkParams& p, int row) {
    return static_cast<uint64_t>(p.rows ? element(p.rows, p.rows_stride, row) : row);
}

__device__ __forceinline__ NoiseStream noise_stream(const WalkParams& p, int row, int step) {
    const uint64_t key = noise_key(p, row);
    return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(noise_row(p, row)), static_cast<uint32_t>(step),
            static_cast<uint32_t>(noise_offset(p, row))};
}

__device__ __forceinline__ float row_temperature(const WalkParams& p, int row) {
    return p.temperatures ? effective_temperature(p.temperatures[row * p.temperatures_stride]) : 0.0f;
}

// Noise doesn't depend on the token, so that of the next pass is drawn while this one's exchange is under way.
__device__ __forceinline__ void draw_noise(const WalkParams& p, const Smem& s, const Cta& cta, int step, int first_request, int requests) {
    const int rows = p.tiles_per_cta * kTileRows;
    for (int r = 0; r < requests; ++r) {
        if (row_temperature(p, first_request + r) == 0.0f) continue;
        const NoiseStream stream = noise_stream(p, first_request + r, step);
        const uint32_t first_quad = (p.shard_start + cta.first_row) / 4;
        float4* out = reinterpret_cast<float4*>(s.noise + r * rows);
        for (int quad = threadIdx.x; quad < (cta.rows + 3) / 4; quad += kThreads) out[quad] = stream.four(first_quad + quad);
    }
}

// ---- a pass ----------------------------------------------------------------------------------------------------------

struct Best {
    uint32_t value = 0;  // ordered(); 0 is none
    uint32_t row = 0;    // of the CTA
};

__device__ __forceinline__ void finish_tile(const WalkParams& p, const Smem& s, const Cta& cta, int tile, int buffer, const int (&shift)[kLaneRequests],
                                            const Dot::Accumulator (&acc)[4], Best (&best)[kLaneRequests]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile * kTileRows + (cta.lane >> 2) + 8 * half;
        if (row >= cta.rows) continue;
        const float row_scale = TPW_INT8 ? s.row_scales[row] : 1.0f;
#pragma unroll
        for (int which = 0; which < kLaneRequests; ++which) {
            const int request = Dot::lane_request(cta.lane, which);
            BaseLogit* base = reinterpret_cast<BaseLogit*>(s.base + (buffer * kRequests + request) * p.base_stage_words) + row + shift[which];
            const float bias = Dot::bias(acc, half, which, TPW_INT8 ? s.control->u_scale[request] : 1.0f, row_scale);
            const float logit = biased_logit<kRounding>(base_to_float(*base), bias);
            if constexpr (TPW_LOGITS != 0) *reinterpret_cast<Logit*>(base) = to_logit(logit);
            float score = logit;
            if constexpr (TPW_SAMPLED) {
                const float temperature = s.control->temperature[request];
                if (temperature > 0.0f)
                    score = __fadd_rn(__fdiv_rn(logit, temperature), s.noise[request * p.tiles_per_cta * kTileRows + row]);
            }
            // A lane meets its rows in ascending order, so the first of equal values is the smallest id.
            const uint32_t value = ordered(score);
            if (value > best[which].value) best[which] = {value, static_cast<uint32_t>(row)};
        }
    }
}

// Multiplies this warp's tiles with the staged u and leaves one key a request for each of its row groups.
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int buffer, int step,
                                         int first_request, int requests) {
    int shift[kLaneRequests];
#pragma unroll
    for (int which = 0; which < kLaneRequests; ++which)
        shift[which] = base_shift(base_row(p, cta, first_request + Dot::lane_request(cta.lane, which), step));
    Best best[kLaneRequests];
    const unsigned char* b = b_fragments(s.u, cta.lane, requests * (kColumns / kRequests));

    // Register tiles go with as many of the shared-memory tiles as keeps the tensor cores fed: independent accumulators
    // hide the latency of the dependent MMAs of a row.
    constexpr int kGroups = kFusedTiles > 0 ? kFusedTiles : 1;
    constexpr int kGroupRegTiles = kRegTiles / kGroups;
    static_assert(kGroupRegTiles * kGroups == kRegTiles, "the register tiles divide into the groups");
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        constexpr int kChains = kGroupRegTiles + (kFusedTiles > 0);
        Dot::Accumulator acc[kChains][4] = {};
        const Fragment* fused = reinterpret_cast<const Fragment*>(s.weights + (group * kWarps + cta.warp) * kTileBytes) + cta.lane;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const uint2 u = *reinterpret_cast<const uint2*>(b + 32 * k);
#pragma unroll
            for (int i = 0; i < kGroupRegTiles; ++i) Dot::mma(acc[i], weights[group * kGroupRegTiles + i][k], u);
            if constexpr (kFusedTiles > 0) Dot::mma(acc[kGroupRegTiles], fused[k * kWarpSize], u);
        }
#pragma unroll
        for (int i = 0; i < kChains; ++i) {
            const int slot = i < kGroupRegTiles ? group * kGroupRegTiles + i : kRegTiles + group;
            finish_tile(p, s, cta, slot * kWarps + cta.warp, buffer, shift, acc[i], best);
        }
    }
    for (int tile = (kRegTiles + kFusedTiles) * kWarps + cta.warp; tile < p.tiles_per_cta; tile += kWarps) {
        Dot::Accumulator acc[4] = {};
        const int resident = tile - kRegTiles * kWarps;
        if (resident < p.smem_tiles) {
            const Fragment* a = reinterpret_cast<const Fragment*>(s.weights + resident * kTileBytes) + cta.lane;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) Dot::mma(acc, a[k * kWarpSize], *reinterpret_cast<const uint2*>(b + 32 * k));
        } else {
            const Fragment* a = p.w2_fragments + (static_cast<int64_t>(cta.index) * p.tiles_per_cta + tile) * (kSteps * kWarpSize) + cta.lane;
#pragma unroll 4
            for (int k = 0; k < kSteps; ++k) Dot::mma(acc, load_weights(a + k * kWarpSize), *reinterpret_cast<const uint2*>(b + 32 * k));
        }
        finish_tile(p, s, cta, tile, buffer, shift, acc, best);
    }
#pragma unroll
    for (int which = 0; which < kLaneRequests; ++which) {
        const uint64_t key = ordered_key(best[which].value, p.shard_start + cta.first_row + best[which].row);
        s.keys[Dot::lane_request(cta.lane, which) * kKeyStride + cta.warp * 8 + (cta.lane >> 2)] = key;
    }
}

__device__ __forceinline__ uint64_t cta_best_key(const Smem& s, int request, int lane) {
    const uint64_t* keys = s.keys + request * kKeyStride;
    uint64_t best = keys[lane];
#pragma unroll
    for (int entry = kWarpSize; entry < kKeyEntries; entry += kWarpSize) best = max(best, keys[entry + lane]);
    return warp_max_key(best);
}

// ---- tokens ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t target_id(const WalkParams& p, uint64_t key) {
    const uint32_t id = key_token(key);
    return p.d2t ? p.d2t[id] : id;
}

__device__ __forceinline__ int64_t anchor(const WalkParams& p, int row) {
    return p.anchors_are_int32 ? static_cast<const int32_t*>(p.anchors)[row * p.anchors_stride]
                               : static_cast<const int64_t*>(p.anchors)[row * p.anchors_stride];
}

__device__ __forceinline__ const bf16* w1_row(const WalkParams& p, int64_t token) {
    return p.w1 + min(max(token, int64_t{0}), p.target_vocab_size - 1) * TPW_RANK;
}

__device__ __forceinline__ void store_token(const WalkParams& p, int row, int step, int64_t token) {
    p.tokens[row * p.tokens_stride_row + step * p.tokens_stride_step] = token;
}

__device__ __forceinline__ void store_anchors(const WalkParams& p, const Cta& cta) {
    for (int i = threadIdx.x; i < cta.batch * p.gamma; i += kThreads) store_token(p, i / p.gamma, i % p.gamma, anchor(p, i / p.gamma));
}

__device__ __forceinline__ void copy_logits(const WalkParams& p, const Smem& s, const Cta& cta, int buffer, int step, int first_request, int requests) {
    for (int r = 0; r < requests; ++r) {
        const int row = first_request + r;
        if (p.logits_sampled_rows_only && row_temperature(p, row) == 0.0f) continue;
        const int shift = base_shift(base_row(p, cta, row, step));
        const BaseLogit* staged = reinterpret_cast<const BaseLogit*>(s.base + (buffer * kRequests + r) * p.base_stage_words) + shift;
        const int64_t at = row * p.logits_stride_row + step * p.logits_stride_step + cta.first_row;
#pragma unroll
        for (int rank = 0; rank < (TPW_LOGITS == 2 ? TPW_WORLD_SIZE : 1); ++rank) {
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

    // W2 first: everything up to the first step happens in the shadow of these loads.
    const Fragment* cta_weights = p.w2_fragments + static_cast<int64_t>(blockIdx.x) * p.tiles_per_cta * (kSteps * kWarpSize);
    if (threadIdx.x == 0) {
        s.control->failed = 0;
        s.control->last_tokens = 0;
        mbarrier_init(&s.control->weights_arrived, 1);
        bulk_load(s.weights, cta_weights + kRegTiles * kWarps * kSteps * kWarpSize, p.smem_tiles, kTileBytes, &s.control->weights_arrived);
    }
    Fragment weights[kRegTiles][kSteps];
#pragma unroll
    for (int i = 0; i < kRegTiles; ++i) {
        const int tile = i * kWarps + cta.warp;
        if (tile < p.tiles_per_cta) {
            const Fragment* source = cta_weights + tile * (kSteps * kWarpSize) + cta.lane;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) weights[i][k] = load_weights(source + k * kWarpSize);
        } else {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) weights[i][k] = make_uint4(0, 0, 0, 0);
        }
    }

    const WalkExchange exchange(p);
    cta.batch = p.num_valid ? min(max(*p.num_valid, 0), p.batch) : p.batch;
    const int groups = (cta.batch + kRequests - 1) / kRequests;
    const auto requests_of = [&](int group) { return min(kRequests, cta.batch - group * kRequests); };
    const auto fail = [&] { s.control->failed = 1; };
    if (groups > 0) {
        stage_base(p, s, cta, 0, 0, 0, requests_of(0));
        if constexpr (TPW_SAMPLED) draw_noise(p, s, cta, 0, 0, requests_of(0));
        if constexpr (TPW_INT8)
            for (int row = threadIdx.x; row < cta.rows; row += kThreads) s.row_scales[row] = p.row_scales[cta.first_row + row];
    }
    __syncthreads();
    const auto hashed = [&](int row, HeaderTensor tensor) -> uint64_t {
        switch (tensor) {
            case HeaderTensor::anchors: return static_cast<uint64_t>(anchor(p, row));
            case HeaderTensor::temperatures: return p.temperatures ? __float_as_uint(p.temperatures[row * p.temperatures_stride]) : 0;
            case HeaderTensor::key: return noise_key(p, row);
            case HeaderTensor::offset: return noise_offset(p, row);
            default: return noise_row(p, row);
        }
    };
    if (cta.warp == kWarps - 1 && !exchange.open(cta.lane, cta.index, cta.batch, hashed)) fail();

    // What the aggregator of a group's rows owes: done at once when there is one group, one pass later otherwise.
    const auto aggregate = [&](int step, int group) {
        const int row = group * kRequests + cta.warp;
        if (cta.warp < requests_of(group) && cta.aggregates(row) && !exchange.aggregate(cta.lane, step, row, s.previous[row], cta.count)) fail();
    };
    // The token of (row, step), once all ranks' results are in; the aggregator writes it out.
    const auto receive = [&](int step, int row) -> int64_t {
        u64 key;
        if (!exchange.receive(cta.lane, step, row, s.previous[row], key)) {
            fail();
            return 0;
        }
        const int64_t token = target_id(p, key);
        if (cta.aggregates(row) && cta.lane == 0) store_token(p, row, step, token);
        return token;
    };

    int pass = 0;
    for (int step = 0; step < p.gamma; ++step) {
        for (int group = 0; group < groups; ++group, ++pass) {
            const int first_request = group * kRequests;
            const int requests = requests_of(group);
            if (cta.warp < requests) {
                const int row = first_request + cta.warp;
                const int64_t token = step == 0 ? anchor(p, row) : receive(step - 1, row);
                __syncwarp();  // all lanes have read the row's old `previous`
                if (cta.lane == 0) {
                    s.previous[row] = static_cast<uint32_t>(token);
                    if constexpr (TPW_SAMPLED) s.control->temperature[cta.warp] = row_temperature(p, row);
                }
                stage_u(s.u, s.control->u_scale, cta.warp, w1_row(p, token), cta.lane);
            }
            wait_for_base();
            __syncthreads();
            if (s.control->failed) goto drained;
            const bool last_group = group + 1 == groups;
            const int next_step = step + last_group, next_group = last_group ? 0 : group + 1;
            if (next_step < p.gamma) stage_base(p, s, cta, (pass + 1) & 1, next_step, next_group * kRequests, requests_of(next_group));
            if (pass == 0) mbarrier_wait(&s.control->weights_arrived);
            multiply(p, s, cta, weights, pass & 1, step, first_request, requests);
            __syncthreads();
            if (cta.warp < requests) {
                const uint64_t key = cta_best_key(s, cta.warp, cta.lane);
                exchange.contribute(cta.lane, step, first_request + cta.warp, s.previous[first_request + cta.warp], cta.index, key);
                // One of these rows is most likely the next u: have it in L2 by then. Beyond a few requests it would be
                // more traffic than it saves.
                if (groups == 1 && key != 0 && cta.lane < TPW_RANK / 64)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(w1_row(p, target_id(p, key)) + cta.lane * 64));
            }
            if (groups == 1)
                aggregate(step, group);
            else if (pass > 0)
                aggregate(group > 0 ? step : step - 1, group > 0 ? group - 1 : groups - 1);
            if constexpr (TPW_LOGITS != 0) copy_logits(p, s, cta, pass & 1, step, first_request, requests);
            if constexpr (TPW_SAMPLED)
                if (next_step < p.gamma) draw_noise(p, s, cta, next_step, next_group * kRequests, requests_of(next_group));
        }
    }
    if (groups > 1) aggregate(p.gamma - 1, groups - 1);
    for (int group = 0; group < groups; ++group) {
        const int row = group * kRequests + cta.warp;
        // CTA 0 waits for every row: then all CTAs have read all that it is about to change.
        if (cta.warp < requests_of(group) && (cta.aggregates(row) || cta.index == 0)) {
            const int64_t token = receive(p.gamma - 1, row);
            if (cta.lane == 0) atomicAdd(&s.control->last_tokens, row_hash(row, token));
        }
    }
    __syncthreads();
drained:
    if (s.control->failed) {
        store_anchors(p, cta);
        return;
    }
    if (cta.index == 0 && threadIdx.x == 0) {
        exchange.close(s.control->last_tokens);
        if (p.temperatures && p.offset_pointer)
            for (int row = 0; row < (p.offset_stride ? cta.batch : 1); ++row) p.offset_pointer[row * p.offset_stride] += 1;
    }
}

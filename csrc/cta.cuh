// What a CTA keeps in shared memory, and its share of the vocabulary.
//
// A CTA has two kinds of warps. kMultiplyWarps hold W2 and multiply; kServiceWarps do all else: they bring u and base logits,
// agree with the other CTAs, and copy logits out. With several groups of requests they work one or two passes
// ahead of or behind the dot products, which so never wait for the exchange. Noise is drawn by the multiply warps.
//
// Specialised by -D (tp_walk/placement.py chooses): TPW_INT8, TPW_RANK (r), TPW_TILES_PER_CTA, TPW_REG_TILES (of W2, those that a
// warp keeps in registers), TPW_SMEM_TILES, TPW_STREAM_SLOTS and TPW_CHUNK_STEPS (of what is read again each pass: slots of a warp,
// k steps of a chunk), TPW_BASE_STAGE_BYTES, TPW_COLUMN_GROUPS (groups of 8 MMA columns that a pass multiplies), TPW_BY_WARPGROUPS (by
// wgmma), TPW_NARROW (up to 4 requests, each in an even column, so that a lane has one), TPW_SINGLE (one request alone), TPW_ROUNDING,
// TPW_BASE_FP32, TPW_SAMPLED, TPW_LOGITS, and the numbers of MailboxLayout.
#pragma once

#include "async_copy.cuh"
#include "dot.cuh"
#include "noise.cuh"
#include "rows.cuh"
#include "score.cuh"
#include "types.cuh"
#include "walk_params.cuh"

namespace tpw {

constexpr int kMultiplyWarps = TPW_MULTIPLY_WARPS;
constexpr int kServiceWarps = TPW_SERVICE_WARPS;
constexpr int kServiceThreads = kServiceWarps * kWarpSize;
constexpr int kThreads = (kMultiplyWarps + kServiceWarps) * kWarpSize;
// 16-row tiles of W2: CTA c owns [c * kTilesPerCta, (c + 1) * kTilesPerCta). Of those that follow the register tiles, kSmemTiles
// stay in shared memory.
constexpr int kTilesPerCta = TPW_TILES_PER_CTA;
constexpr int kRegTiles = TPW_REG_TILES;
constexpr int kSmemTiles = TPW_SMEM_TILES;
// Those that follow are streamed by chunks: see weight_stream.cuh. Each multiply warp has so many slots for them.
constexpr int kStreamSlots = TPW_STREAM_SLOTS;
constexpr int kChunkSteps = TPW_CHUNK_STEPS;
constexpr int kChunkBytes = kChunkSteps * kWarpSize * static_cast<int>(sizeof(Fragment));
constexpr int kBaseStageBytes = TPW_BASE_STAGE_BYTES;  // of one request's staged base logits, a multiple of 16
constexpr int kColumnGroups = TPW_COLUMN_GROUPS;
constexpr int kRequests = Dot::kRequests * kColumnGroups;  // of a pass
constexpr int kWarpRequests = kRequests / kServiceWarps;   // request q of a pass is looked after by service warp q % kServiceWarps
constexpr int kRoundTiles = 2 * kMultiplyWarps;            // a pair for each multiply warp
constexpr int kRounding = TPW_ROUNDING;
constexpr bool kSampled = TPW_SAMPLED;
constexpr bool kLogits = TPW_LOGITS;  // this rank's columns are copied out
// One group of columns: noise is drawn ahead, into shared memory, while the warps would wait for the exchange. Several: the
// next pass is there already, and noise is drawn where it is added.
constexpr bool kNoiseAhead = kSampled && kColumnGroups == 1;
// A kernel for one request alone agrees by posts (exchange.cuh), where ranks are few, and by nothing else; no other one has code for them:
// what 2 sampled requests jumped over cost them 5 µs (kernel_history.md).
constexpr bool kPosts = TPW_SINGLE && kAgreeingRanks <= TPW_POST_WORLD_SIZE;
constexpr bool kReadsAgain = kTilesPerCta > kRegTiles * kMultiplyWarps + kSmemTiles;  // some tiles of W2, each pass
// Sampled, with two groups of columns, the groups take turns, each with all of a warp's tiles: see multiply_group_by_group. Where tiles
// are read again they come once, for both groups; then pairs of tiles take turns, and the groups of each: see multiply_pair_by_pair.
constexpr bool kTakesTurns = kColumnGroups > 1 && kRegTiles == 2 && kSampled && !TPW_INT8;
constexpr bool kGroupsTakeTurns = kTakesTurns && !kReadsAgain, kPairsTakeTurns = kTakesTurns && kReadsAgain;
// What CTAs tell each other of a sampled request is an approximate score, and the logit with which whoever finds two scores too
// near each other scores them exactly (candidate.cuh). An fp32 logit has no room in a key: then keys are exact from the start.
constexpr bool kCandidates = kSampled && kRounding != kNone;

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

// A logit takes the place of the base logit that it is made from when it is wanted later: as output, or to score it exactly.
constexpr bool kKeepsLogits = kSampled || kLogits;
static_assert(!kKeepsLogits || sizeof(Logit) <= sizeof(BaseLogit), "the host widens bf16 base logits when fp32 logits are kept");

// Tiles that buffers have room for: those that a CTA owns, or as many as its warps' registers would hold, so that nothing has
// to be left out when they hold fewer.
constexpr int kStagedTiles = kTilesPerCta > kRegTiles * kMultiplyWarps ? kTilesPerCta : kRegTiles * kMultiplyWarps;
constexpr int kStagedRows = kStagedTiles * kTileRows;

// The CTA, as a warp sees it.
struct Cta {
    int lane, warp, index, count;  // warp: among its kind
    int first_row, rows;  // of this rank's shard
    int batch;            // valid rows that this rank walks
    bool whole;           // all rows of its tiles exist

    // As a multiply warp does. By whole warps.
    __device__ __forceinline__ explicit Cta(const WalkParams& p)
        : lane(threadIdx.x % kWarpSize),
          warp(__shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0)),  // in a uniform register, and not worked out again and again
          index(blockIdx.x),
          count(gridDim.x),
          first_row(blockIdx.x * kTilesPerCta * kTileRows),
          rows(min(max(p.shard_width - first_row, 0), kTilesPerCta * kTileRows)),
          batch(is_split(p) ? share_of(valid_rows(p), p.shares, p.rank) : valid_rows(p)),
          whole(rows == kStagedRows) {}

    __device__ __forceinline__ static Cta of_service(const WalkParams& p) {
        Cta cta(p);
        cta.warp -= kMultiplyWarps;
        return cta;
    }
};

// Of functions that few blocks need: calls. Inlined, their code lies between the instructions of every step, which in a cold L2 come from
// DRAM, and each jump over it is one more read (T = 1 at batch 1: see kernel_history.md). What a call can't have is the kernel's own
// variables: those would lie in memory. With two groups of columns too much is alive around the calls: it is spilled, or the assembler
// finds no registers at all.
#if TPW_COLUMN_GROUPS == 1
#define TPW_SELDOM __noinline__
#else
#define TPW_SELDOM __forceinline__
#endif

// The best of some rows of a request: its value and where; of equal values the one of the smallest row.
#if TPW_SAMPLED || TPW_ROUNDING == 2

struct Best {
    int32_t value = kNothing;  // ordered()
    uint32_t row = 0xffffffffu;  // of the CTA
#if TPW_SAMPLED
    int32_t second = kNothing;  // scores are approximate: how near did another row come?
#endif

    // The best of kRows (a power of two) rows from `first` on, by halves: neither waits for the other.
    template <int kRows>
    __device__ __forceinline__ static Best of(const int32_t* candidates, uint32_t first) {
        Best best;
        if constexpr (kRows == 1) {
            best.value = *candidates, best.row = first;
        } else {
            best = of<kRows / 2>(candidates, first);
            best.append(of<kRows / 2>(candidates + kRows / 2, first + kRows / 2));
        }
        return best;
    }

    // Rows behind these.
    __device__ __forceinline__ void append(const Best& other) {
#if TPW_SAMPLED
        second = max(max(second, other.second), min(value, other.value));
#endif
        row = other.value > value ? other.row : row;
        value = max(value, other.value);
    }

    __device__ __forceinline__ void merge(int32_t other_value, uint32_t other_row) {
#if TPW_SAMPLED
        second = max(second, min(value, other_value));
#endif
        // Pairs of tiles and single ones take turns, and lanes: rows don't come in order.
        const bool wins = (other_value > value) | ((other_value == value) & (other_row < row));
        value = max(value, other_value);
        row = wins ? other_row : row;
    }

    __device__ __forceinline__ void merge(const Best& other) {
#if TPW_SAMPLED
        second = max(second, other.second);
#endif
        merge(other.value, other.row);
    }

    __device__ __forceinline__ Best from_lane(int distance) const {
        Best other;
        other.value = __shfl_xor_sync(kFullWarp, value, distance);
        other.row = __shfl_xor_sync(kFullWarp, row, distance);
#if TPW_SAMPLED
        other.second = __shfl_xor_sync(kFullWarp, second, distance);
#endif
        return other;
    }
};

// Each of a lane's kCount requests, with the other seven lanes that have the same ones. While there are several, a lane gives half
// of them away and takes the others' of the rest: which one it is left with, is returned.
template <int kCount>
__device__ __forceinline__ int reduce_over_lanes(Best (&best)[kCount], int lane) {
    int mine = 0;
#pragma unroll
    for (int distance = 4, count = kCount; distance < kWarpSize; distance *= 2) {
        if (count == 1) {
            best[0].merge(best[0].from_lane(distance));
            continue;
        }
        count /= 2;
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const Best given = upper ? best[i] : best[count + i];
            if (upper) best[i] = best[count + i];
            best[i].merge(given.from_lane(distance));
        }
        mine += upper ? count : 0;
    }
    return mine;
}

// Of a request. Where they are few, a warp's lanes need not reduce theirs, 230 cycles before all else.
constexpr bool kLanesReduce = kRequests > 4;
constexpr int kWarpEntries = kLanesReduce ? 1 : kQuadsShare ? kWarpSize : 8;
__device__ constexpr int entry_warp(int entry) { return entry / kWarpEntries; }

#else

// A bf16 value and its row fit one word whose maximum is both: half the instructions a value, and one REDUX for the CTA.
struct Best {
    int32_t packed = kNothing;

    __device__ __forceinline__ void merge(const Best& other) { packed = max(packed, other.packed); }

    // Two bf16 values of rows `row` and `row` + 1, which is even.
    __device__ __forceinline__ void add_pair(uint32_t values, int candidate_row, const Cta& cta) { add_pairs<1>({values}, {candidate_row}, cta); }

    // Several such pairs by one branch.
    template <int kPairs>
    __device__ __forceinline__ void add_pairs(const uint32_t (&values)[kPairs], const int (&rows)[kPairs], const Cta& cta) {
        int32_t low[kPairs], high[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const uint32_t order = ordered_pair(values[i]);
            const uint32_t places = 0xfffeffffu - rows[i] * 0x10001u;  // 0xffff - row of each
            low[i] = __byte_perm(order, places, 0x1054), high[i] = __byte_perm(order, places, 0x3276);
        }
        if (!cta.whole) {
            __syncwarp();  // keeps this a branch, that few take, instead of instructions that all issue
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                low[i] = rows[i] < cta.rows ? low[i] : kNothing;
                high[i] = rows[i] + 1 < cta.rows ? high[i] : kNothing;
            }
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) packed = max(packed, max(low[i], high[i]));
    }

    // The half that was dropped of an ordered bf16: that of ordered(), all ones below zero.
    __device__ __forceinline__ int32_t value() const {
        return packed == kNothing ? kNothing : (packed & 0xffff0000) | (packed < 0 ? 0xffff : 0);
    }
    __device__ __forceinline__ uint32_t row() const { return 0xffff - (packed & 0xffff); }
};

constexpr int kWarpEntries = kQuadsShare ? kWarpSize : 8;  // of a request: one a row of an MMA's 8, which no shuffle reduces

#endif

constexpr int kBestEntries = kMultiplyWarps * kWarpEntries;
// The pad spreads the requests over the banks. A single request has the room of four.
constexpr int kBestStride = kBestEntries / (kQuadsShare ? 4 : 1) + 2;

// A row of the batch as the block needs it, read once. The noise offset above all: CTA 0 advances it at the end.
struct __align__(16) RowState {
    uint32_t key0, key1, offset;
    uint32_t slot;
    float inverse_temperature;  // negative is greedy; of an infinite temperature it is 0
    float temperature;  // effective: 0 is greedy
    uint32_t previous;  // the token before the step, which alone changes: not among the 16 bytes that those who draw load at once
    uint32_t unused;
};

struct __align__(16) Control {
    uint64_t weights_arrived;  // mbarriers: bulk copies
    uint64_t base_arrived[2];
    uint64_t u_ready[2];       // service warps -> multiply warps: u of a pass
    uint64_t best_ready[2];    // multiply warps -> service warps: a pass is multiplied
    uint64_t contributed[2];   // service warps -> multiply warps: the others know of it
    uint64_t block;            // this launch's; here instead of in registers that the dot products need
    uint64_t expiry;
    uint64_t collected[kServiceWarps];  // posts: each service warp's best
    int32_t failed;
    float u_scale[2][kRequests];
};
static_assert(sizeof(Control) <= TPW_CONTROL_BYTES, "placement.CONTROL_BYTES holds Control");

constexpr int kStagedRounds = (kStagedTiles + kRoundTiles - 1) / kRoundTiles;

// Shared memory in this order; the host half is placement.place. Where there are two of a thing, passes take turns.
struct Smem {
    unsigned char* weights;  // [smem tile]
    unsigned char* stream;   // [multiply warp][stream slot] chunks of W2
    uint64_t* stream_arrived;  // [multiply warp][stream slot] mbarriers
    unsigned char* u;        // [2][column group]
    unsigned char* base;     // [2][request] staged base logits, kBaseStageBytes each
    float4* noise;           // [round][lane request][multiply thread], approximate; of the next pass alone
    Best* best;              // [2][request][kBestStride]
    float* row_scales;       // [rows]
    Control* control;
    RowState* rows;          // [batch]

    __device__ __forceinline__ explicit Smem(unsigned char* start) {
        weights = start;
        stream = weights + kSmemTiles * kTileBytes;
        stream_arrived = reinterpret_cast<uint64_t*>(stream + kMultiplyWarps * kStreamSlots * kChunkBytes);
        u = reinterpret_cast<unsigned char*>(stream_arrived + kMultiplyWarps * kStreamSlots);
        base = u + 2 * kColumnGroups * kUBytes;
        noise = reinterpret_cast<float4*>(base + 2 * kRequests * kBaseStageBytes);
        best = reinterpret_cast<Best*>(noise + (kNoiseAhead ? kStagedRounds * Dot::kLaneRequests * kMultiplyWarps * kWarpSize : 0));
        row_scales = reinterpret_cast<float*>(best + 2 * kRequests * kBestStride);
        control = reinterpret_cast<Control*>(row_scales + (TPW_INT8 ? kStagedRows : 0));
        rows = reinterpret_cast<RowState*>(reinterpret_cast<unsigned char*>(control) + TPW_CONTROL_BYTES);
    }

    // One answer for the whole warp, whose lanes would otherwise read at different times.
    __device__ __forceinline__ bool has_failed() const { return __any_sync(kFullWarp, *static_cast<volatile int32_t*>(&control->failed)); }
};

// A warp's tiles 2j and 2j + 1 are its pair of round j: 32 rows in a row of the CTA, of which a lane has four in turn, the two
// of tile 2j first. So what a lane needs of them lies together: 8 bytes of base logits, one draw of noise. A tile that is left
// without a partner is 16 rows, two a lane. The host half is placement.row_order.
struct Round {
    int start;   // first row
    bool paired;

    __device__ __forceinline__ Round(const Cta& cta, int round) {
        const int pairs = min(max(kTilesPerCta - round * kRoundTiles - kMultiplyWarps, 0), kMultiplyWarps);
        start = round * kRoundTiles * kTileRows + (cta.warp + min(cta.warp, pairs)) * kTileRows;
        paired = cta.warp < pairs;
    }

    // The first of the lane's rows.
    __device__ __forceinline__ int lane_row(int lane) const { return start + (lane >> 2) * (paired ? 4 : 2); }
};

// The first of the two rows that the lane has of its warp's tile `slot`.
__device__ __forceinline__ int tile_row(const Cta& cta, int slot) {
    const Round round(cta, slot / 2);
    return round.lane_row(cta.lane) + slot % 2 * 2;
}

// Where groups take turns: the tiles of shared memory whose partner isn't there. Each group of columns of one is an item, of which
// multiply warp w has the items w, w + kMultiplyWarps, ...
struct Singles {
    static constexpr int kSlots = (kSmemTiles + kMultiplyWarps - 1) / kMultiplyWarps, kRest = kSmemTiles % kMultiplyWarps;
    static constexpr int kFirstOwner = kSlots % 2 ? 0 : kRest;
    static constexpr int kOwners = kRest == 0 ? kSlots % 2 * kMultiplyWarps : kSlots % 2 ? kRest : kMultiplyWarps - kRest;
    static constexpr int kItems = kGroupsTakeTurns ? kOwners * kColumnGroups : 0;
    static constexpr int kIndex = kSlots > 0 ? (kSlots - 1) / 2 * 2 : 0;  // among the owner's tiles in shared memory
    static constexpr int kSlot = kRegTiles + kIndex;

    int owner, group;

    __device__ __forceinline__ explicit Singles(int item) : owner(kFirstOwner + item / kColumnGroups), group(item % kColumnGroups) {}

    // The CTA as the owner sees it.
    __device__ __forceinline__ Cta of(const Cta& cta) const {
        Cta owners = cta;
        owners.warp = owner;
        return owners;
    }
};

// One step of one group of requests.
struct Pass {
    int index, step, first_row, requests;  // index: of the block; first_row: of the batch

    __device__ __forceinline__ int buffer() const { return index & 1; }
    __device__ __forceinline__ uint32_t parity() const { return (index >> 1) & 1; }  // of the mbarriers of its buffer
};

// The passes of a block, in order: all groups of a step, then the next step.
struct Passes {
    int groups, count, batch, first_step;
    uint32_t per_group;  // 2^32 / groups, rounded up: a product's upper half is the quotient while index * groups < 2^32

    __device__ __forceinline__ Passes(int batch, int gamma, int first_step)
        : groups((batch + kRequests - 1) / kRequests), count(groups * max(gamma - first_step, 0)), batch(batch), first_step(first_step),
          per_group(0xffffffffu / max(groups, 1) + 1) {}

    __device__ __forceinline__ Pass at(int index) const {
        const int step = TPW_SINGLE || groups == 1 ? index : __umulhi(index, per_group), first_row = (index - step * groups) * kRequests;
        return {index, first_step + step, first_row, min(kRequests, batch - first_row)};
    }
};

// ---- base logits -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ const BaseLogit* base_logits(const WalkParams& p, const Cta& cta, int row, int step) {
    return static_cast<const BaseLogit*>(p.base_logits) + base_row(p, row) * p.base_stride_row + step * p.base_stride_step + cta.first_row;
}

// A row may start on any element, and bulk copies move 16-byte pieces: copy from the piece that holds the first element to
// the one that holds the last. The bytes beside the row that come along share a 16-byte piece with it, so an allocation too.
// Only the low bits of the address count, so 32-bit arithmetic will do.
__device__ __forceinline__ uint32_t base_shift(const WalkParams& p, const Cta& cta, int row, int step) {
    const uint32_t elements = base_row(p, row) * static_cast<uint32_t>(p.base_stride_row) + step * static_cast<uint32_t>(p.base_stride_step) + cta.first_row;
    return (static_cast<uint32_t>(reinterpret_cast<uint64_t>(p.base_logits)) + elements * static_cast<uint32_t>(sizeof(BaseLogit))) & 15u;
}

// A warp starts its copies one after the other. With several groups of requests the next u waits for the last of 16, so all service
// warps share them; with one they have time, and are one warp's.
constexpr int kStagingWarps = kColumnGroups > 1 ? kServiceWarps : 1;

// Those of the requests share, share + kStagingWarps, ... By one warp, once the buffer's last readers have arrived at a barrier that
// this warp has waited for.
__device__ __forceinline__ void stage_base(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int share) {
    static_assert(kRequests <= kWarpSize && kWarpRequests * kAgreeingRanks <= kWarpSize, "a lane a request");
    uint64_t* arrived = &s.control->base_arrived[pass.buffer()];
    const int request = share + kStagingWarps * cta.lane;
    const int of = pass.first_row + min(request, pass.requests - 1);  // no lane reads past the end of batch_rows
    const BaseLogit* row = base_logits(p, cta, of, pass.step);
    const uint32_t shift = base_shift(p, cta, of, pass.step);
    const bool copies = request < pass.requests && cta.rows > 0;
    const uint32_t bytes = copies ? (shift + cta.rows * sizeof(BaseLogit) + 15) & ~15u : 0;
    const uint32_t all_bytes = __reduce_add_sync(kFullWarp, bytes);
    if (cta.lane == 0) mbarrier_expect(arrived, all_bytes);
    __syncwarp();
    if (copies)
        bulk_load(s.base + (pass.buffer() * kRequests + request) * kBaseStageBytes, reinterpret_cast<const unsigned char*>(row) - shift, bytes, arrived);
}

// The staged base logit of the CTA's first row, of request `request` of the pass.
__device__ __forceinline__ BaseLogit* staged_base(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int request) {
    const uint32_t shift = base_shift(p, cta, pass.first_row + request, pass.step);
    return reinterpret_cast<BaseLogit*>(s.base + (pass.buffer() * kRequests + request) * kBaseStageBytes + shift);
}

// ---- rows of the batch -----------------------------------------------------------------------------------------------

// row: of the batch.
__device__ __forceinline__ RowState read_row(const WalkParams& p, int row, int first_step) {
    RowState state = {};
    state.previous = static_cast<uint32_t>(clamped(p, first_token(p, row, first_step)));
    if constexpr (kSampled) {
        const uint64_t key = noise_key(p, row);
        state.key0 = static_cast<uint32_t>(key);
        state.key1 = static_cast<uint32_t>(key >> 32);
        state.slot = static_cast<uint32_t>(noise_slot(p, row));
        state.offset = static_cast<uint32_t>(noise_offset(p, row));
        state.temperature = effective_temperature(p.temperatures[row * p.temperatures_stride]);
        state.inverse_temperature = state.temperature > 0.0f ? __frcp_rn(state.temperature) : -1.0f;
    }
    return state;
}

__device__ __forceinline__ void load_rows(const WalkParams& p, const Smem& s, const Cta& cta, int first_step, int thread) {
    for (int row = thread; row < cta.batch; row += kServiceThreads) s.rows[row] = read_row(p, batch_row(p, row), first_step);
}

__device__ __forceinline__ NoiseStream noise_stream(const RowState& row, int step) {
    return {row.key0, row.key1, row.slot, static_cast<uint32_t>(step), row.offset};
}

// Of the request that a lane's columns belong to; if it isn't there, the last one's: what comes of it is never looked at.
__device__ __forceinline__ const RowState& lane_row_state(const Smem& s, const Cta& cta, const Pass& pass, int group, int which) {
    return s.rows[pass.first_row + min(group * Dot::kRequests + Dot::lane_request(cta.lane, which), pass.requests - 1)];
}

// What a warp's requests have in common.
struct PassNoise {
    bool draws = false;  // one isn't greedy
    bool alike = true;   // all have the key of the first, `shared`
    NoiseStream shared = {};

    __device__ __forceinline__ PassNoise(const Smem& s, const Cta& cta, const Pass& pass) {
        if constexpr (kSampled) {
            if constexpr (!kNoiseAhead) {
                shared = noise_stream(s.rows[pass.first_row], pass.step);
                // In uniform registers.
                shared.key0 = __shfl_sync(kFullWarp, shared.key0, 0);
                shared.key1 = __shfl_sync(kFullWarp, shared.key1, 0);
            }
            static_assert(kRequests <= kWarpSize, "a lane a request");
            const RowState row = s.rows[pass.first_row + min(cta.lane, pass.requests - 1)];
            draws = __any_sync(kFullWarp, row.inverse_temperature >= 0.0f);
            if constexpr (!kNoiseAhead)
                alike = __all_sync(kFullWarp, row.key0 == shared.key0 && row.key1 == shared.key1);
        }
    }

    template <int kCount>
    __device__ __forceinline__ void draw(const NoiseStream (&streams)[kCount], const uint32_t (&ids_over_4)[kCount], float4 (&logarithms)[kCount]) const {
        draw_side_by_side(streams, alike, shared, ids_over_4, logarithms);
    }
};

// Noise doesn't depend on the token. Approximate: what it leaves undecided is scored exactly (cta_best.cuh). A warp draws what it
// will itself add, so that no other has to be waited for. lane: of those that add it, see Dot::lane_request.
__device__ __forceinline__ float4* lane_noise(const Smem& s, const Cta& cta, int lane, int round, int which) {
    const int place = kQuadsShare ? lane & ~3 : lane;
    return s.noise + (round * Dot::kLaneRequests + which) * (kMultiplyWarps * kWarpSize) + cta.warp * kWarpSize + place;
}

__device__ __forceinline__ void draw_noise(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass) {
    // The four lanes that hold the same rows share the draws of all requests, of which some of them may have none.
    constexpr int kLanes = Dot::kRequests / Dot::kLaneRequests;
    const int lane = cta.lane % kLanes, rounds_on = kLanes / pass.requests, requests_on = kLanes % pass.requests;
    int round = lane / pass.requests, request = lane % pass.requests;
    while (round * kRoundTiles + cta.warp < kTilesPerCta) {
        const RowState& state = s.rows[pass.first_row + request];
        if (state.temperature > 0.0f) {
            const int row = Round(cta, round).lane_row(cta.lane);
            float4 noise = noise_stream(state, pass.step).approximate((p.shard_start + cta.first_row + row) / 4);
            if (row & 2) noise.x = noise.z, noise.y = noise.w;  // of a tile without a partner
            *lane_noise(s, cta, cta.lane - lane + request / Dot::kLaneRequests, round, request % Dot::kLaneRequests) = noise;
        }
        round += rounds_on, request += requests_on;
        if (request >= pass.requests) request -= pass.requests, ++round;
    }
    __syncwarp();
}

}  // namespace tpw

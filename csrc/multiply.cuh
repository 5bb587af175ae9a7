// The multiply warps' part of a pass: dot products, base logits, noise, and of each request the best rows that a lane or warp has.
#pragma once

#include "candidate.cuh"

namespace tpw {

// ---- from dot products to the best row -------------------------------------------------------------------------------

// kRows (2 or 4) base logits or logits of one request in a row, as they lie in shared memory.
template <int kRows>
struct BaseRows {
#if TPW_BASE_FP32
    float value[kRows];

    __device__ __forceinline__ void load(const BaseLogit* at, bool) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) value[i] = at[i];
    }
    __device__ __forceinline__ void store(BaseLogit* at, bool) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) at[i] = value[i];
    }
#else
    uint32_t word[kRows / 2];

    // `together`: base logits of all rows and steps begin on 8 bytes, as they do in any engine.
    __device__ __forceinline__ void load(const BaseLogit* at, bool together) {
        if (together) {
            if constexpr (kRows == 4) {
                const uint2 both = *reinterpret_cast<const uint2*>(at);
                word[0] = both.x, word[1] = both.y;
            } else {
                word[0] = *reinterpret_cast<const uint32_t*>(at);
            }
        } else {  // a loop, so that it takes a branch and no issue slots from the other way
            uint64_t all = 0;
#pragma unroll 1
            for (int i = kRows - 1; i >= 0; --i) all = all << 16 | at[i];
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i) word[i] = static_cast<uint32_t>(all >> (32 * i));
        }
    }
    __device__ __forceinline__ void store(BaseLogit* at, bool together) const {
        if (together) {
            if constexpr (kRows == 4)
                *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
            else
                *reinterpret_cast<uint32_t*>(at) = word[0];
        } else {
            uint64_t all = word[0] | (kRows == 4 ? static_cast<uint64_t>(word[kRows / 2 - 1]) << 32 : 0);
#pragma unroll 1
            for (int i = 0; i < kRows; ++i, all >>= 16) at[i] = static_cast<bf16>(all);
        }
    }
#endif

    // Of rows `i` and `i` + 1, `i` being even.
    __device__ __forceinline__ uint32_t add_to(float (&bias)[2], int i) const {
#if TPW_BASE_FP32
        const float both[2] = {value[i], value[i + 1]};
        return add_base<kRounding>(both, bias);
#else
        return add_packed_base<kRounding>(word[i / 2], bias);
#endif
    }
};

// The lane's rows of kTiles tiles of one round (both of a pair, or one tile alone), and what is added to their dot products.
template <int kTiles>
struct LaneRows {
    static constexpr int kRows = 2 * kTiles;
    int slot;     // of the first tile
    bool counts;  // they are this lane's to add; else it only takes part
    int row;      // where they begin
    float scale[kRows];
    BaseRows<kRows> base[Dot::kLaneRequests];
    float4 noise[Dot::kLaneRequests];  // drawn ahead; of a greedy request nothing, and not looked at
    uint32_t values[kTiles];           // bf16, where they wait for add_at_once()

    __device__ __forceinline__ void load_rows(const Smem& s, const Cta& cta) {
        row = tile_row(cta, slot);
#pragma unroll
        for (int i = 0; i < kRows; ++i) scale[i] = TPW_INT8 ? s.row_scales[row + i] : 1.0f;
    }

    __device__ __forceinline__ void load_noise(const Smem& s, const Cta& cta) {
        if constexpr (kNoiseAhead)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) noise[which] = *lane_noise(s, cta, cta.lane, slot / 2, which);
    }
};

// Those of kPairs pairs of tiles and, if kAlone, of a tile without a partner. What is added is loaded for all of them at once: the
// tiles' chains of latencies overlap.
template <int kPairs, bool kAlone>
struct AllLaneRows {
    LaneRows<2> pairs[kPairs + 1];
    LaneRows<1> alone;

    // All but noise. slot and counts are there.
    __device__ __forceinline__ void load(const WalkParams& p, const Smem& s, const Cta& cta, BaseLogit* const (&base)[Dot::kLaneRequests]) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) pairs[i].load_rows(s, cta);
        if constexpr (kAlone) alone.load_rows(s, cta);
        const auto load_base = [&](bool together) {
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
#pragma unroll
                for (int i = 0; i < kPairs; ++i) pairs[i].base[which].load(base[which] + pairs[i].row, together);
                if constexpr (kAlone) alone.base[which].load(base[which] + alone.row, together);
            }
        };
        if (p.base_aligned)
            load_base(true);
        else
            load_base(false);
    }

    __device__ __forceinline__ void load_noise(const Smem& s, const Cta& cta) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) pairs[i].load_noise(s, cta);
        if constexpr (kAlone) alone.load_noise(s, cta);
    }
};

// Sampled, with two groups of columns, pairs of tiles take turns, and so do the groups of a pair: see multiply(). What a warp goes
// through in a pass then is 16 KB of code instead of 35.
constexpr bool kTilesTakeTurns = kColumnGroups > 1 && kRegTiles % 2 == 0 && kSampled && !TPW_INT8;
constexpr bool kGroupsTakeTurns = kTilesTakeTurns;
static_assert(kColumnGroups <= 2, "of two groups, each is the other one's next");

// What a lane knows of the requests that its accumulators belong to, and the best rows that it has found of each.
struct LaneRequests {
    BaseLogit* base[kColumnGroups][Dot::kLaneRequests];  // of the CTA's first row
    Best best[kColumnGroups][Dot::kLaneRequests];
    const unsigned char* u[kColumnGroups];  // where the B fragments lie
    PassNoise pass_noise;
    float inverse_temperature[kColumnGroups][Dot::kLaneRequests];  // where noise is drawn ahead, else too many registers
    float u_scale[kColumnGroups][Dot::kLaneRequests];              // comes with u

    __device__ __forceinline__ LaneRequests(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass) : pass_noise(s, cta, pass) {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                base[group][which] = staged_base(p, s, cta, pass, group * Dot::kRequests + Dot::lane_request(cta.lane, which));
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group)
            u[group] = b_fragments(s.u + (pass.buffer() * kColumnGroups + group) * kUBytes, cta.lane,
                                   (pass.requests - group * Dot::kRequests) * (kColumns / Dot::kRequests));
        if constexpr (kNoiseAhead)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                inverse_temperature[0][which] = lane_row_state(s, cta, pass, 0, which).inverse_temperature;
    }

    __device__ __forceinline__ void load_u_scales(const Smem& s, const Cta& cta, const Pass& pass) {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
                u_scale[group][which] = TPW_INT8 ? s.control->u_scale[pass.buffer()][request] : 1.0f;
            }
    }

    // at: where what is known of the group lies.
    template <int kTiles>
    __device__ __forceinline__ void add(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, int at,
                                        const Dot::Accumulator* const (&acc)[kTiles], LaneRows<kTiles>& rows) {
        constexpr int kRows = 2 * kTiles;
        float values[Dot::kLaneRequests][kRows];
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            BaseRows<kRows> logits;
#pragma unroll
            for (int i = 0; i < kRows; i += 2) {
                float bias[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) bias[half] = Dot::bias(acc[i / 2], half, which, u_scale[at][which], rows.scale[i + half]);
                [[maybe_unused]] const uint32_t packed = rows.base[which].add_to(bias, i);
#if TPW_ROUNDING != 2 && !TPW_BASE_FP32
                logits.word[i / 2] = packed;
#endif
#if TPW_ROUNDING != 2 && !TPW_SAMPLED
                if constexpr (kQuadsShare)
                    rows.values[i / 2] = packed;
                else
                    best[at][which].add_pair(packed, rows.row + i, cta);
#endif
                values[which][i] = bias[0], values[which][i + 1] = bias[1];
            }
            if constexpr (kKeepsLogits) {
                if (rows.counts) {
#if TPW_ROUNDING == 2
#pragma unroll
                    for (int i = 0; i < kRows; ++i) *reinterpret_cast<Logit*>(base[at][which] + rows.row + i) = values[which][i];
#else
                    logits.store(base[at][which] + rows.row, p.base_aligned);
#endif
                }
            }
        }
#if TPW_SAMPLED || TPW_ROUNDING == 2
        // After all that needs the accumulators: draws take many registers.
        if (kSampled && pass_noise.draws) {
            float noise[Dot::kLaneRequests][kRows];
            noise_of<kTiles>(p, s, cta, pass, group, rows, noise);
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                const float inverse = kNoiseAhead ? inverse_temperature[at][which] : lane_row_state(s, cta, pass, group, which).inverse_temperature;
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const float score = kNoiseAhead ? __fmaf_rn(values[which][i], inverse, noise[which][i])
                                                    : score_of_logarithm(values[which][i], inverse, noise[which][i]);
                    values[which][i] = inverse >= 0.0f ? score : values[which][i];
                }
            }
        }
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            Best added = best[at][which];
            added.add(values[which], rows.row, cta);
            if (rows.counts) best[at][which] = added;
        }
#endif
    }

    // acc: of both tiles of each pair, and of the tile without a partner.
    template <int kPairs, bool kAlone>
    __device__ __forceinline__ void add_all(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, int at,
                                            const Dot::Accumulator* const (&acc)[2 * kPairs + kAlone], AllLaneRows<kPairs, kAlone>& rows) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) add<2>(p, s, cta, pass, group, at, {acc[2 * i], acc[2 * i + 1]}, rows.pairs[i]);
        if constexpr (kAlone) add<1>(p, s, cta, pass, group, at, {acc[2 * kPairs]}, rows.alone);
#if TPW_ROUNDING != 2 && !TPW_SAMPLED
        if constexpr (kQuadsShare) add_at_once(cta, rows);
#endif
    }

    // If it isn't drawn ahead, as gumbel_logarithms.
    template <int kTiles>
    __device__ __forceinline__ void noise_of(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, const LaneRows<kTiles>& rows,
                                             float (&noise)[Dot::kLaneRequests][2 * kTiles]) const {
        const int row = rows.row, slot = rows.slot;
        const uint32_t id_over_4 = (p.shard_start + cta.first_row + row) / 4;
        if constexpr (!kNoiseAhead && kTiles == 1 && Dot::kLaneRequests == 2) {
            noise_of_two_rows(p, s, cta, pass, group, row, slot, id_over_4, noise);
            return;
        }
        float4 drawn[Dot::kLaneRequests];
        bool upper;  // of a tile alone: its rows have the latter two of the four
        if constexpr (kNoiseAhead) {
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) drawn[which] = rows.noise[which];
            upper = slot & 1;
        } else {
            NoiseStream streams[Dot::kLaneRequests];
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) streams[which] = noise_stream(lane_row_state(s, cta, pass, group, which), pass.step);
            uint32_t ids_over_4[Dot::kLaneRequests];
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) ids_over_4[which] = id_over_4;
            pass_noise.draw(streams, ids_over_4, drawn);
            upper = row & 2;
        }
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const float4& four = drawn[which];
            if constexpr (kTiles == 2) {
                noise[which][0] = four.x, noise[which][1] = four.y, noise[which][2] = four.z, noise[which][3] = four.w;
            } else {
                noise[which][0] = upper ? four.z : four.x, noise[which][1] = upper ? four.w : four.y;
            }
        }
    }

    // Of a tile without a partner two lanes have two rows each of the same four: each draws for one of their requests and they
    // exchange halves. A tile of a pair that comes by itself takes two draws, of which a half each is in vain.
    __device__ __forceinline__ void noise_of_two_rows(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, int row, int slot,
                                                      uint32_t id_over_4, float (&noise)[Dot::kLaneRequests][2]) const {
        const bool paired = Round(cta, slot / 2).paired, upper = row & 2;
#pragma unroll 1
        for (int turn = 0; turn <= paired; ++turn) {
            const int which = paired ? turn : upper;
            const NoiseStream streams[1] = {noise_stream(lane_row_state(s, cta, pass, group, which), pass.step)};
            float4 four[1];
            pass_noise.draw(streams, {id_over_4}, four);
            const float2 low = make_float2(four[0].x, four[0].y), high = make_float2(four[0].z, four[0].w);
            const float2 own = upper ? high : low;
            float2 other = which ? make_float2(noise[0][0], noise[0][1]) : own;
            if (!paired) {
                other = upper ? low : high;
                other.x = __shfl_xor_sync(kFullWarp, other.x, 4);
                other.y = __shfl_xor_sync(kFullWarp, other.y, 4);
            }
            noise[0][0] = which ? other.x : own.x, noise[0][1] = which ? other.y : own.y;
            noise[1][0] = which ? own.x : other.x, noise[1][1] = which ? own.y : other.y;
        }
    }

    // A chunk of tiles, in pairs as far as they come in pairs: it begins at an even slot.
    template <int kTiles>
    __device__ __forceinline__ void add_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const int (&slots)[kTiles],
                                              Dot::Accumulator (*acc)[kColumnGroups][4]) {
        if constexpr (kGroupsTakeTurns) {
#pragma unroll 1
            for (int group = 0; group < kColumnGroups; ++group) {
                add_group<kTiles>(p, s, cta, pass, slots, group, 0, acc);
                next_group<kTiles>(acc);
            }
        } else {
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group) add_group<kTiles>(p, s, cta, pass, slots, group, group, acc);
        }
    }

  private:
    template <typename T>
    __device__ static __forceinline__ void exchange(T& x, T& y) {
        const T kept = x;
        x = y;
        y = kept;
    }

    // Of two: what is known of the other one takes the first place. Registers have no index.
    template <int kTiles>
    __device__ __forceinline__ void next_group(Dot::Accumulator (*acc)[kColumnGroups][4]) {
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            exchange(base[0][which], base[kColumnGroups - 1][which]);
            exchange(best[0][which], best[kColumnGroups - 1][which]);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[tile][0][i] = acc[tile][kColumnGroups - 1][i];
    }

    template <int kTiles>
    __device__ __forceinline__ void add_group(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const int (&slots)[kTiles], int group,
                                              int at, const Dot::Accumulator (*acc)[kColumnGroups][4]) {
        constexpr int kPairs = kTiles / 2;
        const bool counts = !kQuadsShare || (cta.lane & 3) == 0;
        AllLaneRows<kPairs, kTiles % 2> rows;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) rows.pairs[i].slot = slots[2 * i], rows.pairs[i].counts = counts;
        if constexpr (kTiles % 2) rows.alone.slot = slots[kTiles - 1], rows.alone.counts = counts;
        rows.load_noise(s, cta);
        rows.load(p, s, cta, base[at]);
        const Dot::Accumulator* of_group[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) of_group[i] = acc[i][at];
        add_all<kPairs, kTiles % 2>(p, s, cta, pass, group, at, of_group, rows);
    }

#if TPW_ROUNDING != 2 && !TPW_SAMPLED
    // By one branch for rows that don't exist. A pair that doesn't is -inf behind all rows; rows that more than one lane adds change
    // nothing.
    template <int kPairs, bool kAlone>
    __device__ __forceinline__ void add_at_once(const Cta& cta, const AllLaneRows<kPairs, kAlone>& rows) {
        uint32_t values[2 * kPairs + kAlone];
        int first[2 * kPairs + kAlone];
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
            const LaneRows<2>& pair = rows.pairs[i / 2];
            values[i] = pair.counts ? pair.values[i % 2] : 0xff80ff80u;
            first[i] = pair.counts ? pair.row + i % 2 * 2 : kStagedRows;
        }
        if constexpr (kAlone) values[2 * kPairs] = rows.alone.values[0], first[2 * kPairs] = rows.alone.row;
        best[0][0].add_pairs(values, first, cta);
    }
#endif
};

// ---- dot products ----------------------------------------------------------------------------------------------------

// kReg register tiles from `first` on and kShared tiles of shared memory from the warp's `shared_slot`th on, side by side: their
// independent accumulators hide the latency of a row's dependent MMAs.
template <int kReg, int kShared>
__device__ __forceinline__ void dot_products(const Smem& s, const Cta& cta, const Fragment (&weights)[kRegTiles][kSteps], int first, int shared_slot,
                                             const unsigned char* const (&b)[kColumnGroups], Dot::Accumulator (*acc)[kColumnGroups][4]) {
    constexpr int kTiles = kReg + kShared;
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + (shared_slot * kMultiplyWarps + cta.warp) * kTileBytes) + cta.lane;
    // What k step `k` needs from shared memory.
    struct Operands {
        uint2 u[kColumnGroups];
        Fragment a[kTiles];
    };
    const auto load = [&](int k) {
        Operands now;
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) now.u[group] = *reinterpret_cast<const uint2*>(b[group] + 32 * k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
            now.a[i] = i < kReg ? weights[i < kReg ? first + i : 0][k] : shared[((i - kReg) * kMultiplyWarps * kSteps + k) * kWarpSize];
        return now;
    };
    // Of shared memory alone a step's few MMAs are over before the next one's operands have come.
    constexpr int kAhead = kReg == 0 ? 2 : 1;
    Operands ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ahead[k] = load(k);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const Operands now = ahead[k % kAhead];
        if (k + kAhead < kSteps) ahead[k % kAhead] = load(k + kAhead);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group) Dot::mma(acc[i][group], now.a[i], now.u[group]);
        // Loads don't move across this, so the steps stay in order. In one piece of straight code the assembler loads all of u
        // first and then finishes one tile after the other, to save registers: each MMA waits 35 cycles for the one before it.
        __syncwarp();
    }
}

template <int kFirst, int kReg, int kShared>
__device__ __forceinline__ void multiply_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                               int shared_slot, const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kTiles = kReg + kShared;
    Dot::Accumulator acc[kTiles][kColumnGroups][4] = {};
    dot_products<kReg, kShared>(s, cta, weights, kFirst, shared_slot, b, acc);
    // A branch ends the dot products before what follows them.
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");  // the loads of base logits stay on this side of the branch
        int slots[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) slots[i] = i < kReg ? kFirst + i : kRegTiles + shared_slot + i - kReg;
        mine.add_tiles<kTiles>(p, s, cta, pass, slots, acc);
    }
}

// One request in int8, all tiles of the warp but streamed ones at once. The request's two planes of u would take two columns of an
// MMA's eight, and all that follows the dot products one lane of four. So of four pairs of tiles each has two columns: the others
// are zero in its B, and the four add to the same accumulators, of which a lane ends up with those of one pair. Four times fewer
// of both, accumulators and what is done with them. Sums of integers may take two chains each, which hide the MMAs' latencies.
// All but u is there before ready() has waited for it, and is loaded as far as registers go. False if ready() is.
template <int kShared, typename Ready>
__device__ __forceinline__ bool multiply_narrow(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                                const unsigned char* b, LaneRequests& mine, const Ready& ready) {
    constexpr int kSlots = kRegTiles + kShared, kPairs = kSlots / 2, kTurns = (kPairs + 3) / 4;
    const Fragment* shared = reinterpret_cast<const Fragment*>(s.weights + cta.warp * kTileBytes) + cta.lane;
    struct Operands {
        uint2 u;
        Fragment a[kShared + 1];
    };
    const auto load_u = [&](Operands& into, int k) { into.u = *reinterpret_cast<const uint2*>(b + 32 * k); };
    const auto load_weights = [&](Operands& into, int k) {
#pragma unroll
        for (int i = 0; i < kShared; ++i) into.a[i] = shared[(i * kMultiplyWarps * kSteps + k) * kWarpSize];
    };
    Operands ahead;
    load_weights(ahead, 0);
    const int member = cta.lane & 3;
    AllLaneRows<kTurns, kSlots % 2> rows;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int left = kPairs - 4 * turn;
        rows.pairs[turn].slot = 2 * (4 * turn + min(member, left - 1));
        rows.pairs[turn].counts = left >= 4 || member < left;
    }
    if constexpr (kSlots % 2) rows.alone.slot = kSlots - 1, rows.alone.counts = member == 0;
    rows.load(p, s, cta, mine.base[0]);
    if (!ready()) return false;
    load_u(ahead, 0);
    mine.load_u_scales(s, cta, pass);
    Dot::Accumulator acc[kTurns + 1][2][2][4] = {}, alone[4] = {};  // [turn][tile of the pair][chain]
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const Operands now = ahead;
        if (k + 1 < kSteps) {
            load_u(ahead, k + 1);
            load_weights(ahead, k + 1);
        }
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const Fragment& a = slot < kRegTiles ? weights[slot < kRegTiles ? slot : 0][k] : now.a[slot < kRegTiles ? 0 : slot - kRegTiles];
            const int pair = slot / 2;
            if (pair == kPairs) {
                Dot::mma(alone, a, now.u);
            } else {
                const bool own = cta.lane >> 3 == pair % 4;
                Dot::mma(acc[pair / 4][slot % 2][pair % 2], a, make_uint2(own ? now.u.x : 0, own ? now.u.y : 0));
            }
        }
        __syncwarp();  // as in dot_products()
    }
    if (cta.rows > 0) {
        asm volatile("" ::: "memory");
        Dot::Accumulator sums[2 * kTurns + 1][4];
        const Dot::Accumulator* of_rows[2 * kTurns + kSlots % 2];
#pragma unroll
        for (int i = 0; i < 2 * kTurns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = acc[i / 2][i % 2][0][j] + acc[i / 2][i % 2][1][j];
            of_rows[i] = sums[i];
        }
        if constexpr (kSlots % 2) of_rows[2 * kTurns] = alone;
        rows.load_noise(s, cta);  // sooner it would take the registers of what the MMAs need next
        mine.add_all<kTurns, kSlots % 2>(p, s, cta, pass, 0, 0, of_rows, rows);
    }
    return true;
}

// The same tiles in pairs of one kind a turn, the last of shared memory, if it has no partner, beside the last of registers. All
// pairs' noise is drawn and added by the same instructions: a copy of them for each kind is 40 KB more than every pass would go
// through. Of an SM quarter's two warps each begins with another kind: see multiply().
__device__ __forceinline__ void multiply_in_turns(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                  const Fragment (&weights)[kRegTiles][kSteps], const unsigned char* const (&b)[kColumnGroups],
                                                  int shared_slots, LaneRequests& mine) {
    constexpr int kRegPairs = kRegTiles / 2;
    const int shared_pairs = shared_slots / 2, pairs = shared_pairs + kRegPairs;
    const bool left_over = shared_slots % 2;
    int index = cta.warp < kMultiplyWarps / 2 ? shared_pairs : 0;
#pragma unroll 1
    for (int turn = 0; turn < pairs; ++turn) {
        Dot::Accumulator acc[3][kColumnGroups][4] = {};
        int slot = kRegTiles + 2 * index;
        bool alone = false;
        if (index < shared_pairs) {
            dot_products<0, 2>(s, cta, weights, 0, 2 * index, b, acc);
        } else {
            slot = 2 * (index - shared_pairs);
            alone = left_over && index == pairs - 1;
#pragma unroll
            for (int first = 0; first < kRegTiles; first += 2) {
                if (first != slot) continue;
                if (first + 2 == kRegTiles && alone)
                    dot_products<2, 1>(s, cta, weights, first, shared_slots - 1, b, acc);
                else
                    dot_products<2, 0>(s, cta, weights, first, 0, b, acc);
            }
        }
        if (cta.rows > 0) {
            asm volatile("" ::: "memory");
            const int both[2] = {slot, slot + 1}, one[1] = {kRegTiles + shared_slots - 1};
            if (alone) mine.add_tiles<1>(p, s, cta, pass, one, acc + 2);  // first: then its registers are free
            mine.add_tiles<2>(p, s, cta, pass, both, acc);
        }
        if (++index == pairs) index = 0;
    }
}

// Register tiles, with up to kBeside of the warp's tiles in shared memory at their side, from the `slot`th on. A chunk ends at an
// even slot unless it is the last.
template <int kFirst, int kReg, int kBeside>
__device__ __forceinline__ void multiply_register_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass,
                                                        const Fragment (&weights)[kRegTiles][kSteps], const unsigned char* const (&b)[kColumnGroups],
                                                        int shared_slots, int& slot, LaneRequests& mine) {
    if constexpr (kBeside > 0) {
        const int left = shared_slots - slot;
        if (left < kBeside || (left > kBeside && (kReg + kBeside) % 2))
            return multiply_register_tiles<kFirst, kReg, kBeside - 1>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    }
    multiply_tiles<kFirst, kReg, kBeside>(p, s, cta, pass, weights, slot, b, mine);
    slot += kBeside;
}

// A tile that is read again each step, from L2 or HBM.
__device__ __forceinline__ void multiply_streamed(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int shared_slot,
                                                  const unsigned char* const (&b)[kColumnGroups], LaneRequests& mine) {
    constexpr int kAhead = 8;  // fragments in flight
    const Fragment* source = p.w2_fragments +
                             (static_cast<int64_t>(cta.index) * kTilesPerCta + (kRegTiles + shared_slot) * kMultiplyWarps + cta.warp) * (kSteps * kWarpSize) + cta.lane;
    Dot::Accumulator acc[1][kColumnGroups][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
        Fragment a[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) a[i] = load_weights(source + (first + i) * kWarpSize);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int group = 0; group < kColumnGroups; ++group)
                Dot::mma(acc[0][group], a[i], *reinterpret_cast<const uint2*>(b[group] + 32 * (first + i)));
    }
    const int slots[1] = {kRegTiles + shared_slot};
    mine.add_tiles<1>(p, s, cta, pass, slots, acc);
}

// All tiles of this warp; leaves its lanes' best rows in shared memory. `mine` is of this pass, and new. ready(): of one request in
// int8, waits for u; false if the walk has failed.
template <typename Ready>
__device__ __forceinline__ void multiply(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const Fragment (&weights)[kRegTiles][kSteps],
                                         LaneRequests& mine, [[maybe_unused]] const Ready& ready) {
    const unsigned char* b[kColumnGroups];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) b[group] = mine.u[group];
    if constexpr (!kQuadsShare) mine.load_u_scales(s, cta, pass);

    constexpr int kMaxSlots = (kSmemTiles + kMultiplyWarps - 1) / kMultiplyWarps;
    const int shared_slots = kSmemTiles % kMultiplyWarps == 0 ? kMaxSlots : kMaxSlots - (cta.warp >= kSmemTiles % kMultiplyWarps);
    // Every chunk of tiles reads all of u, so few and large ones are best. One group of columns leaves the registers for tiles of
    // both kinds at once, two for one more. An odd number of register tiles needs the partner of its last.
    constexpr int kBeside = kColumnGroups == 1 ? 3 : kRegTiles % 2;
    constexpr int kChunk = kRegTiles < 2 ? kRegTiles : 2;
    constexpr bool kTakesLast = kColumnGroups > 1 && kRegTiles % 2 == 0;
    int slot = 0;
    const int end = kTakesLast ? shared_slots / 2 * 2 : shared_slots;
    const auto register_tiles = [&]() {
        constexpr int kFirst = kChunk < kRegTiles ? kChunk : 0;
        if constexpr (kChunk < kRegTiles) multiply_register_tiles<0, kChunk, kRegTiles % 2 ? 0 : kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
        if (kTakesLast && end < shared_slots)
            multiply_tiles<kFirst, kRegTiles - kFirst, 1>(p, s, cta, pass, weights, end, b, mine);
        else
            multiply_register_tiles<kFirst, kRegTiles - kFirst, kBeside>(p, s, cta, pass, weights, b, shared_slots, slot, mine);
    };
    const auto shared_tiles = [&]() {
#pragma unroll 1
        for (; slot + 1 < end; slot += 2) multiply_tiles<0, 0, 2>(p, s, cta, pass, weights, slot, b, mine);
        if (!kTakesLast && slot < end) multiply_tiles<0, 0, 1>(p, s, cta, pass, weights, slot, b, mine);
    };
    // In turns alone where it was faster: 223 µs a block of 64 requests instead of 254. int8 took 405 instead of 369, greedy walks
    // 113 instead of 111, whose copies are small.
    if constexpr (kQuadsShare) {
        const bool all = kSmemTiles % kMultiplyWarps == 0 || shared_slots == kMaxSlots;
        if (!(all ? multiply_narrow<kMaxSlots>(p, s, cta, pass, weights, b[0], mine, ready)
                  : multiply_narrow<kMaxSlots == 0 ? 0 : kMaxSlots - 1>(p, s, cta, pass, weights, b[0], mine, ready)))
            return;
    } else if constexpr (kTilesTakeTurns) {
        multiply_in_turns(p, s, cta, pass, weights, b, shared_slots, mine);
    } else if constexpr (kTakesLast) {
        // Register tiles keep the tensor cores busy, shared ones the loads: of an SM quarter's two warps, which go through a pass
        // in step, each begins with another kind. With one group of columns that costs 0.5 µs a step: too few MMAs side by side.
        const bool shared_first = cta.warp >= kMultiplyWarps / 2;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            if ((turn == 0) == shared_first)
                shared_tiles();
            else
                register_tiles();
        }
    } else {
        register_tiles();
        // Code that isn't there doesn't have to be fetched.
        constexpr int kTaken = kRegTiles < 2 * kChunk ? kBeside : 2 * kBeside - 1;
        if constexpr (kMaxSlots > kTaken) shared_tiles();
    }
    // Tiles beyond those in shared memory go on in the same order; which warp streams one follows from its number alone.
    for (int tile = kRegTiles * kMultiplyWarps + kSmemTiles; tile < kTilesPerCta; ++tile)
        if (tile % kMultiplyWarps == cta.warp) multiply_streamed(p, s, cta, pass, tile / kMultiplyWarps - kRegTiles, b, mine);

    Best* out = s.best + pass.buffer() * kRequests * kBestStride;
#if TPW_SAMPLED || TPW_ROUNDING == 2
    if constexpr (kLanesReduce) {
        constexpr int kCount = kColumnGroups * Dot::kLaneRequests;
        Best best[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) best[i] = mine.best[i / Dot::kLaneRequests][i % Dot::kLaneRequests];
        const int left = reduce_over_lanes(best, cta.lane);
        const int request = left / Dot::kLaneRequests * Dot::kRequests + Dot::lane_request(cta.lane, left % Dot::kLaneRequests);
        if (cta.lane < 4 * kCount) out[request * kBestStride + cta.warp] = best[0];
        return;
    }
#endif
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const int request = group * Dot::kRequests + Dot::lane_request(cta.lane, which);
            out[request * kBestStride + cta.warp * kWarpEntries + (kQuadsShare ? cta.lane : cta.lane >> 2)] = mine.best[group][which];
        }
}

}  // namespace tpw

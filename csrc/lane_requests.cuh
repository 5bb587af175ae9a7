// From a lane's dot products to its best rows: base logits and noise are added, logits kept where they are wanted later.
#pragma once

#include "candidate.cuh"

namespace tpw {

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
        if constexpr (kTilesTakeTurns) {
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
        if constexpr (kQuadsShare && kKeepsLogits) __syncwarp();  // the lanes of a quad have loaded what the first one of them overwrites
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

}  // namespace tpw

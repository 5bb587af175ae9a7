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

// What tokens are picked by, before noise: kRows (2 or 4) values of one request in a row, bf16 as they are packed or fp32.
template <int kRows>
struct Values {
#if TPW_ROUNDING == 2
    float value[kRows];

    __device__ __forceinline__ void set(int i, uint32_t, const float (&both)[2]) { value[i] = both[0], value[i + 1] = both[1]; }
    __device__ __forceinline__ float at(int i) const { return value[i]; }
    __device__ __forceinline__ void store(BaseLogit* at, bool) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) reinterpret_cast<Logit*>(at)[i] = value[i];
    }
#else
    BaseRows<kRows> packed;

    __device__ __forceinline__ void set(int i, uint32_t word, const float (&)[2]) { packed.word[i / 2] = word; }
    __device__ __forceinline__ float at(int i) const {
        const uint32_t word = packed.word[i / 2];
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
    __device__ __forceinline__ void store(BaseLogit* at, bool together) const { packed.store(at, together); }
#endif
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
    Values<kRows> values[Dot::kLaneRequests];
    float4 noise[Dot::kLaneRequests];  // approximate, or where it isn't drawn ahead its logarithm; of a greedy request not looked at

    __device__ __forceinline__ void load_rows(const Smem& s, const Cta& cta) {
        row = tile_row(cta, slot);
#pragma unroll
        for (int i = 0; i < kRows; ++i) scale[i] = TPW_INT8 ? s.row_scales[row + i] : 1.0f;
    }

    __device__ __forceinline__ void load_noise(const Smem& s, const Cta& cta) {
        if constexpr (kNoiseAhead)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                noise[which] = *lane_noise(s, cta, cta.lane, slot / 2, which);
                if (kTiles == 1 && slot % 2) noise[which].x = noise[which].z, noise[which].y = noise[which].w;
            }
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

// The groups of columns that a warp looks after at a time.
constexpr int kLaneGroups = kGroupsTakeTurns ? 1 : kColumnGroups;

// What a lane knows of the requests that its accumulators belong to, and the best rows that it has found of each: of kGroups groups
// of columns, all from `first_group` on.
template <int kGroups>
struct LaneRequests {
    int first_group;
    BaseLogit* base[kGroups][Dot::kLaneRequests];  // of the CTA's first row
    Best best[kGroups][Dot::kLaneRequests];
    const unsigned char* u[kGroups];  // where the B fragments lie
    PassNoise pass_noise;
    float inverse_temperature[kGroups][Dot::kLaneRequests];  // of one group; of two it would be too many registers
    float u_scale[kGroups][Dot::kLaneRequests];              // comes with u

    __device__ __forceinline__ LaneRequests(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const PassNoise& pass_noise, int first_group)
        : first_group(first_group), pass_noise(pass_noise) {
#pragma unroll
        for (int at = 0; at < kGroups; ++at)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) base[at][which] = staged_base(p, s, cta, pass, request(cta, at, which));
#pragma unroll
        for (int at = 0; at < kGroups; ++at)
            u[at] = b_fragments(s.u + (pass.buffer() * kColumnGroups + first_group + at) * kUBytes, cta.lane,
                                (pass.requests - (first_group + at) * Dot::kRequests) * (kColumns / Dot::kRequests));
        if constexpr (kSampled && kGroups == 1)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                inverse_temperature[0][which] = lane_row_state(s, cta, pass, first_group, which).inverse_temperature;
    }

    // Of the pass.
    __device__ __forceinline__ int request(const Cta& cta, int at, int which) const {
        return (first_group + at) * Dot::kRequests + Dot::lane_request(cta.lane, which);
    }

    __device__ __forceinline__ void load_u_scales(const Smem& s, const Cta& cta, const Pass& pass) {
#pragma unroll
        for (int at = 0; at < kGroups; ++at)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                u_scale[at][which] = TPW_INT8 ? s.control->u_scale[pass.buffer()][request(cta, at, which)] : 1.0f;
    }

    template <int kTiles>
    __device__ __forceinline__ void add_bases(const WalkParams& p, [[maybe_unused]] const Cta& cta, int at, const Dot::Accumulator* const (&acc)[kTiles],
                                              LaneRows<kTiles>& rows) {
        constexpr int kRows = 2 * kTiles;
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
#pragma unroll
            for (int i = 0; i < kRows; i += 2) {
                float bias[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) bias[half] = Dot::bias(acc[i / 2], half, which, u_scale[at][which], rows.scale[i + half]);
                const uint32_t packed = rows.base[which].add_to(bias, i);
                rows.values[which].set(i, packed, bias);
#if TPW_ROUNDING != 2 && !TPW_SAMPLED
                if constexpr (!kQuadsShare) best[at][which].add_pair(packed, rows.row + i, cta);
#endif
            }
            if constexpr (kKeepsLogits)
                if (rows.counts) rows.values[which].store(base[at][which] + rows.row, p.base_aligned);
        }
    }

#if TPW_SAMPLED || TPW_ROUNDING == 2
    // Of kCount pairs, all of which or none count, or of a tile alone; in the order of their rows. As few branches as can be: nothing
    // moves across one.
    template <int kCount, int kTiles>
    __device__ __forceinline__ void add_scores(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int at, LaneRows<kTiles>* rows) {
        constexpr int kRows = 2 * kTiles;
        float scores[Dot::kLaneRequests][kCount][kRows];
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which)
#pragma unroll
            for (int i = 0; i < kCount * kRows; ++i) scores[which][i / kRows][i % kRows] = rows[i / kRows].values[which].at(i % kRows);
        if (kSampled && pass_noise.draws) {
            if constexpr (!kNoiseAhead) draw<kCount>(p, s, cta, pass, first_group + at, rows);
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which) {
                const float inverse = kGroups == 1 ? inverse_temperature[at][which] : lane_row_state(s, cta, pass, first_group + at, which).inverse_temperature;
#pragma unroll
                for (int i = 0; i < kCount * kRows; ++i) {
                    const float4& four = rows[i / kRows].noise[which];
                    const float noise = i % kRows == 0 ? four.x : i % kRows == 1 ? four.y : i % kRows == 2 ? four.z : four.w;
                    float& score = scores[which][i / kRows][i % kRows];
                    const float drawn = kNoiseAhead ? __fmaf_rn(score, inverse, noise) : score_of_logarithm(score, inverse, noise);
                    score = inverse >= 0.0f ? drawn : score;
                }
            }
        }
        int32_t candidates[Dot::kLaneRequests][kCount][kRows];
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which)
#pragma unroll
            for (int i = 0; i < kCount * kRows; ++i) candidates[which][i / kRows][i % kRows] = ordered(scores[which][i / kRows][i % kRows]);
        if (!cta.whole) {
            __syncwarp();  // keeps this a branch, that few take, instead of instructions that all issue
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
#pragma unroll
                for (int i = 0; i < kCount * kRows; ++i)
                    if (rows[i / kRows].row + i % kRows >= cta.rows) candidates[which][i / kRows][i % kRows] = kNothing;
        }
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            Best added = Best::of<kRows>(candidates[which][0], rows[0].row);
#pragma unroll
            for (int i = 1; i < kCount; ++i) added.append(Best::of<kRows>(candidates[which][i], rows[i].row));
            added.merge(best[at][which]);
            if (rows[0].counts) best[at][which] = added;
        }
    }
#endif

    // acc: of both tiles of each pair, and of the tile without a partner.
    template <int kPairs, bool kAlone>
    __device__ __forceinline__ void add_all(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int at,
                                            const Dot::Accumulator* const (&acc)[2 * kPairs + kAlone], AllLaneRows<kPairs, kAlone>& rows) {
        // Draws take many registers, so they come after all that needs the accumulators. Where groups take turns there are enough for those
        // of two pairs side by side.
        constexpr int kCount = kGroupsTakeTurns && kPairs > 0 ? kPairs : 1;
#pragma unroll
        for (int first = 0; first < kPairs; first += kCount) {
#pragma unroll
            for (int i = first; i < first + kCount; ++i) add_bases<2>(p, cta, at, {acc[2 * i], acc[2 * i + 1]}, rows.pairs[i]);
#if TPW_SAMPLED || TPW_ROUNDING == 2
            add_scores<kCount>(p, s, cta, pass, at, rows.pairs + first);
#endif
        }
        if constexpr (kAlone) {
            add_bases<1>(p, cta, at, {acc[2 * kPairs]}, rows.alone);
#if TPW_SAMPLED || TPW_ROUNDING == 2
            add_scores<1>(p, s, cta, pass, at, &rows.alone);
#endif
        }
#if TPW_ROUNDING != 2 && !TPW_SAMPLED
        if constexpr (kQuadsShare) add_at_once(cta, rows);
#endif
    }

    __device__ __forceinline__ static uint32_t id_over_4(const WalkParams& p, const Cta& cta, int row) { return (p.shard_start + cta.first_row + row) / 4; }

    template <int kPairs>
    __device__ __forceinline__ void draw(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, LaneRows<2>* pairs) const {
        constexpr int kDraws = kPairs * Dot::kLaneRequests;
        NoiseStream streams[kDraws];
        uint32_t ids_over_4[kDraws];
        float4 logarithms[kDraws];
#pragma unroll
        for (int i = 0; i < kDraws; ++i) {
            streams[i] = noise_stream(lane_row_state(s, cta, pass, group, i % Dot::kLaneRequests), pass.step);
            ids_over_4[i] = id_over_4(p, cta, pairs[i / Dot::kLaneRequests].row);
        }
        pass_noise.draw(streams, ids_over_4, logarithms);
#pragma unroll
        for (int i = 0; i < kDraws; ++i) pairs[i / Dot::kLaneRequests].noise[i % Dot::kLaneRequests] = logarithms[i];
    }

    // Of a tile without a partner two lanes have two rows each of the same four: where a lane has two requests, each draws for one of
    // them and they exchange halves. A tile of a pair that comes by itself takes a draw for each, of which a half is in vain.
    template <int>
    __device__ __forceinline__ void draw(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, int group, LaneRows<1>* tile) const {
        LaneRows<1>& rows = *tile;
        constexpr int kLast = Dot::kLaneRequests - 1;
        const bool shares = kLast > 0 && !Round(cta, rows.slot / 2).paired, upper = rows.row & 2;
#pragma unroll 1
        for (int turn = 0; turn <= (shares ? 0 : kLast); ++turn) {
            const int which = shares ? upper : turn;
            const NoiseStream streams[1] = {noise_stream(lane_row_state(s, cta, pass, group, which), pass.step)};
            float4 four[1];
            pass_noise.draw(streams, {id_over_4(p, cta, rows.row)}, four);
            const float2 low = make_float2(four[0].x, four[0].y), high = make_float2(four[0].z, four[0].w);
            const float2 own = upper ? high : low;
            float2 other = which ? make_float2(rows.noise[0].x, rows.noise[0].y) : own;
            if (shares) {
                other = upper ? low : high;
                other.x = __shfl_xor_sync(kFullWarp, other.x, 4);
                other.y = __shfl_xor_sync(kFullWarp, other.y, 4);
            }
            rows.noise[0].x = which ? other.x : own.x, rows.noise[0].y = which ? other.y : own.y;
            rows.noise[kLast].x = which || kLast == 0 ? own.x : other.x, rows.noise[kLast].y = which || kLast == 0 ? own.y : other.y;
        }
    }

    // A chunk of tiles, in pairs as far as they come in pairs: it begins at an even slot. cta: as the warp sees it whose slots they are.
    template <int kTiles>
    __device__ __forceinline__ void add_tiles(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const int (&slots)[kTiles],
                                              Dot::Accumulator (*acc)[kGroups][4]) {
        const auto add = [&](int at) {
            const Dot::Accumulator* of_group[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) of_group[i] = acc[i][at];
            add_group<kTiles>(p, s, cta, pass, slots, at, of_group);
        };
        if constexpr (kPairsTakeTurns) {
#pragma unroll 1
            for (int turn = 0; turn < kGroups; ++turn) {
                add(0);
                next_group<kTiles>(acc);
            }
        } else {
#pragma unroll
            for (int at = 0; at < kGroups; ++at) add(at);
        }
    }

    // Leaves the best rows in shared memory.
    __device__ __forceinline__ void leave(const Smem& s, const Cta& cta, const Pass& pass) const {
        Best* out = s.best + pass.buffer() * kRequests * kBestStride;
#if TPW_SAMPLED || TPW_ROUNDING == 2
        if constexpr (kLanesReduce) {
            constexpr int kCount = kGroups * Dot::kLaneRequests;
            Best reduced[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) reduced[i] = best[i / Dot::kLaneRequests][i % Dot::kLaneRequests];
            const int left = reduce_over_lanes(reduced, cta.lane);
            Best& entry = out[request(cta, left / Dot::kLaneRequests, left % Dot::kLaneRequests) * kBestStride + cta.warp];
            if (cta.lane < 4 * kCount) entry = reduced[0];
            return;
        }
#endif
#pragma unroll
        for (int at = 0; at < kGroups; ++at)
#pragma unroll
            for (int which = 0; which < Dot::kLaneRequests; ++which)
                out[request(cta, at, which) * kBestStride + cta.warp * kWarpEntries + (kQuadsShare ? cta.lane : cta.lane >> 2)] = best[at][which];
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
    __device__ __forceinline__ void next_group(Dot::Accumulator (*acc)[kGroups][4]) {
        static_assert(kGroups == 2 && !TPW_INT8, "each is the other one's next, and u has no scales");
        first_group = 1 - first_group;
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            exchange(base[0][which], base[1][which]);
            exchange(best[0][which], best[1][which]);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][0][j] = acc[i][1][j];
    }

    template <int kTiles>
    __device__ __forceinline__ void add_group(const WalkParams& p, const Smem& s, const Cta& cta, const Pass& pass, const int (&slots)[kTiles], int at,
                                              const Dot::Accumulator* const (&acc)[kTiles]) {
        constexpr int kPairs = kTiles / 2;
        const bool counts = !kQuadsShare || (cta.lane & 3) == 0;
        AllLaneRows<kPairs, kTiles % 2> rows;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) rows.pairs[i].slot = slots[2 * i], rows.pairs[i].counts = counts;
        if constexpr (kTiles % 2) rows.alone.slot = slots[kTiles - 1], rows.alone.counts = counts;
        rows.load_noise(s, cta);
        rows.load(p, s, cta, base[at]);
        if constexpr (kQuadsShare && kKeepsLogits) __syncwarp();  // the lanes of a quad have loaded what the first one of them overwrites
        add_all<kPairs, kTiles % 2>(p, s, cta, pass, at, acc, rows);
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
            values[i] = pair.counts ? pair.values[0].packed.word[i % 2] : 0xff80ff80u;
            first[i] = pair.counts ? pair.row + i % 2 * 2 : kStagedRows;
        }
        if constexpr (kAlone) values[2 * kPairs] = rows.alone.values[0].packed.word[0], first[2 * kPairs] = rows.alone.row;
        best[0][0].add_pairs(values, first, cta);
    }
#endif
};

}  // namespace tpw

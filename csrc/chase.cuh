// The chase: one CTA takes one request's step.
//
// Whatever doesn't depend on the token comes first, for all steps at once, as each has its CTA: the candidates of all ranks in
// registers, the rows of W2 of the best of them (the first tier) in shared memory, and their exact noise. And *transitions*: for
// each token that the step before is likely to end with, by its own candidates alone, which token this step then ends with. All
// CTAs tell their transitions to the others of the request, and each follows them from the anchor to its own step: a look-up a
// step, with no word to anybody.
//
// A token that isn't among the likely ones, or after which the first tier doesn't decide, has no transition. The CTA of its step
// then scores the first tier after this token alone, by the same code, in all columns: a CTA runs nearly all its code but once,
// straight from DRAM, so what counts is how much there is. If the best isn't above the limit of the others, those that still
// could win are scored as well (the second tier). Who follows the transitions beyond that step waits for its token. All ranks do
// this on the same candidates, so they need no word from each other.
#pragma once

#include "chase_memory.cuh"
#include "exchange.cuh"

namespace tpw {

__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ __forceinline__ void copy_16(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

// Where a lane finds its two rows of a tile.
struct TileRows {
    const unsigned char* of[2];
};

// Whether a key's score is above a limit.
__device__ __forceinline__ bool is_above(uint64_t key, int32_t limit) { return key != 0 && key_value(key) > limit; }

// A call: rare, or beside loads that take longer.
__device__ __noinline__ float exact_noise_of(const NoiseStream stream, uint32_t id) { return stream.exact(id); }

struct Chase {
    const CertifyParams& p;
    const ChaseSmem& s;
    const Exchange watch;
    const RowState row;  // of the request
    const Scoring scoring;
    const int batch_row, step, thread, lane, warp;

    __device__ __forceinline__ Chase(const CertifyParams& p, const ChaseSmem& s, const Exchange& watch, const RowState& row, int batch_row, int step)
        : p(p), s(s), watch(watch), row(row), scoring{row.temperature, row.inverse_temperature}, batch_row(batch_row), step(step), thread(threadIdx.x),
          lane(threadIdx.x % kWarpSize), warp(threadIdx.x / kWarpSize) {}

    __device__ __forceinline__ int64_t target(uint32_t id) const { return p.walk.d2t ? p.walk.d2t[id] : static_cast<int64_t>(id); }

    // Of what was sent, in the order of candidates.cuh, the thread's word i.
    __device__ __forceinline__ uint32_t word_index(int i) const { return thread + i * kCertifyThreads; }

    __device__ __forceinline__ const char* list() const {
        return p.lists[p.walk.rank] + list_offset(p, watch.block, step * p.walk.batch + batch_row, 0, 0);
    }

    // The words of all ranks, which each thread keeps in its registers. False when the walk has failed. `left_out`: of the largest
    // that any unit left out; what isn't a candidate has kNothing's order afterwards.
    __device__ __forceinline__ bool gather(Parts (&parts)[kThreadWords], int32_t& largest, int32_t& left_out) const {
        const uint32_t words = TPW_WORLD_SIZE * p.units * kUnitWords;
        const char* first = list() + thread * TPW_WORD_BYTES;
        Word word[kThreadWords] = {};
        uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) missing |= uint32_t(word_index(i) < words) << i;
        const uint32_t own = missing;
        bool alive = true;
        for (u32 polls = 1; missing != 0; ++polls) {
#pragma unroll
            for (int i = 0; i < kThreadWords; ++i) load_word_if(missing >> i & 1, first + i * kCertifyThreads * TPW_WORD_BYTES, word[i]);
#pragma unroll
            for (int i = 0; i < kThreadWords; ++i)
                if (is_of_block(word[i], watch.block)) missing &= ~(1u << i);
            if (missing == 0 || polls % POLLS_PER_LOOK != 0) continue;
            const Site site{TPW_WAIT_RESULT, word_index(__ffs(missing) - 1) / kUnitWords / u32(p.units), u32(step), u32(batch_row)};
            if (hopeless(watch, site, header_tag(watch.block), 0)) {
                alive = false;
                break;
            }
        }
        constexpr int kLast = kList - (kUnitWords - 1) * kWordCandidates;  // in a unit's last word: what was left out
        int32_t best = kNothing, most = kNothing;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) {
            parts[i] = Parts::from(word[i]);
            if (!(own >> i & 1)) {
#pragma unroll
                for (int j = 0; j < kWordCandidates; ++j) parts[i].of[j] = static_cast<uint32_t>(kNothing);
            } else if (word_index(i) % kUnitWords == kUnitWords - 1) {
                most = max(most, parts[i].order(kLast));
                parts[i].of[kLast] = static_cast<uint32_t>(kNothing);
            }
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j) best = max(best, parts[i].order(j));
        }
        if (thread == 0) s.control->counters[0] = s.control->counters[1] = 0;
        best = __reduce_max_sync(kFullWarp, best);
        most = __reduce_max_sync(kFullWarp, most);
        if (lane == 0) s.control->largest[warp] = best, s.control->left_out[warp] = most;
        if (__syncthreads_or(!alive)) return false;
        largest = __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->largest[lane] : kNothing) | kOrderMask;
        left_out = __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->left_out[lane] : kNothing) | kOrderMask;
        return true;
    }

    __device__ __forceinline__ int count_above(const Parts (&parts)[kThreadWords], int32_t threshold) const {
        int above = 0;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i)
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j) above += parts[i].order(j) > threshold;
        return above;
    }

    // An order, not below `least`, that no more than kTier entries exceed; and no fewer than three quarters as many, unless fewer
    // exceed `least` or too many are equal. Three are tried a turn, with one barrier.
    __device__ __forceinline__ int32_t threshold_of(const Parts (&parts)[kThreadWords], int32_t least, int32_t largest) const {
        uint32_t low = least, width = (static_cast<uint32_t>(largest) - low) >> kOrderShift;
        if (largest <= least) return least;
        // Most entries are near the least.
        uint32_t tried[3] = {0, width / 16, width / 4};
        for (int turn = 0;; ++turn) {
            uint32_t counts[3];
#pragma unroll
            for (int i = 0; i < 3; ++i) counts[i] = count_above(parts, low + (tried[i] << kOrderShift));
            const uint32_t two = __reduce_add_sync(kFullWarp, counts[1] << 16 | counts[0]), third = __reduce_add_sync(kFullWarp, counts[2]);
            uint32_t(&told)[2][kCertifyWarps] = s.control->counts[turn & 1];
            if (lane == 0) told[0][warp] = two, told[1][warp] = third;
            __syncthreads();
            const uint32_t sum = __reduce_add_sync(kFullWarp, lane < kCertifyWarps ? told[0][lane] : 0u);
            counts[0] = sum & 0xffff, counts[1] = sum >> 16;
            counts[2] = __reduce_add_sync(kFullWarp, lane < kCertifyWarps ? told[1][lane] : 0u);
            if (turn == 0 && counts[0] <= kTier) return least;
            uint32_t from = 0, to = width, held = 0;
#pragma unroll
            for (int i = 2; i >= 0; --i)
                if (counts[i] <= kTier) to = tried[i], held = counts[i];
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (counts[i] > kTier) from = tried[i];
            low += from << kOrderShift, width = to - from;
            if (width <= 1 || held * 4 >= kTier * 3) return low + (width << kOrderShift);
            tried[0] = width / 4, tried[1] = width / 2, tried[2] = width / 2 + width / 4;
        }
    }

    __device__ __forceinline__ float exact_noise(uint32_t id) const { return scoring.sampled() ? exact_noise_of(noise_stream(row, step), id) : 0.0f; }

    // unit: of all ranks'.
    __device__ __forceinline__ uint32_t id_of(uint32_t unit, uint32_t place) const {
        int source = 0, of_source = unit;
        for (; of_source >= p.units; ++source) of_source -= p.units;
        return p.shard_starts[source] + column_of(place, of_source, p.units);
    }

    // The entries above `threshold` become the first tier, with all that scoring them takes; its rows of W2 are then on their way.
    // The best of them are told to the next step. Returns how many rows.
    __device__ __forceinline__ int load_tier(const Parts (&parts)[kThreadWords], int32_t threshold, int32_t largest) const {
        const int own = count_above(parts, threshold);
        int slot = own;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const int before = __shfl_up_sync(kFullWarp, slot, distance);
            if (lane >= distance) slot += before;
        }
        int first = 0;
        if (lane == kWarpSize - 1) first = atomicAdd(&s.control->counters[0], slot);
        slot += __shfl_sync(kFullWarp, first, kWarpSize - 1) - own;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) {
            const uint32_t unit = word_index(i) / kUnitWords;
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j)
                if (parts[i].order(j) > threshold) {
                    s.tier_order[slot] = parts[i].order(j);
                    s.tier_place[slot] = unit << 16 | parts[i].place(j);
                    if (kWordCandidates < 3) s.tier_base[slot] = parts[i].base(j, true);
                    ++slot;
                }
        }
        __syncthreads();
        const int rows = s.control->counters[0];
        const int row_slot = warp + lane * kCertifyWarps;
        uint32_t id = 0;
        if (lane < kWarpRows && row_slot < rows) {
            const uint32_t place = s.tier_place[row_slot];
            s.tier_id[row_slot] = id = id_of(place >> 16, place & 0xffff);
            if (kWordCandidates == 3) s.tier_base[row_slot] = from_ordered(score_of(s.tier_order[row_slot], scoring.sampled()));
        }
        const unsigned char* rows_of_w2 = reinterpret_cast<const unsigned char*>(p.w2);
#pragma unroll 4
        for (int i = 0; i < kWarpRows; ++i) {
            const int to = warp + i * kCertifyWarps;
            const unsigned char* source = rows_of_w2 + static_cast<int64_t>(__shfl_sync(kFullWarp, id, i)) * (TPW_RANK * 2);
            if (to < rows)
                for (int at = lane * 16; at < TPW_RANK * 2; at += kWarpSize * 16) copy_16(s.rows + to * kRowBytes + at, source + at);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (warp == 0 && step + 1 < p.walk.gamma) tell_likely(rows, threshold, largest);
        if (warp >= kColumnWarps && scoring.sampled())
            for (int slot = thread - kColumnWarps * kWarpSize; slot < rows; slot += kCertifyThreads - kColumnWarps * kWarpSize)
                s.tier_noise[slot] = exact_noise(id_of(s.tier_place[slot] >> 16, s.tier_place[slot] & 0xffff));
        return rows;
    }

    // By one warp: the best of the first tier, at most kLikely, to the next step's CTA; what it reads for them is then on its way
    // into L2.
    __device__ __forceinline__ void tell_likely(int rows, int32_t threshold, int32_t largest) const {
        constexpr int kLaneRows = (kTier + kWarpSize - 1) / kWarpSize;
        int32_t orders[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) orders[i] = lane + i * kWarpSize < rows ? s.tier_order[lane + i * kWarpSize] : kNothing;
        uint32_t low = threshold, width = (static_cast<uint32_t>(largest) - low) >> kOrderShift;
        uint32_t tried = 0;  // at first whether all are few enough
        while (true) {
            int above = 0;
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) above += orders[i] > static_cast<int32_t>(low + (tried << kOrderShift));
            above = __reduce_add_sync(kFullWarp, above);
            if (above <= kLikely)
                width = tried;
            else
                low += tried << kOrderShift, width -= tried;
            if (width <= 1 || above <= kLikely && above * 4 >= kLikely * 3) break;
            tried = width / 2;
        }
        const int32_t likely = low + (width << kOrderShift);
        int count = 0;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const uint32_t those = __ballot_sync(kFullWarp, orders[i] > likely);
            if (orders[i] > likely) s.control->likely[count + __popc(those & ((1u << lane) - 1))] = s.tier_place[lane + i * kWarpSize];
            count += __popc(those);
        }
        __syncwarp();
        u64 token = kNoToken;
        if (lane < count) {
            const uint32_t place = s.control->likely[lane];
            token = static_cast<u64>(target(id_of(place >> 16, place & 0xffff)));
        }
        store_word<Scope::gpu>(likely_word(p, step, batch_row, lane), token, header_tag(watch.block));
        if (lane < count) prefetch_token(static_cast<int64_t>(token));
    }

    // What a step after `token` reads, into L2.
    __device__ __forceinline__ void prefetch_token(int64_t token) const {
        prefetch_l2(p.bounds + token);
#pragma unroll
        for (int at = 0; at < TPW_RANK / 8; at += 8) prefetch_l2(p.walk.u_rows + token * (TPW_RANK / 8) + at);
    }

    __device__ __forceinline__ Site step_site() const { return {TPW_WAIT_SLOT, 0, u32(step), u32(batch_row)}; }

    // The tokens that the step before is likely to end with, one a lane. False: the walk has failed.
    __device__ __forceinline__ bool await_likely(uint32_t& before) const {
        u64 token = kNoToken;
        const bool alive = await_word<Scope::gpu>(watch, likely_word(p, step - 1, batch_row, lane), header_tag(watch.block), step_site(), token);
        before = static_cast<uint32_t>(token);
        return __all_sync(kFullWarp, alive);
    }

    // u of each lane's token into the column of the lane's number.
    __device__ __forceinline__ void load_columns(uint32_t before) const {
        if (warp >= kColumnWarps) return;
        constexpr int kWarpColumns = kLikely / kColumnWarps;
        URow u[kWarpColumns];
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) {
            const uint32_t of = __shfl_sync(kFullWarp, before, warp + i * kColumnWarps);
            u[i].load(p.walk.u_rows + clamped(p.walk, of) * (TPW_RANK / 8), nullptr, lane);
        }
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) u[i].store(s.u + (warp + i * kColumnWarps) * kColumnBytes, nullptr, 0, lane);
    }

    // The first tier after the tokens of all columns: s.keys of each warp, for all to read.
    __device__ __forceinline__ void score_columns(int rows) const {
        uint64_t best[2 * kLikelyGroups] = {};  // of the lane's columns
        if (warp * kTileRows < rows) {
            const int first = warp * kTileRows + lane / 4;
            TileRows tile;
#pragma unroll
            for (int half = 0; half < 2; ++half) tile.of[half] = s.rows + min(first + 8 * half, rows - 1) * kRowBytes + (lane & 3) * 4;
            Dot::Accumulator acc[kLikelyGroups][4] = {};
            multiply_tile<kLikelyGroups>(s.u + (lane >> 2) * kColumnBytes + (lane & 3) * 8, tile, acc);
#pragma unroll 1  // its code is run for the first time: once more is cheaper than as much again
            for (int half = 0; half < 2; ++half) {
                const int slot = min(first + 8 * half, rows - 1);  // the last one again changes nothing
                const float base = s.tier_base[slot], noise = s.tier_noise[slot];
                const uint32_t id = s.tier_id[slot];
#pragma unroll
                for (int i = 0; i < kLikelyGroups; ++i) {
                    int32_t scores[2];
                    scoring.scores(base, half ? acc[i][2] : acc[i][0], half ? acc[i][3] : acc[i][1], noise, scores);
#pragma unroll
                    for (int j = 0; j < 2; ++j) best[2 * i + j] = max(best[2 * i + j], make_key(scores[j], id));
                }
            }
        }
        // The eight lanes that have the same eight columns: each is left with the best of one.
        static_assert(2 * kLikelyGroups == kColumns);
#pragma unroll
        for (int left = kLikelyGroups, distance = kWarpSize / 2; left >= 1; left /= 2, distance /= 2)
#pragma unroll
            for (int i = 0; i < left; ++i) {
                const bool upper = lane & distance;
                const uint64_t other = __shfl_xor_sync(kFullWarp, upper ? best[i] : best[i + left], distance);
                best[i] = max(upper ? best[i + left] : best[i], other);
            }
        const int own = lane >> 2, column = own / 2 * kColumns + 2 * (lane & 3) + own % 2;
        s.keys[warp * kLikely + column] = best[0];
        __syncthreads();
    }

    // By one warp: the transitions of all likely tokens, told to the CTAs of the request.
    __device__ __forceinline__ void tell_transitions(int32_t threshold, uint32_t before) const {
        uint64_t key = 0;
#pragma unroll 4
        for (int of = 0; of < kCertifyWarps; ++of) key = max(key, s.keys[of * kLikely + lane]);
        u64 transition = static_cast<u64>(kNoToken) << 32;
        if (before != kNoToken && is_above(key, scoring.limit(threshold, __ldg(p.bounds + before))))
            transition = static_cast<u64>(before) << 32 | static_cast<u64>(target(key_id(key)));
        store_word<Scope::gpu>(transition_word(p, step, batch_row, lane), transition, header_tag(watch.block));
    }

    // From the anchor to this step, by each warp: the token before, and the step's own where it has a transition. False: the walk
    // has failed.
    __device__ __forceinline__ bool follow(u64& token, u64& next) const {
        token = row.previous;
        next = kNoToken;
        if (step == 0) return true;
        bool alive = await_token(0, true, token);
        for (int first = 1; first <= step; first += kCertifyWarps) {
            u64 word = 0;
            if (first + warp <= step)
                alive &= await_word<Scope::gpu>(watch, transition_word(p, first + warp, batch_row, lane), header_tag(watch.block), step_site(), word);
            if (first > 1) __syncthreads();  // everyone has followed those before
            s.transitions[warp * kLikely + lane] = word;
            alive &= __syncthreads_and(alive);
            for (int at = first; at < min(first + kCertifyWarps, step + 1); ++at) {
                const u64 transition = s.transitions[(at - first) * kLikely + lane];
                const uint32_t found = __ballot_sync(kFullWarp, transition >> 32 == token);
                const u64 to = found ? __shfl_sync(kFullWarp, transition & 0xffffffffu, __ffs(found) - 1) : u64(kNoToken);
                if (at == step)
                    next = to;
                else if (found)
                    token = to;
                else if (!(token & kFailed))
                    alive = await_token(at, alive, token);
            }
        }
        return alive;
    }

    // The token of an earlier step that has no transition, from its CTA; by a whole warp.
    __device__ __forceinline__ bool await_token(int of, bool alive, u64& token) const {
        if (lane == 0 && alive) alive = await_word<Scope::gpu>(watch, step_word(p, of, batch_row), header_tag(watch.block), step_site(), token);
        token = __shfl_sync(kFullWarp, token, 0);
        return __all_sync(kFullWarp, alive);
    }

    // Of 16 rows with columns of B, by one warp. `rows[half]`: where this lane finds its rows g and g + 8 of the tile. b: where it
    // finds its column of the first group.
    template <int kGroups>
    __device__ __forceinline__ void multiply_tile(const unsigned char* b, const TileRows& rows, Dot::Accumulator (&acc)[kGroups][4]) const {
#pragma unroll 4  // code that is run once costs more than a loop
        for (int k = 0; k < kSteps; ++k) {
            Fragment a;
            a.x = *reinterpret_cast<const uint32_t*>(rows.of[0] + k * 32);
            a.y = *reinterpret_cast<const uint32_t*>(rows.of[1] + k * 32);
            a.z = *reinterpret_cast<const uint32_t*>(rows.of[0] + k * 32 + 16);
            a.w = *reinterpret_cast<const uint32_t*>(rows.of[1] + k * 32 + 16);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) Dot::mma(acc[group], a, *reinterpret_cast<const uint2*>(b + group * kUBytes + k * 32));
        }
    }

    // The entries from `least` to the first tier's threshold that `best` doesn't exclude. From L2 or HBM: they are few.
    __device__ __forceinline__ uint64_t score_second(const Parts (&parts)[kThreadWords], int32_t least, int32_t threshold, int32_t best, float bound) const {
        // Limits rise with scores: those above `cut` are wanted.
        uint32_t cut = least, width = (static_cast<uint32_t>(threshold) - cut) >> kOrderShift;
        while (width > 0) {
            const uint32_t half = width / 2, middle = cut + ((half + 1) << kOrderShift);
            if (scoring.limit(score_of(middle, scoring.sampled()), bound) >= best)
                width = half;
            else
                cut = middle, width -= half + 1;
        }
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i)
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j)
                if (parts[i].order(j) > static_cast<int32_t>(cut) && parts[i].order(j) <= threshold)
                    s.second[atomicAdd(&s.control->counters[1], 1)] = word_index(i) * kWordCandidates + j;
        __syncthreads();
        const int count = s.control->counters[1];
        uint64_t found = 0;
        for (int tile = warp; tile * kTileRows < count; tile += kCertifyWarps) {
            const int first = tile * kTileRows + lane / 4;
            TileRows sources;
            uint32_t ids[2];
            float bases[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t entry = s.second[min(first + 8 * half, count - 1)], word = entry / kWordCandidates;
                const Parts sent = Parts::from(load_word<Scope::sys>(list() + word * TPW_WORD_BYTES)).shifted(entry % kWordCandidates);
                bases[half] = sent.base(0, scoring.sampled());
                ids[half] = id_of(word / kUnitWords, sent.place(0));
                sources.of[half] = reinterpret_cast<const unsigned char*>(p.w2 + static_cast<int64_t>(ids[half]) * TPW_RANK) + (lane & 3) * 4;
            }
            Dot::Accumulator acc[1][4] = {};
            multiply_tile<1>(s.u + (lane & 3) * 8, sources, acc);
            const int half = lane & 3;  // the lanes whose number in the row's four is 0 or 1 have a row each
            if (half < 2 && first + 8 * half < count) {
                const uint32_t id = half == 0 ? ids[0] : ids[1];
                found = max(found, make_key(scoring.score(half == 0 ? bases[0] : bases[1], half == 0 ? acc[0][0] : acc[0][2], exact_noise(id)), id));
            }
        }
        return found;
    }

    // True unless the walk has failed.
    __device__ __forceinline__ bool run() const {
        if (step == 0 && thread == 0) prefetch_token(row.previous);
        Parts parts[kThreadWords];
        int32_t largest, left_out;
        if (!gather(parts, largest, left_out)) return false;
        const int32_t threshold = threshold_of(parts, left_out, largest);
        const int rows = load_tier(parts, threshold, largest);

        // Of the likely tokens first; and where that is no answer, of the one token, in every column.
        u64 token = row.previous;
        uint32_t before = static_cast<uint32_t>(token);
        bool alive = step == 0 || warp >= kColumnWarps || await_likely(before);
        for (bool likely = step > 0;; likely = false) {
            load_columns(before);
            asm volatile("cp.async.wait_all;" ::: "memory");
            if (__syncthreads_or(!alive)) return false;
            score_columns(rows);
            if (!likely) break;
            u64 next;
            if (warp == 0) tell_transitions(score_of(threshold, scoring.sampled()), before);
            alive = follow(token, next);
            if (__syncthreads_or(!alive)) return false;
            if (next != kNoToken) {
                finish(next, true, rows);
                return true;
            }
            if (token & kFailed) {
                finish(token, false, 0);
                return true;
            }
            before = static_cast<uint32_t>(token);
        }

        const float bound = __ldg(p.bounds + clamped(p.walk, static_cast<int64_t>(token)));
        uint64_t best = warp_max_key(lane < kCertifyWarps ? s.keys[lane * kLikely] : 0);
        int scored = rows;
        if (threshold > left_out && !is_above(best, scoring.limit(score_of(threshold, scoring.sampled()), bound))) {
            const uint64_t key = warp_max_key(score_second(parts, left_out, threshold, key_value(best), bound));
            if (lane == 0) s.control->best[warp] = key;
            __syncthreads();
            best = max(best, warp_max_key(lane < kCertifyWarps ? s.control->best[lane] : 0));
            scored += s.control->counters[1];
        }
        const bool certified = is_above(best, scoring.limit(score_of(left_out, scoring.sampled()), bound));
        finish(certified ? static_cast<u64>(target(key_id(best))) : kFailed | u64(step), certified, scored);
        return true;
    }

    __device__ __forceinline__ void finish(u64 token, bool certified, int scored) const {
        if (thread != 0) return;
        store_word<Scope::gpu>(step_word(p, step, batch_row), token, header_tag(watch.block));
        count(Count::certified_steps, certified);
        count(Count::candidates_scored, scored);
    }

    __device__ __forceinline__ void count(Count what, int more) const {
        if (more > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + static_cast<int>(what)), static_cast<unsigned long long>(more));
    }
};

}  // namespace tpw

// The chase: one CTA takes one request's step.
//
// Whatever doesn't depend on the token comes first, for all steps at once, as each has its CTA: the candidates of all ranks,
// the rows of W2 of the best of them (the first tier) in shared memory, and their exact noise. And *transitions*: for each token
// that the step before is likely to end with, by its own candidates alone, which token this step then ends with. They are
// columns of the MMAs that score a single token, too. All CTAs tell their transitions to the others of the request, and each
// follows them from the anchor to its own step: a look-up a step, with no word to anybody.
//
// A token that isn't among the likely ones, or after which the first tier doesn't decide, has no transition. The CTA of its step
// then does what remains for this token alone: a row of W1, one dot product and two reductions; and if the best of the first
// tier isn't above the limit of the others, those that still could win are scored as well (the second tier). Who follows the
// transitions beyond that step waits for its token. All ranks do this on the same candidates, so they need no word from each other.
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

    // The words of all ranks into shared memory. False when the walk has failed. `left_out`: the largest that any unit left out.
    __device__ __forceinline__ bool gather(int32_t& largest, int32_t& left_out) const {
        const int words = TPW_WORLD_SIZE * p.units * kUnitWords;
        const char* list = p.lists[p.walk.rank] + list_offset(p, watch.block, step * p.walk.batch + batch_row, 0, 0);
        bool alive = true;
        int32_t best = kNothing, most = kNothing;
        // Loads in flight: all that a thread has, unless they are too many for its registers.
        constexpr int kThreadWords = (kMaxEntries / kList * kUnitWords + kCertifyThreads - 1) / kCertifyThreads;
        constexpr int kAhead = kThreadWords < 5 ? kThreadWords : 5;
        for (int first = thread; first < words && alive; first += kAhead * kCertifyThreads) {
            Word word[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + i * kCertifyThreads < words) word[i] = load_word<Scope::sys>(list + (first + i * kCertifyThreads) * TPW_WORD_BYTES);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int at = first + i * kCertifyThreads;
                if (at >= words || !alive) continue;
                const int unit = at / kUnitWords, source = unit / p.units;
                for (u32 polls = 1; !is_of_block(word[i], watch.block); ++polls) {
                    const Site site{TPW_WAIT_RESULT, u32(source), u32(step), u32(batch_row)};
                    if (polls % POLLS_PER_LOOK == 0 && hopeless(watch, site, header_tag(watch.block), header_tag(word[i].tag >> 32))) {
                        alive = false;
                        break;
                    }
                    word[i] = load_word<Scope::sys>(list + at * TPW_WORD_BYTES);
                }
                Candidate candidates[kWordCandidates];
                unpack(word[i], scoring.sampled(), candidates);
#pragma unroll
                for (int j = 0; j < kWordCandidates; ++j) {
                    const int slot = at % kUnitWords * kWordCandidates + j;
                    if (slot == kList) {
                        most = max(most, candidates[j].score);
                    } else if (slot < kList) {
                        const int entry = unit * kList + slot;
                        s.score[entry] = candidates[j].score;
                        s.base[entry] = candidates[j].base;
                        s.id[entry] = p.shard_starts[source] + column_of(candidates[j].place, unit % p.units, p.units);
                        best = max(best, candidates[j].score);
                    }
                }
            }
        }
        if (thread == 0) s.control->counters[0] = s.control->counters[1] = s.control->counters[2] = 0;
        best = __reduce_max_sync(kFullWarp, best);
        most = __reduce_max_sync(kFullWarp, most);
        if (lane == 0) s.control->largest[warp] = best, s.control->left_out[warp] = most;
        if (__syncthreads_or(!alive)) return false;
        largest = __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->largest[lane] : kNothing);
        left_out = __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->left_out[lane] : kNothing);
        return true;
    }

    // A score, not below `least`, that no more than `most` entries exceed; and no fewer than three quarters as many, unless
    // fewer exceed `least` or too many are equal. Bins halve the interval eight times a turn, and as a rule one turn is enough.
    __device__ __forceinline__ int32_t threshold_of(int most, int entries, int32_t least, int32_t largest) const {
        uint32_t above = least, width = largest > least ? static_cast<uint32_t>(largest) - above : 0;  // the scores in question
        int count = 0;  // of entries beyond them
        while (width > 0) {
            for (int bin = thread; bin < kBins; bin += kCertifyThreads) s.bins()[bin] = 0;
            __syncthreads();
            const int shift = bin_shift<kBinBits>(width);
            for (int entry = thread; entry < entries; entry += kCertifyThreads) {
                const uint32_t distance = static_cast<uint32_t>(s.score[entry]) - above - 1;
                if (s.score[entry] > static_cast<int32_t>(above) && distance < width) atomicAdd(&s.bins()[distance >> shift], 1);
            }
            __syncthreads();
            const uint32_t first = first_bin<kBinBits>(s.bins(), lane, most, count);
            __syncthreads();  // everyone has read the bins
            if (first == 0) return above;
            above += (first - 1) << shift, width = 1u << shift;
            if (shift == 0 || count * 4 >= most * 3) return above + width;
        }
        return least;
    }

    __device__ __forceinline__ float exact_noise(uint32_t id) const { return scoring.sampled() ? exact_noise_of(noise_stream(row, step), id) : 0.0f; }

    // What a step after `token` reads, into L2.
    __device__ __forceinline__ void prefetch_token(int64_t token) const {
        prefetch_l2(p.bounds + token);
        for (int at = 0; at < TPW_RANK / 8; at += 8) prefetch_l2(p.walk.u_rows + token * (TPW_RANK / 8) + at);
    }

    // The entries above `threshold` become the first tier, with all that scoring them takes; its rows of W2 are then on their way.
    // Those above `likely` are told to the next step. Returns how many rows.
    __device__ __forceinline__ int load_tier(int entries, int32_t threshold, int32_t likely) const {
        for (int entry = thread; entry < entries; entry += kCertifyThreads) {
            if (s.score[entry] <= threshold) continue;
            const int slot = atomicAdd(&s.control->counters[0], 1);
            s.tier_base[slot] = s.base[entry];
            s.tier_id[slot] = s.id[entry];
            if (s.score[entry] > likely) s.control->likely[atomicAdd(&s.control->counters[2], 1)] = static_cast<uint32_t>(target(s.id[entry]));
        }
        __syncthreads();
        const int rows = s.control->counters[0];
        if (warp == 0 && step + 1 < p.walk.gamma)
            store_word<Scope::gpu>(likely_word(p, step, batch_row, lane), lane < s.control->counters[2] ? s.control->likely[lane] : kNoToken, header_tag(watch.block));
        for (int slot = warp; slot < rows; slot += kCertifyWarps) {
            const unsigned char* source = reinterpret_cast<const unsigned char*>(p.w2 + static_cast<int64_t>(s.tier_id[slot]) * TPW_RANK);
            for (int at = lane * 16; at < TPW_RANK * 2; at += kWarpSize * 16) copy_16(s.rows + slot * kRowBytes + at, source + at);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        for (int slot = thread; slot < rows; slot += kCertifyThreads) {
            prefetch_token(target(s.tier_id[slot]));
            s.tier_noise[slot] = exact_noise(s.tier_id[slot]);
        }
        return rows;
    }

    // W2's rows of all entries above `least`, into L2, while it isn't known yet which of them are the first tier; the others are a
    // second one's, should it come to that. Where steps are few: else these would be in the way of what all need.
    __device__ __forceinline__ void prefetch_rows(int entries, int32_t least) const {
        if (p.walk.batch * p.walk.gamma * 4 > static_cast<int>(gridDim.x)) return;
        for (int entry = thread; entry < entries; entry += kCertifyThreads) {
            if (s.score[entry] <= least) continue;
            const bf16* row = p.w2 + static_cast<int64_t>(s.id[entry]) * TPW_RANK;
            for (int at = 0; at < TPW_RANK; at += 64) prefetch_l2(row + at);
        }
    }

    __device__ __forceinline__ Site step_site() const { return {TPW_WAIT_SLOT, 0, u32(step), u32(batch_row)}; }

    // u of the tokens that the step before is likely to end with. `before`: on every warp, the lane's of them. False: the walk has
    // failed.
    __device__ __forceinline__ bool load_likely(uint32_t& before) const {
        u64 token = kNoToken;
        const bool alive = await_word<Scope::gpu>(watch, likely_word(p, step - 1, batch_row, lane), header_tag(watch.block), step_site(), token);
        before = static_cast<uint32_t>(token);
        __syncwarp();
        constexpr int kWarpColumns = kLikely / kCertifyWarps;
        URow u[kWarpColumns];
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) {
            const uint32_t of = __shfl_sync(kFullWarp, before, warp + i * kCertifyWarps);
            u[i].load(p.walk.u_rows + clamped(p.walk, of) * (TPW_RANK / 8), nullptr, lane);
        }
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) u[i].store(s.u + (warp + i * kCertifyWarps) * kColumnBytes, nullptr, 0, lane);
        return __all_sync(kFullWarp, alive);
    }

    // The transitions of all likely tokens, told to the CTAs of the request.
    __device__ __forceinline__ void tell_transitions(int rows, int32_t threshold, uint32_t before) const {
        uint64_t best[2 * kLikelyGroups] = {};  // of the lane's columns
        const unsigned char* b = s.u + (lane >> 2) * kColumnBytes + (lane & 3) * 8;
        for (int tile = warp; tile * kTileRows < rows; tile += kCertifyWarps) {
            const int first = tile * kTileRows + lane / 4;
            Dot::Accumulator acc[kLikelyGroups][4] = {};
            multiply_tile<kLikelyGroups>(b, tier_rows(first, rows), acc);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int slot = first + 8 * half;
                if (slot >= rows) continue;
                const float base = s.tier_base[slot], noise = s.tier_noise[slot];
                const uint32_t id = s.tier_id[slot];
#pragma unroll
                for (int i = 0; i < 2 * kLikelyGroups; ++i) best[i] = max(best[i], make_key(scoring.score(base, acc[i / 2][2 * half + i % 2], noise), id));
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
        if (warp != 0) return;
        uint64_t key = 0;
#pragma unroll
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
#pragma unroll
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

    // Of the first tier, those of which the first is `first`.
    __device__ __forceinline__ TileRows tier_rows(int first, int rows) const {
        TileRows found;
#pragma unroll
        for (int half = 0; half < 2; ++half) found.of[half] = s.rows + min(first + 8 * half, rows - 1) * kRowBytes + (lane & 3) * 4;
        return found;
    }

    // The best key of 16 rows after the token of `u`. `dot` of row g + 8 * half is handed to `key(half, dot)` by the lanes whose
    // number in the row's four is `half`.
    template <typename Key>
    __device__ __forceinline__ uint64_t score_tile(const unsigned char* u, const TileRows& rows, const Key& key) const {
        Dot::Accumulator acc[1][4] = {};
        multiply_tile<1>(u + (lane & 3) * 8, rows, acc);
        const int half = lane & 3;
        return half < 2 ? key(half, half == 0 ? acc[0][0] : acc[0][2]) : 0;
    }

    __device__ __forceinline__ uint64_t cta_best(uint64_t key) const {
        key = warp_max_key(key);
        if (lane == 0) s.control->best[warp] = key;
        __syncthreads();
        return warp_max_key(lane < kCertifyWarps ? s.control->best[lane] : 0);
    }

    __device__ __forceinline__ uint64_t score_first(const unsigned char* u, int rows) const {
        uint64_t best = 0;
        for (int tile = warp; tile * kTileRows < rows; tile += kCertifyWarps) {
            const int first = tile * kTileRows + lane / 4;
            best = max(best, score_tile(u, tier_rows(first, rows), [&](int half, float dot) -> uint64_t {
                           const int slot = first + 8 * half;
                           return slot < rows ? make_key(scoring.score(s.tier_base[slot], dot, s.tier_noise[slot]), s.tier_id[slot]) : 0;
                       }));
        }
        return best;
    }

    // The entries from `least` to the first tier's threshold that `best` doesn't exclude. From L2 or HBM: they are few.
    __device__ __forceinline__ uint64_t score_second(const unsigned char* u, int entries, int32_t least, int32_t threshold, int32_t best, float bound) const {
        for (int entry = thread; entry < entries; entry += kCertifyThreads) {
            const int32_t score = s.score[entry];
            if (score > least && score <= threshold && scoring.limit(score, bound) >= best) s.second[atomicAdd(&s.control->counters[1], 1)] = entry;
        }
        __syncthreads();
        const int count = s.control->counters[1];
        uint64_t found = 0;
        for (int tile = warp; tile * kTileRows < count; tile += kCertifyWarps) {
            const int first = tile * kTileRows + lane / 4;
            TileRows sources;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t id = s.id[s.second[min(first + 8 * half, count - 1)]];
                sources.of[half] = reinterpret_cast<const unsigned char*>(p.w2 + static_cast<int64_t>(id) * TPW_RANK) + (lane & 3) * 4;
            }
            found = max(found, score_tile(u, sources, [&](int half, float dot) -> uint64_t {
                            if (first + 8 * half >= count) return 0;
                            const int entry = s.second[first + 8 * half];
                            return make_key(scoring.score(s.base[entry], dot, exact_noise(s.id[entry])), s.id[entry]);
                        }));
        }
        return found;
    }

    // True unless the walk has failed.
    __device__ __forceinline__ bool run() const {
        const int entries = TPW_WORLD_SIZE * p.units * kList;
        if (step == 0 && thread == 0) prefetch_token(row.previous);
        int32_t largest, left_out;
        if (!gather(largest, left_out)) return false;
        prefetch_rows(entries, left_out);
        const int32_t threshold = threshold_of(kTier, entries, left_out, largest);
        const int rows = load_tier(entries, threshold, threshold_of(kLikely, entries, threshold, largest));
        uint32_t before = kNoToken;
        bool alive = step == 0 || load_likely(before);
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (__syncthreads_or(!alive)) return false;
        if (step > 0) tell_transitions(rows, threshold, before);

        u64 token, next;
        alive = follow(token, next);
        if (__syncthreads_or(!alive)) return false;
        if (next != kNoToken) {
            finish(next, true, rows);
        } else if (token & kFailed) {
            finish(token, false, 0);
        } else {
            score(token, entries, rows, left_out, threshold);
        }
        return true;
    }

    // The step after a token that has no transition.
    __device__ __forceinline__ void score(u64 token, int entries, int rows, int32_t left_out, int32_t threshold) const {
        const int64_t previous = clamped(p.walk, static_cast<int64_t>(token));
        const float bound = __ldg(p.bounds + previous);
        unsigned char* u = s.u + warp * kColumnBytes;
        URow u_row;
        u_row.load(p.walk.u_rows + previous * (TPW_RANK / 8), nullptr, lane);
        u_row.store(u, nullptr, 0, lane);
        __syncwarp();
        uint64_t key = score_first(u, rows);
        uint64_t best = cta_best(key);
        int scored = rows;
        if (threshold > left_out && !is_above(best, scoring.limit(threshold, bound))) {
            key = max(key, score_second(u, entries, left_out, threshold, key_value(best), bound));
            __syncthreads();  // everyone has read the warps' best of the first tier
            best = cta_best(key);
            scored += s.control->counters[1];
        }
        const bool certified = is_above(best, scoring.limit(left_out, bound));
        finish(certified ? static_cast<u64>(target(key_id(best))) : kFailed | u64(step), certified, scored);
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

// The chase: a CTA, or a team of them, takes one request's step.
//
// Whatever doesn't depend on the token comes first, for all steps at once, as each has its CTAs: the candidates of all ranks in
// registers, the rows of W2 of the best of them (the first tier) in shared memory, and their exact noise. And *transitions*: for
// each token that the step before is likely to end with, by its own candidates alone, which token this step then ends with. A team
// shares them out in parts of kPart tokens, as a token without a transition costs the time of several steps. All transitions are
// told to the CTAs of the request, and one of each team, the follower, follows them from the anchor to its own step: a look-up a
// step, with no word to anybody.
//
// A token that isn't among the likely ones, or after which the first tier doesn't decide, has no transition. The follower of its
// step then scores the first tier after this token alone, by the same code, in all columns: a CTA runs nearly all its code but
// once, straight from DRAM, so what counts is how much there is. As long as the best isn't above the limit of the others, the next
// best candidates become a tier and are scored as well. Where CTAs are left over, a helper of each step has the second one in shared
// memory when the follower asks for it, and tells the best of it. Who follows transitions beyond that step waits for its token. All
// ranks do this on the same candidates, so they need no word from each other.
#pragma once

#include "second_tier.cuh"

namespace tpw {

__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The thread's number, anew for each step: what is worked out from it isn't kept, or spilled, over all steps of a CTA.
__device__ __forceinline__ int own_thread() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

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
    const int batch_row, step, member, thread, lane, warp;

    __device__ __forceinline__ Chase(const CertifyParams& p, const ChaseSmem& s, const Exchange& watch, const RowState& row, int batch_row, int step, int member)
        : p(p), s(s), watch(watch), row(row), scoring{row.temperature, row.inverse_temperature}, batch_row(batch_row), step(step), member(member),
          thread(own_thread()), lane(thread % kWarpSize), warp(thread / kWarpSize) {}

    // Of the team: who tells the next step what this one is likely to end with, and who finds this step's token. That one comes behind
    // the others, as it waits for all of them; behind it is the helper.
    __device__ __forceinline__ bool tells() const { return member == 0; }
    __device__ __forceinline__ bool follows() const { return member == p.team - 1; }
    // After the anchor nobody helps: there is no time for it.
    __device__ __forceinline__ bool is_helped() const { return p.helpers > 0 && step > 0; }
    __device__ __forceinline__ bool helps() const { return member == p.team; }
    // After the anchor comes one token, whose team has no transitions to share.
    __device__ __forceinline__ bool scores() const { return step > 0 || follows(); }

    __device__ __forceinline__ int64_t target(uint32_t id) const { return p.walk.d2t ? p.walk.d2t[id] : static_cast<int64_t>(id); }

    // Of what was sent, in the order of candidates.cuh, the thread's word i.
    __device__ __forceinline__ uint32_t word_index(int i) const { return thread + i * kCertifyThreads; }

    __device__ __forceinline__ const char* list() const {
        return p.lists[p.walk.rank] + list_offset(p, watch.block, step * p.walk.batch + batch_row, 0, 0);
    }

    __device__ __forceinline__ uint32_t num_words() const { return TPW_WORLD_SIZE * p.units * kUnitWords; }

    static constexpr int kLast = kList - (kUnitWords - 1) * kWordCandidates;  // in a unit's last word: what was left out

    // The thread's word i, without what isn't a candidate: that has kNothing's order.
    __device__ __forceinline__ Parts candidates(int i, const Word& word) const {
        Parts parts = Parts::from(word);
#pragma unroll
        for (int j = 0; j < kWordCandidates; ++j)
            if (word_index(i) >= num_words() || j == kLast && word_index(i) % kUnitWords == kUnitWords - 1) parts.of[j] = static_cast<uint32_t>(kNothing);
        return parts;
    }

    // The words of all ranks, which each thread keeps in its registers. False when the walk has failed.
    __device__ __forceinline__ bool gather(Parts (&parts)[kThreadWords], int32_t& largest) const {
        if (thread == 0) s.control->rows = 0, s.control->phase ^= scores();
        const char* first = list() + thread * TPW_WORD_BYTES;
        Word word[kThreadWords] = {};
        uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) missing |= uint32_t(word_index(i) < num_words()) << i;
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
        int32_t best = kNothing, most = kNothing;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) {
            if (word_index(i) < num_words() && word_index(i) % kUnitWords == kUnitWords - 1) most = max(most, Parts::from(word[i]).order(kLast));
            parts[i] = candidates(i, word[i]);
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j) best = max(best, parts[i].order(j));
        }
        best = __reduce_max_sync(kFullWarp, best);
        most = __reduce_max_sync(kFullWarp, most);
        if (lane == 0) s.control->largest[warp] = best, s.control->left_out[warp] = most;
        if (__syncthreads_or(!alive)) return false;
        largest = __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->largest[lane] : kNothing) | kOrderMask;
        return true;
    }

    // The largest that any unit left out, once the words are gathered.
    __device__ __forceinline__ int32_t left_out() const {
        return __reduce_max_sync(kFullWarp, lane < kCertifyWarps ? s.control->left_out[lane] : kNothing) | kOrderMask;
    }

    __device__ __forceinline__ int count_above(const Parts (&parts)[kThreadWords], int32_t threshold) const {
        int above = 0;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i)
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j) above += parts[i].order(j) > threshold;
        return above;
    }

    // An order from `least` to `upper`, `taken` entries above which are scored, for the next tier: no more than kTier others exceed
    // it; and no fewer than three quarters as many, unless fewer exceed `least` or too many are equal. Three are tried a turn, with
    // one barrier.
    __device__ __forceinline__ int32_t threshold_of(const Parts (&parts)[kThreadWords], int32_t least, int32_t upper, uint32_t taken) const {
        uint32_t low = least, width = (static_cast<uint32_t>(upper) - low) >> kOrderShift;
        if (upper <= least) return least;
        const uint32_t most = taken + kTier;
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
            if (turn == 0 && counts[0] <= most) return least;
            uint32_t from = 0, to = width, held = taken;
#pragma unroll
            for (int i = 2; i >= 0; --i)
                if (counts[i] <= most) to = tried[i], held = counts[i];
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (counts[i] > most) from = tried[i];
            low += from << kOrderShift, width = to - from;
            if (width <= 1 || (held - taken) * 4 >= kTier * 3) return low + (width << kOrderShift);
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

    // The entries above `threshold` and not above `upper` become a tier, with all that scoring them takes; its rows of W2 are then on
    // their way. The best of the first tier are told to the next step. Returns how many rows.
    __device__ __forceinline__ int load_tier(const Parts (&parts)[kThreadWords], int32_t threshold, int32_t upper, bool is_first) const {
        const int own = count_above(parts, threshold) - count_above(parts, upper);
        int slot = own;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const int before = __shfl_up_sync(kFullWarp, slot, distance);
            if (lane >= distance) slot += before;
        }
        int first = 0;
        if (lane == kWarpSize - 1) first = atomicAdd(&s.control->rows, slot);
        slot += __shfl_sync(kFullWarp, first, kWarpSize - 1) - own;
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i) {
            const uint32_t unit = word_index(i) / kUnitWords;
#pragma unroll
            for (int j = 0; j < kWordCandidates; ++j)
                if (parts[i].order(j) > threshold && parts[i].order(j) <= upper) {
                    s.tier_order[slot] = parts[i].order(j);
                    s.tier_place[slot] = unit << 16 | parts[i].place(j);
                    if (kWordCandidates < 3) s.tier_base[slot] = parts[i].base(j, true);
                    ++slot;
                }
        }
        __syncthreads();
        const int rows = s.control->rows;
        const bool has_next = is_first && tells() && step + 1 < p.walk.gamma, all_likely = p.team * kPart >= kTier;
        if (has_next && all_likely)
            for (int slot = thread; slot < rows; slot += kCertifyThreads) tell_likely(slot, s.tier_place[slot]);
        if (scores()) {
            // A lane a row, which is faster than 16 bytes a lane of one row after another. Before, others wrote and read in the rows' place.
            fence_async_proxy();
            if (thread == 0) mbarrier_expect(&s.control->rows_barrier, rows * TPW_RANK * 2);
            const int row_slot = warp * kWarpRows + lane;
            if (lane < kWarpRows && row_slot < rows) {
                const uint32_t place = s.tier_place[row_slot], id = id_of(place >> 16, place & 0xffff);
                bulk_load(s.rows + row_slot * kRowBytes, p.w2 + static_cast<int64_t>(id) * TPW_RANK, TPW_RANK * 2, &s.control->rows_barrier);
                s.tier_id[row_slot] = id;
                if (kWordCandidates == 3) s.tier_base[row_slot] = from_ordered(score_of(s.tier_order[row_slot], scoring.sampled()));
            }
        }
        if (warp == 0 && has_next) tell_no_more(all_likely ? rows : tell_likely(rows, threshold, upper));
        if (warp >= kColumnWarps && scoring.sampled() && scores())
            for (int slot = thread - kColumnWarps * kWarpSize; slot < rows; slot += kCertifyThreads - kColumnWarps * kWarpSize)
                s.tier_noise[slot] = exact_noise(id_of(s.tier_place[slot] >> 16, s.tier_place[slot] & 0xffff));
        return rows;
    }

    // By one warp: the best of the first tier, as many as have transitions, to the next step's CTAs. Returns how many.
    __device__ __forceinline__ int tell_likely(int rows, int32_t threshold, int32_t largest) const {
        constexpr int kLaneRows = (kTier + kWarpSize - 1) / kWarpSize;
        const int most = p.team * kPart;
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
            if (above <= most)
                width = tried;
            else
                low += tried << kOrderShift, width -= tried;
            if (width <= 1 || above <= most && above * 4 >= most * 3) break;
            tried = width / 2;
        }
        const int32_t likely = low + (width << kOrderShift);
        int count = 0;
#pragma unroll 1
        for (int slot = lane; slot - lane < rows; slot += kWarpSize) {
            const bool is_likely = slot < rows && s.tier_order[slot] > likely;
            const uint32_t those = __ballot_sync(kFullWarp, is_likely);
            if (is_likely) tell_likely(count + __popc(those & ((1u << lane) - 1)), s.tier_place[slot]);
            count += __popc(those);
        }
        return count;
    }

    // place: as of tier_place. What is read for a likely token is then on its way into L2.
    __device__ __forceinline__ void tell_likely(int i, uint32_t place) const {
        const int64_t token = target(id_of(place >> 16, place & 0xffff));
        store_word<Scope::gpu>(likely_word(p, step, batch_row, i), static_cast<u64>(token), header_tag(watch.block));
        prefetch_token(token);
    }

    __device__ __forceinline__ void tell_no_more(int count) const {
        for (int i = count + lane; i < p.team * kPart; i += kWarpSize)
            store_word<Scope::gpu>(likely_word(p, step, batch_row, i), kNoToken, header_tag(watch.block));
    }

    // What a step after `token` reads, into L2.
    __device__ __forceinline__ void prefetch_token(int64_t token) const {
        prefetch_l2(p.bounds + token);
#pragma unroll
        for (int at = 0; at < TPW_RANK / 8; at += 8) prefetch_l2(p.walk.u_rows + token * (TPW_RANK / 8) + at);
    }

    __device__ __forceinline__ Site step_site() const { return {TPW_WAIT_SLOT, 0, u32(step), u32(batch_row)}; }

    // The tokens of this CTA's part that the step before is likely to end with, one a lane, from lane kPart on once more. False: the walk has failed.
    __device__ __forceinline__ bool await_likely(uint32_t& before) const {
        u64 token = kNoToken;
        const char* word = likely_word(p, step - 1, batch_row, member * kPart + lane % kPart);
        const bool alive = await_word<Scope::gpu>(watch, word, header_tag(watch.block), step_site(), token);
        before = static_cast<uint32_t>(token);
        return __all_sync(kFullWarp, alive);
    }

    // u of each lane's token into the column of the lane's number.
    __device__ __forceinline__ void load_columns(uint32_t before) const {
        if (warp >= kColumnWarps) return;
        constexpr int kWarpColumns = kPart / kColumnWarps;
        URow u[kWarpColumns];
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) {
            const uint32_t of = __shfl_sync(kFullWarp, before, warp + i * kColumnWarps);
            u[i].load(p.walk.u_rows + clamped(p.walk, of) * (TPW_RANK / 8), nullptr, lane);
        }
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) u[i].store(s.u + (warp + i * kColumnWarps) * kColumnBytes, nullptr, 0, lane);
    }

    // The tier after the tokens of all columns: s.keys of each warp, for all to read.
    __device__ __forceinline__ void score_columns(int rows) const {
        uint64_t best[2 * kPartGroups] = {};  // of the lane's columns
        if (warp * kTileRows < rows) {
            const int first = warp * kTileRows + lane / 4;
            const unsigned char* a_rows[2];  // where the lane finds its rows g and g + 8 of the tile
#pragma unroll
            for (int half = 0; half < 2; ++half) a_rows[half] = s.rows + min(first + 8 * half, rows - 1) * kRowBytes + (lane & 3) * 4;
            const unsigned char* b = s.u + (lane >> 2) * kColumnBytes + (lane & 3) * 8;
            Dot::Accumulator acc[kPartGroups][4] = {};
#pragma unroll 4  // code that is run once costs more than a loop
            for (int k = 0; k < kSteps; ++k) {
                Fragment a;
                a.x = *reinterpret_cast<const uint32_t*>(a_rows[0] + k * 32);
                a.y = *reinterpret_cast<const uint32_t*>(a_rows[1] + k * 32);
                a.z = *reinterpret_cast<const uint32_t*>(a_rows[0] + k * 32 + 16);
                a.w = *reinterpret_cast<const uint32_t*>(a_rows[1] + k * 32 + 16);
#pragma unroll
                for (int group = 0; group < kPartGroups; ++group) Dot::mma(acc[group], a, *reinterpret_cast<const uint2*>(b + group * kUBytes + k * 32));
            }
#pragma unroll 1  // its code is run for the first time: once more is cheaper than as much again
            for (int half = 0; half < 2; ++half) {
                const int slot = min(first + 8 * half, rows - 1);  // the last one again changes nothing
                const float base = s.tier_base[slot], noise = s.tier_noise[slot];
                const uint32_t id = s.tier_id[slot];
#pragma unroll
                for (int i = 0; i < kPartGroups; ++i) {
                    int32_t scores[2];
                    scoring.scores(base, half ? acc[i][2] : acc[i][0], half ? acc[i][3] : acc[i][1], noise, scores);
#pragma unroll
                    for (int j = 0; j < 2; ++j) best[2 * i + j] = max(best[2 * i + j], make_key(scores[j], id));
                }
            }
        }
        // The eight lanes that have the same four columns: two of them are left with the best of one.
#pragma unroll
        for (int left = kPartGroups, distance = kWarpSize / 2; left >= 1; left /= 2, distance /= 2)
#pragma unroll
            for (int i = 0; i < left; ++i) {
                const bool upper = lane & distance;
                const uint64_t other = __shfl_xor_sync(kFullWarp, upper ? best[i] : best[i + left], distance);
                best[i] = max(upper ? best[i + left] : best[i], other);
            }
        best[0] = max(best[0], __shfl_xor_sync(kFullWarp, best[0], 4));
        const int own = lane >> 3, column = own / 2 * kColumns + 2 * (lane & 3) + own % 2;
        s.keys[warp * kPart + column] = best[0];
        __syncthreads();
    }

    // By one warp: the transitions of this CTA's part, told to the CTAs of the request.
    __device__ __forceinline__ void tell_transitions(int32_t threshold, uint32_t before, float bound) const {
        if (lane >= kPart) return;
        uint64_t key = 0;
#pragma unroll 4
        for (int of = 0; of < kCertifyWarps; ++of) key = max(key, s.keys[of * kPart + lane]);
        u64 transition = static_cast<u64>(kNoToken) << 32;
        if (before != kNoToken && is_above(key, scoring.limit(threshold, bound)))
            transition = static_cast<u64>(before) << 32 | static_cast<u64>(target(key_id(key)));
        store_word<Scope::gpu>(transition_word(p, step, batch_row, member * kPart + lane), transition, header_tag(watch.block));
    }

    // By a warp: the transitions of a step, to shared memory. False: the walk has failed.
    __device__ __forceinline__ bool await_transitions(int of) const {
        Word word[kLaneLikely] = {};
        uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < kLaneLikely; ++i) {
            missing |= uint32_t(i * kWarpSize + lane < p.team * kPart) << i;
            s.transitions[warp * kLikely + i * kWarpSize + lane] = static_cast<u64>(kNoToken) << 32;
        }
        for (u32 polls = 1; missing != 0; ++polls) {
#pragma unroll
            for (int i = 0; i < kLaneLikely; ++i) load_word_if(missing >> i & 1, transition_word(p, of, batch_row, i * kWarpSize + lane), word[i]);
#pragma unroll
            for (int i = 0; i < kLaneLikely; ++i)
                if (missing >> i & 1 && word[i].tag == header_tag(watch.block)) {
                    missing &= ~(1u << i);
                    s.transitions[warp * kLikely + i * kWarpSize + lane] = word[i].key;
                }
            if (missing != 0 && polls % POLLS_PER_LOOK == 0 && hopeless(watch, step_site(), header_tag(watch.block), 0)) return false;
        }
        return true;
    }

    // From the anchor to this step: the token before, and the step's own where it has a transition. False: the walk has failed.
    __device__ __forceinline__ bool follow(u64& token, u64& next) const {
        bool alive = true;
        next = kNoToken;
        for (int first = 1; first <= step; first += kCertifyWarps) {
            if (first > 1) __syncthreads();  // those before have been followed
            if (alive && first + warp <= step) alive = await_transitions(first + warp);
            alive = __syncthreads_and(alive);
            if (warp > 0) continue;  // a look-up reads as much as one warp's share of the shared memory's time allows
            if (first == 1) alive = await_token(0, alive, token);
            for (int at = first; at < min(first + kCertifyWarps, step + 1) && alive; ++at) {
                const u64* transitions = s.transitions + (at - first) * kLikely + lane;
                const uint32_t before = token & kFailed ? kNobody : static_cast<uint32_t>(token);
                uint32_t own = kNoToken;
#pragma unroll
                for (int i = 0; i < kLaneLikely; ++i) {
                    const u64 transition = transitions[i * kWarpSize];
                    if (static_cast<uint32_t>(transition >> 32) == before) own = static_cast<uint32_t>(transition);
                }
                const uint32_t to = __reduce_min_sync(kFullWarp, own);  // one lane has it, or none
                if (at == step)
                    next = to;
                else if (to != kNoToken)
                    token = to;
                else if (!(token & kFailed))
                    alive = await_token(at, alive, token);
            }
        }
        if (thread == 0) s.control->token = token, s.control->next = next;
        if (__syncthreads_or(!alive)) return false;
        token = s.control->token;
        next = s.control->next;
        return true;
    }

    // The token of an earlier step that has no transition, from its CTA; by a whole warp.
    __device__ __forceinline__ bool await_token(int of, bool alive, u64& token) const {
        if (lane == 0 && alive) alive = await_word<Scope::gpu>(watch, step_word(p, of, batch_row), header_tag(watch.block), step_site(), token);
        token &= kTokenMask;
        token = __shfl_sync(kFullWarp, token, 0);
        return __all_sync(kFullWarp, alive);
    }

    // True unless the walk has failed.
    __device__ __forceinline__ bool run() const {
        if (!scores() && !(tells() && p.walk.gamma > 1)) return true;
        if (step == 0 && thread == 0) prefetch_token(row.previous);
        if (helps() && thread == 0) tell_helper(p, watch.block, step, batch_row);
        bool known = step == 0;  // the token before; until then the first tier is scored after the likely ones
        u64 token = row.previous;
        uint32_t before;
        float bound = 0.0f;
        uint64_t best = 0;
        int32_t threshold;
        int taken = 0;  // candidates that have been scored, or are the follower's
        bool decided = false;
        while (!decided) {  // a tier
            Parts parts[kThreadWords];  // gathered anew for a later tier, as there are few: most have use for the registers
            int32_t upper;
            if (!gather(parts, upper)) return false;
            if (taken > 0) upper = threshold;
            threshold = threshold_of(parts, left_out(), upper, taken);
            int rows = load_tier(parts, threshold, upper, taken == 0);
            if (!scores()) return true;
            // Even if the walk has failed: the copies must end before the CTA does. Once more costs nothing.
            const auto await_rows = [&]() { mbarrier_wait(&s.control->rows_barrier, s.control->phase ^ 1); };
            bool alive = true;
            if (helps()) {
                if (taken == 0) {  // the first tier, to know what comes next
                    await_rows();
                    __syncthreads();
                    if (rows == 0 || threshold <= left_out()) return true;  // the follower goes no further, either
                    taken = rows;
                    continue;
                }
                alive = !__syncthreads_or(warp == 0 && !await_asking(p, s.rows, step, batch_row));
                await_rows();
                token = s.control->token;
                if (!alive || token == kNoToken) return alive;
                known = true;
            }
            while (true) {
                if (!known) {
                    if (warp < kColumnWarps) alive = await_likely(before);
                    if (warp == 0 && before != kNoToken) bound = __ldg(p.bounds + before);
                } else {
                    before = static_cast<uint32_t>(token);
                    bound = __ldg(p.bounds + clamped(p.walk, static_cast<int64_t>(token)));
                }
                load_columns(before);
                await_rows();
                if (__syncthreads_or(!alive)) return false;
                score_columns(rows);
                if (known) break;
                if (warp == 0) tell_transitions(score_of(threshold, scoring.sampled()), before, bound);
                if (!follows()) return true;
                u64 next;
                if (!follow(token, next)) return false;
                if (next != kNoToken || token & kFailed) {
                    finish(next != kNoToken ? next : token, next != kNoToken ? rows : 0);
                    return true;
                }
                known = true;
                if (is_helped() && thread == 0) ask_second(p, watch.block, step, batch_row, token);
            }
            if (helps()) {
                tell_second(p, s.rows, step, batch_row, threshold, rows);
                return true;
            }
            const bool was_first = taken == 0;
            taken += rows;
            best = max(best, warp_max_key(lane < kCertifyWarps ? s.keys[lane * kPart] : 0));
            for (bool asks = is_helped() && was_first;; asks = false) {
                // No rows: more than a tier has room for are equal.
                decided = rows == 0 || threshold <= left_out() || is_above(best, scoring.limit(score_of(threshold, scoring.sampled()), bound));
                if (decided || !asks) break;
                if (__syncthreads_or(warp == 0 && !await_second(p, s.rows, step, batch_row))) return false;
                best = max(best, s.control->token);
                threshold = static_cast<int32_t>(s.control->next), rows = static_cast<int>(s.control->next >> 32);
                taken += rows;
            }
        }
        const bool certified = is_above(best, scoring.limit(score_of(threshold, scoring.sampled()), bound));
        finish(certified ? static_cast<u64>(target(key_id(best))) : kFailed | u64(step), taken);
        return true;
    }

    // To all ranks, where each has other requests.
    __device__ __forceinline__ void finish(u64 token, int scored) const {
        if (thread >= TPW_WORLD_SIZE || p.owners == 1 && thread > 0) return;
        const int destination = p.owners == 1 ? p.walk.rank : thread;
        const u64 key = token | static_cast<u64>(scored) << kScoredShift;
        store_word<Scope::sys>(step_word_of(p, destination, step, batch_row), key, header_tag(watch.block));
    }
};

}  // namespace tpw

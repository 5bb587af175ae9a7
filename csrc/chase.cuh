// The chase: one CTA takes one request's step, and passes the token on to the CTA of the next step.
//
// Whatever doesn't depend on the token comes first, for all steps at once, as each has its CTA: the candidates of all ranks,
// the rows of W2 of the best of them (the first tier) in shared memory, their exact noise, and W1's rows for all tokens that
// the step is likely to end with in L2. Then the token before arrives, and what remains is a row of W1, one dot product
// and two reductions. If the best of the first tier isn't above the limit of the others, those that still could win are
// scored as well (the second tier). All ranks do this on the same candidates, so they need no word from each other.
#pragma once

#include "candidates.cuh"
#include "exchange.cuh"

namespace tpw {

constexpr int kCertifyWarps = TPW_CERTIFY_WARPS;
constexpr int kCertifyThreads = kCertifyWarps * kWarpSize;
constexpr int kTier = TPW_TIER;  // rows of W2 in shared memory
constexpr int kRowBytes = TPW_RANK * 2 + 16;  // the pad spreads the rows of a fragment over the banks
constexpr int kMaxEntries = TPW_MAX_ENTRIES;
constexpr int kBins = TPW_BINS, kBinBits = 8, kLaneBins = kBins / kWarpSize;
static_assert(kBins == 1 << kBinBits);

// A token word's key: the token, or this bit and the step that wasn't certified.
constexpr u64 kFailed = 1ull << 63;

struct ChaseControl {
    uint64_t block, expiry;
    uint64_t best[kCertifyWarps];
    int32_t largest[kCertifyWarps];
    int32_t left_out[kCertifyWarps];
    int32_t counters[2];  // rows of the first tier, entries of the second
    int32_t failed;
};

// Shared memory in this order; the host half is certified.shared_bytes.
struct ChaseSmem {
    unsigned char* rows;        // [kTier] of W2
    unsigned char* u;           // [warp] a column of a B fragment
    ChaseControl* control;
    int32_t* bins;              // [kBins] of `threshold`
    float* tier_base;           // [kTier]
    float* tier_noise;          // [kTier]
    uint32_t* tier_id;          // [kTier]
    int32_t* score;             // [kMaxEntries] selection scores
    float* base;                // [kMaxEntries]
    uint32_t* id;               // [kMaxEntries]
    uint16_t* second;           // [kMaxEntries] entries of the second tier; before that, Chosen of each warp

    __device__ __forceinline__ explicit ChaseSmem(unsigned char* start) {
        rows = start;
        u = rows + kTier * kRowBytes;
        control = reinterpret_cast<ChaseControl*>(u + kCertifyWarps * kColumnBytes);
        bins = reinterpret_cast<int32_t*>(reinterpret_cast<unsigned char*>(control) + TPW_CHASE_CONTROL_BYTES);
        tier_base = reinterpret_cast<float*>(bins + kBins);
        tier_noise = tier_base + kTier;
        tier_id = reinterpret_cast<uint32_t*>(tier_noise + kTier);
        score = reinterpret_cast<int32_t*>(tier_id + kTier);
        base = reinterpret_cast<float*>(score + kMaxEntries);
        id = reinterpret_cast<uint32_t*>(base + kMaxEntries);
        second = reinterpret_cast<uint16_t*>(id + kMaxEntries);
    }

    __device__ __forceinline__ Chosen& chosen(int warp) const { return reinterpret_cast<Chosen*>(rows)[warp]; }
};
static_assert(sizeof(ChaseControl) <= TPW_CHASE_CONTROL_BYTES, "certified.CHASE_CONTROL_BYTES holds ChaseControl");
static_assert(kCertifyWarps * sizeof(Chosen) <= kTier * kRowBytes, "choosing borrows the rows' place");

__device__ __forceinline__ char* step_word(const CertifyParams& p, int step, int row) { return p.steps + (step * p.walk.batch + row) * TPW_WORD_BYTES; }

__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ __forceinline__ void copy_16(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

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
        constexpr int kAhead = kThreadWords < 10 ? kThreadWords : 10;
        for (int first = thread; first < words && alive; first += kAhead * kCertifyThreads) {
            Word word[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + i * kCertifyThreads < words) word[i] = load_word<Scope::sys>(list + (first + i * kCertifyThreads) * TPW_WORD_BYTES);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int at = first + i * kCertifyThreads;
                if (at >= words || !alive) continue;
                const int unit = at / kUnitWords, slot = at % kUnitWords;
                for (u32 polls = 1; !is_of_block(word[i].tag, watch.block); ++polls) {
                    const Site site{TPW_WAIT_RESULT, u32(unit / p.units), u32(step), u32(batch_row)};
                    if (polls % POLLS_PER_LOOK == 0 && hopeless(watch, site, header_tag(watch.block), header_tag(word[i].tag >> kIdBits))) {
                        alive = false;
                        break;
                    }
                    word[i] = load_word<Scope::sys>(list + at * TPW_WORD_BYTES);
                }
                const int32_t score = static_cast<int32_t>(word[i].key >> 32);
                if (slot == kList) {
                    most = max(most, score);
                } else {
                    const int entry = unit * kList + slot;
                    s.score[entry] = score;
                    s.base[entry] = __uint_as_float(static_cast<uint32_t>(word[i].key));
                    s.id[entry] = tag_id(word[i].tag);
                    best = max(best, score);
                }
            }
        }
        if (thread == 0) s.control->counters[0] = s.control->counters[1] = 0;
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
            for (int bin = thread; bin < kBins; bin += kCertifyThreads) s.bins[bin] = 0;
            __syncthreads();
            const int shift = max(32 - __clz(width - 1) - kBinBits, 0);
            for (int entry = thread; entry < entries; entry += kCertifyThreads) {
                const uint32_t distance = static_cast<uint32_t>(s.score[entry]) - above - 1;
                if (s.score[entry] > static_cast<int32_t>(above) && distance < width) atomicAdd(&s.bins[distance >> shift], 1);
            }
            __syncthreads();
            int own[kLaneBins], sum = 0;
#pragma unroll
            for (int i = 0; i < kLaneBins; ++i) sum += own[i] = s.bins[lane * kLaneBins + i];
            __syncthreads();  // everyone has read the bins
            int beyond = sum;  // after a scan: entries of the lanes from this one on
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const int other = __shfl_down_sync(kFullWarp, beyond, distance);
                if (lane + distance < kWarpSize) beyond += other;
            }
            // Bins from the top as long as there is room: their number, and their entries.
            int fits = count + beyond - sum, bins = 0, found = 0;
#pragma unroll
            for (int i = kLaneBins - 1; i >= 0; --i) {
                fits += own[i];
                if (fits <= most) ++bins, found = fits;
            }
            bins = __reduce_add_sync(kFullWarp, bins);
            count = max(count, __reduce_max_sync(kFullWarp, found));
            const uint32_t first = kBins - bins;  // of those bins
            if (first == 0) return above;
            above += (first - 1) << shift, width = 1u << shift;
            if (shift == 0 || count * 4 >= most * 3) return above + width;
        }
        return least;
    }

    __device__ __forceinline__ float exact_noise(uint32_t id) const { return scoring.sampled() ? noise_stream(row, step).exact(id) : 0.0f; }

    // The entries above `threshold` become the first tier, with all that scoring them takes. Returns how many they are.
    __device__ __forceinline__ int load_tier(int entries, int32_t threshold) const {
        for (int entry = thread; entry < entries; entry += kCertifyThreads) {
            if (s.score[entry] <= threshold) continue;
            const int slot = atomicAdd(&s.control->counters[0], 1);
            s.tier_base[slot] = s.base[entry];
            s.tier_id[slot] = s.id[entry];
        }
        __syncthreads();
        const int rows = s.control->counters[0];
        for (int slot = warp; slot < rows; slot += kCertifyWarps) {
            const unsigned char* source = reinterpret_cast<const unsigned char*>(p.w2 + static_cast<int64_t>(s.tier_id[slot]) * TPW_RANK);
            for (int at = lane * 16; at < TPW_RANK * 2; at += kWarpSize * 16) copy_16(s.rows + slot * kRowBytes + at, source + at);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        for (int slot = thread; slot < rows; slot += kCertifyThreads) {
            const int64_t token = target(s.tier_id[slot]);
            prefetch_l2(p.bounds + token);
            for (int at = 0; at < TPW_RANK / 8; at += 8) prefetch_l2(p.walk.u_rows + token * (TPW_RANK / 8) + at);
            s.tier_noise[slot] = exact_noise(s.tier_id[slot]);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        return rows;
    }

    // The token before this step, by each warp: the anchor, or what the CTA of that step passes on. False: the walk has failed.
    __device__ __forceinline__ bool receive(u64& token) const {
        token = row.previous;
        if (step == 0) return true;
        bool alive = true;
        if (lane == 0) alive = await_word<Scope::gpu>(watch, step_word(p, step - 1, batch_row), header_tag(watch.block), {TPW_WAIT_SLOT, 0, u32(step), u32(batch_row)}, token);
        token = __shfl_sync(kFullWarp, token, 0);
        return __all_sync(kFullWarp, alive);
    }

    // The best key of 16 rows, by one warp. `rows[half]`: where this lane finds its rows g and g + 8 of the tile. `dot` of
    // row g + 8 * half is handed to `key(half, dot)` by the lanes whose number in the row's four is `half`.
    template <typename Key>
    __device__ __forceinline__ uint64_t score_tile(const unsigned char* u, const unsigned char* const (&rows)[2], const Key& key) const {
        Dot::Accumulator acc[4] = {};
        const unsigned char* b = u + (lane & 3) * 8;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Fragment a;
            a.x = *reinterpret_cast<const uint32_t*>(rows[0] + k * 32);
            a.y = *reinterpret_cast<const uint32_t*>(rows[1] + k * 32);
            a.z = *reinterpret_cast<const uint32_t*>(rows[0] + k * 32 + 16);
            a.w = *reinterpret_cast<const uint32_t*>(rows[1] + k * 32 + 16);
            Dot::mma(acc, a, *reinterpret_cast<const uint2*>(b + k * 32));
        }
        const int half = lane & 3;
        return half < 2 ? key(half, half == 0 ? acc[0] : acc[2]) : 0;
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
            const unsigned char* sources[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) sources[half] = s.rows + min(first + 8 * half, rows - 1) * kRowBytes + (lane & 3) * 4;
            best = max(best, score_tile(u, sources, [&](int half, float dot) -> uint64_t {
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
            const unsigned char* sources[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t id = s.id[s.second[min(first + 8 * half, count - 1)]];
                sources[half] = reinterpret_cast<const unsigned char*>(p.w2 + static_cast<int64_t>(id) * TPW_RANK) + (lane & 3) * 4;
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
        int32_t largest, left_out;
        if (!gather(largest, left_out)) return false;
        const int32_t threshold = threshold_of(kTier, entries, left_out, largest);
        const int rows = load_tier(entries, threshold);

        u64 token;
        const bool alive = receive(token);
        uint64_t key = 0;
        unsigned char* u = s.u + warp * kColumnBytes;
        float bound = 0.0f;
        if (alive && !(token & kFailed)) {
            const int64_t previous = clamped(p.walk, static_cast<int64_t>(token));
            bound = __ldg(p.bounds + previous);
            URow u_row;
            u_row.load(p.walk.u_rows + previous * (TPW_RANK / 8), nullptr, lane);
            u_row.store(u, nullptr, 0, lane);
            __syncwarp();
            key = score_first(u, rows);
        }
        if (__syncthreads_or(!alive)) return false;
        if (token & kFailed) {
            if (thread == 0) store_word<Scope::gpu>(step_word(p, step, batch_row), token, header_tag(watch.block));
            return true;
        }
        uint64_t best = cta_best(key);
        const auto is_above = [&](int32_t limit) { return best != 0 && static_cast<int32_t>(static_cast<uint32_t>(best >> 32) ^ 0x80000000u) > limit; };
        int scored = rows;
        if (threshold > left_out && !is_above(scoring.limit(threshold, bound))) {
            const int32_t known = best == 0 ? kNothing : static_cast<int32_t>(static_cast<uint32_t>(best >> 32) ^ 0x80000000u);
            key = max(key, score_second(u, entries, left_out, threshold, known, bound));
            __syncthreads();  // everyone has read the warps' best of the first tier
            best = cta_best(key);
            scored += s.control->counters[1];
        }
        if (thread == 0) {
            const bool certified = is_above(scoring.limit(left_out, bound));
            const u64 next = certified ? static_cast<u64>(target(key_id(best))) : kFailed | u64(step);
            store_word<Scope::gpu>(step_word(p, step, batch_row), next, header_tag(watch.block));
            count(Count::certified_steps, certified);
            count(Count::candidates_scored, scored);
        }
        return true;
    }

    __device__ __forceinline__ void count(Count what, int more) const {
        if (more > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + static_cast<int>(what)), static_cast<unsigned long long>(more));
    }
};

}  // namespace tpw

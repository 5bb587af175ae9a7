// The log-sum-exp of logit / T over the whole vocabulary, of each step and request; T is 1 for greedy rows.
//
// A part is (largest, sum): the largest logit, and the sum of exp((logit - largest) / T). Each CTA makes the one of its rows,
// the row's aggregator merges those of its GPU and stores the result on every rank, and CTA 0 of each rank merges the ranks',
// all in fixed orders: the same bits on every rank and in every run. Another world size cuts the vocabulary into other parts,
// whose fp32 sums round differently: there results agree within 1e-5, as they do with the exact value.
#pragma once

#include "cta.cuh"
#include "exchange.cuh"

namespace tpw {

struct LogSumExp {
    const WalkParams& p;
    const Smem s;
    const Cta cta;
    const WalkExchange exchange;

    __device__ __forceinline__ LogSumExp(const WalkParams& p, unsigned char* shared_memory)
        : p(p), s(shared_memory), cta(Cta::of_service(p)), exchange{p, s.control->block, s.control->expiry} {}

    // This CTA's parts. Not by the warps that exchange the requests' keys: with one request, both go on at once.
    __device__ __forceinline__ void contribute(const Pass& pass) const {
        for (int request = (cta.warp + kServiceWarps - 1) % kServiceWarps; request < pass.requests; request += kServiceWarps) {
            const int row = pass.first_row + request;
            const Part part = of_cta(pass, request);
            if (cta.lane == 0) store_word<Scope::gpu>(partial_word(exchange.mailbox(), pass.step, row, cta.index), part.packed(), lse_tag(exchange.block, pass.step));
        }
    }

    // The rows' aggregator: what this GPU has of the sum goes to all ranks. By the warps that publish the rows' results, and
    // before those of the next step: mailbox.cuh has partials wait for that. False when the walk has failed.
    __device__ __forceinline__ bool combine(const Pass& pass) const {
        const u64 tag = lse_tag(exchange.block, pass.step);
        for (int request = cta.warp; request < pass.requests; request += kServiceWarps) {
            const int row = pass.first_row + request;
            if (row % cta.count != cta.index) continue;
            const float scale = log2_scale(row);
            const char* words = partial_word(exchange.mailbox(), pass.step, row, cta.lane);
            Part sum;
            for (u32 polls = 1;; ++polls) {
                sum = Part{};
                int missing = -1;
                u64 seen = tag;
#pragma unroll
                for (int i = 0; i < kSlotsPerLane; ++i) {
                    const int index = i * kWarpSize + cta.lane;
                    if (index < cta.count) {
                        const Word word = load_word<Scope::gpu>(words + i * kWarpSize * TPW_WORD_BYTES);
                        if (word.tag != tag) missing = index, seen = word.tag;
                        sum = merged(sum, Part::unpacked(word.key), scale);
                    }
                }
                if (__all_sync(kFullWarp, missing < 0)) break;
                const Site site{TPW_WAIT_SLOT, static_cast<u32>(missing), static_cast<u32>(pass.step), static_cast<u32>(row)};
                if (polls % POLLS_PER_LOOK == 0 && exchange.gives_up(missing >= 0, site, tag, seen)) return false;
            }
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2)
                sum = merged(sum, {__shfl_xor_sync(kFullWarp, sum.largest, distance), __shfl_xor_sync(kFullWarp, sum.sum, distance)}, scale);
            if (cta.lane < kAgreeingRanks)
                store_word<Scope::sys>(sum_word(exchange.mailbox_of(cta.lane), pass.step, row, exchange.own_source()), sum.packed(), tag);
        }
        return true;
    }

    // By all service threads of CTA 0. Not by whole warps. False when the walk has failed.
    __device__ __forceinline__ bool finish() const {
        for (int i = cta.warp * kWarpSize + cta.lane; i < cta.batch * p.gamma; i += kServiceThreads) {
            const int row = i / p.gamma, step = i % p.gamma;
            const u64 tag = lse_tag(exchange.block, step);
            Part sum;
            for (u32 polls = 1;; ++polls) {
                sum = Part{};
                int missing = -1;
                u64 seen = tag;
#pragma unroll
                for (int source = 0; source < kAgreeingRanks; ++source) {
                    const Word word = load_word<Scope::sys>(sum_word(exchange.mailbox(), step, row, source));
                    if (word.tag != tag) missing = source, seen = word.tag;
                    sum = merged(sum, Part::unpacked(word.key), log2_scale(row));
                }
                if (missing < 0) break;
                const Site site{TPW_WAIT_RESULT, exchange.rank_of(missing), static_cast<u32>(step), static_cast<u32>(row)};
                if (polls % POLLS_PER_LOOK == 0 && hopeless(exchange.watch(), site, tag, seen)) return false;
            }
            p.lse[i] = static_cast<float>(static_cast<double>(sum.largest) / divisor(row) + log(static_cast<double>(sum.sum)));
        }
        return true;
    }

  private:
    struct Part {
        float largest = __int_as_float(0xff800000);  // -inf: the part of no rows
        float sum = 0.0f;

        __device__ __forceinline__ u64 packed() const { return static_cast<u64>(__float_as_uint(largest)) << 32 | __float_as_uint(sum); }
        __device__ static __forceinline__ Part unpacked(u64 key) { return {__uint_as_float(static_cast<u32>(key >> 32)), __uint_as_float(static_cast<u32>(key))}; }
    };

    __device__ __forceinline__ float divisor(int row) const { return kSampled && s.rows[row].temperature > 0.0f ? s.rows[row].temperature : 1.0f; }

    // exp(x / T) is 2 to the power of scale * x.
    __device__ __forceinline__ float log2_scale(int row) const {
        return 1.44269504f * (kSampled && s.rows[row].temperature > 0.0f ? s.rows[row].inverse_temperature : 1.0f);
    }

    __device__ static __forceinline__ float exp2_approximate(float x) {
        float power;
        asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));  // relative error 2^-22
        return power;
    }

    // The same bits whichever of the two comes first. An infinite `largest` isn't subtracted from itself.
    __device__ static __forceinline__ Part merged(const Part& a, const Part& b, float scale) {
        const float largest = fmaxf(a.largest, b.largest);
        const auto rescaled = [&](const Part& part) {
            // What adds nothing isn't rescaled: at an infinite temperature, whose scale is 0, the part of no rows would become NaN.
            return part.largest == largest || part.sum == 0.0f ? part.sum : part.sum * exp2_approximate(scale * (part.largest - largest));
        };
        return {largest, rescaled(a) + rescaled(b)};
    }

    // By a warp. NaN is no largest, but makes the sum NaN; where all are infinite, so are sum or logarithm.
    __device__ __forceinline__ Part of_cta(const Pass& pass, int request) const {
        const Logit* logits = reinterpret_cast<const Logit*>(staged_base(p, s, cta, pass, request));
        const auto value = [&](int row) { return TPW_ROUNDING == 2 ? static_cast<float>(logits[row]) : bf16_to_float(static_cast<bf16>(logits[row])); };
        Part part;
        for (int row = cta.lane; row < cta.rows; row += kWarpSize) part.largest = fmaxf(part.largest, value(row));
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) part.largest = fmaxf(part.largest, __shfl_xor_sync(kFullWarp, part.largest, distance));
        const float scale = log2_scale(pass.first_row + request);
        const float subtracted = fabsf(part.largest) == __int_as_float(0x7f800000) ? 0.0f : part.largest;
        for (int row = cta.lane; row < cta.rows; row += kWarpSize) part.sum += exp2_approximate(scale * (value(row) - subtracted));
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) part.sum += __shfl_xor_sync(kFullWarp, part.sum, distance);
        return part;
    }
};

__device__ TPW_SELDOM void contribute_lse(const WalkParams& p, unsigned char* shared_memory, const Pass pass) {
    LogSumExp(p, shared_memory).contribute(pass);
}

__device__ TPW_SELDOM bool combine_lse(const WalkParams& p, unsigned char* shared_memory, const Pass pass) {
    return LogSumExp(p, shared_memory).combine(pass);
}

__device__ TPW_SELDOM bool finish_lse(const WalkParams& p, unsigned char* shared_memory) {
    return LogSumExp(p, shared_memory).finish();
}

}  // namespace tpw

// Logits as output: this rank's columns go to this rank's memory or, with logits "full", to every rank's while the walk goes
// on. They are in shared memory already, in place of the base logits that they were made from.
//
// Where all rows lie on 16-byte pieces, one warp starts bulk copies into this rank's memory, which need no registers, and all service
// warps store into the peers': a bulk copy over NVLink holds its shared memory until the link has taken it, which for 16 requests lasts
// as long as a pass. Else they copy element by element. mailbox.cuh has the argument for the writes into peers' memory.
#pragma once

#include "cta.cuh"
#include "exchange.cuh"

namespace tpw {

// Where not all rows lie on 16-byte pieces.
__device__ TPW_SELDOM void copy_elements(const WalkParams& p, unsigned char* shared_memory, const Pass pass);

struct LogitsOutput {
    const WalkParams& p;
    const Smem& s;
    const Cta& cta;

    static constexpr int kTargets = kPeerLogits ? TPW_WORLD_SIZE : 1;

    // This warp starts the bulk copies; with one group of columns it also brings in the next base logits in the same places.
    __device__ __forceinline__ bool sends() const { return cta.warp == kServiceWarps - 1; }

    // Once the pass is multiplied.
    __device__ __forceinline__ void start(const Pass& pass) const {
        if (!sends() || !in_pieces()) return;
        fence_async_proxy();
        if (cta.lane < pass.requests && cta.rows > 0 && is_wanted(pass.first_row + cta.lane))
            bulk_store(target(0, pass, cta.lane), staged_base(p, s, cta, pass, cta.lane), cta.rows * sizeof(Logit));
        end_bulk_group();
    }

    // By all service warps, before the barrier after which the pass's buffer is filled again.
    __device__ __forceinline__ void copy(const Pass& pass) const {
        if (!p.logits[0]) return;
        if (!in_pieces())
            copy_elements(p, s.weights, pass);
        else if (kTargets > 1)
            copy_as<uint4>(pass, 1);
    }

    // By all service warps, at the end: a copy must not outlive its CTA, whose shared memory it reads.
    __device__ __forceinline__ void finish() const {
        if (sends()) await_bulk_stores();
    }

    // After `finish` of all service warps and a barrier: tells every rank that it has this CTA's columns.
    __device__ __forceinline__ void announce(const WalkExchange& exchange) const {
        if (!sends()) return;
        fence_system();
        if (cta.lane < TPW_WORLD_SIZE)
            store_word<Scope::sys>(columns_word(p.mailboxes[cta.lane], p.rank, cta.index), 0, logits_tag(exchange.block));
    }

    // By all service warps of CTA 0: waits until this rank's memory has the columns of all ranks. All have as many CTAs.
    __device__ __forceinline__ bool arrived(const WalkExchange& exchange) const {
        const u64 tag = logits_tag(exchange.block);
        for (int source = cta.warp; source < TPW_WORLD_SIZE; source += kServiceWarps) {
            if (source == p.rank) continue;  // the end of the kernel waits for these
            const char* words = columns_word(exchange.mailbox(), source, cta.lane);
            for (u32 polls = 1;; ++polls) {
                Word seen[kSlotsPerLane];
#pragma unroll
                for (int i = 0; i < kSlotsPerLane; ++i) seen[i] = load_word<Scope::sys>(words + i * kWarpSize * TPW_WORD_BYTES);
                u64 missing = tag;
#pragma unroll
                for (int i = 0; i < kSlotsPerLane; ++i)
                    if (i * kWarpSize + cta.lane < cta.count && seen[i].tag != tag) missing = seen[i].tag;
                if (__all_sync(kFullWarp, missing == tag)) break;
                if (polls % POLLS_PER_LOOK == 0 && exchange.gives_up(missing != tag, {TPW_WAIT_LOGITS, u32(source), 0, 0}, tag, missing)) return false;
            }
        }
        fence_system();
        return true;
    }

  private:
    friend void copy_elements(const WalkParams& p, unsigned char* shared_memory, const Pass pass);

    // Whole 16-byte pieces on both sides, whatever the row and step. (All ranks' memory lies alike.)
    __device__ __forceinline__ bool in_pieces() const {
        static_assert(!kLogits || sizeof(Logit) == sizeof(BaseLogit), "rows of both start at the same multiples of 16 bytes");
        const int64_t elements = p.base_stride_row | p.base_stride_step | p.logits_stride_row | p.logits_stride_step | cta.rows;
        const uint64_t bytes = reinterpret_cast<uint64_t>(p.base_logits) | reinterpret_cast<uint64_t>(p.logits[0]) | elements * sizeof(Logit);
        return p.logits[0] && bytes % 16 == 0;
    }

    // Into targets `first` and up. Of 16-byte pieces a warp has every kServiceWarps-th request, the first warp the last of them: of a single
    // request it has the token to look after. Single elements are all warps' together.
    template <typename Piece>
    __device__ __forceinline__ void copy_as(const Pass& pass, int first) const {
        constexpr bool kTogether = sizeof(Piece) == sizeof(Logit);
        const int pieces = cta.rows * static_cast<int>(sizeof(Logit)) / static_cast<int>(sizeof(Piece)), other_warp = kServiceWarps - 1 - cta.warp;
        for (int request = kTogether ? 0 : other_warp; request < pass.requests; request += kTogether ? 1 : kServiceWarps) {
            if (!is_wanted(pass.first_row + request)) continue;
            const Piece* staged = reinterpret_cast<const Piece*>(staged_base(p, s, cta, pass, request));
#pragma unroll 1
            for (int i = first; i < kTargets; ++i) {
                Piece* out = reinterpret_cast<Piece*>(target(i, pass, request));
#pragma unroll (kTogether ? 1 : 2)
                for (int piece = kTogether ? other_warp * kWarpSize + cta.lane : cta.lane; piece < pieces; piece += kTogether ? kServiceThreads : kWarpSize)
                    out[piece] = staged[piece];
            }
        }
    }

    __device__ __forceinline__ bool is_wanted(int row) const {
        return !p.logits_sampled_rows_only || (kSampled && s.rows[row].temperature > 0.0f);
    }

    // Where the CTA's first column of a request goes. Each rank begins with another, so that they don't all write to the same.
    __device__ __forceinline__ Logit* target(int i, const Pass& pass, int request) const {
        void* start = p.logits[kPeerLogits ? (p.rank + i) % TPW_WORLD_SIZE : 0];
        return static_cast<Logit*>(start) + (pass.first_row + request) * p.logits_stride_row + pass.step * p.logits_stride_step + cta.first_row;
    }
};

__device__ TPW_SELDOM void copy_elements(const WalkParams& p, unsigned char* shared_memory, const Pass pass) {
    LogitsOutput{p, Smem(shared_memory), Cta::of_service(p)}.copy_as<Logit>(pass, 0);
}

}  // namespace tpw

// Self-test of the path between two GPUs, with the production instructions: does a 16-byte store arrive whole, do stores
// to one place arrive in order, and how long is a hop?
//
// Both ranks run this kernel at once, one CTA each. Every lane exchanges `rounds` words with the same lane of the peer: in
// round n it stores pattern n into the peer's word [n & 1][lane], and waits for the peer's pattern n in its own; the place
// is reused two rounds on, as that of a result is. Until pattern n is there, each poll must find pattern n - 2 whole: a
// mixture is a torn word, anything else came out of order. Both directions travel at once, so two rounds are a round trip.
#include "watch.cuh"

namespace tpw {

enum PairCode : u32 { kPairTimeout = 1, kPairTorn = 2, kPairDisorder = 3 };

// Host half: pair_test.PairReport.
struct PairReport {
    u32 code;  // 0, or the PairCode of the first failure seen
    u32 lane;
    u32 round;
    u32 claimed;
    u64 key;  // the word that was seen
    u64 tag;
    u64 verified;  // patterns that arrived whole and in order
    u64 elapsed_ns;  // of lane 0, from round TPW_PAIR_WARM_UP on
    u64 elapsed_cycles;
};

static_assert(sizeof(PairReport) == TPW_PAIR_REPORT_BYTES && alignof(PairReport) == 8, "pair_test.PairReport differs");

// All 128 bits change from round to round, lane to lane and writer to writer; neither half is ever 0 like fresh memory.
__device__ __forceinline__ Word pattern(u32 round, u32 lane, u32 writer) {
    const u64 seed = u64(round) << 32 | lane << 1 | writer;
    return {mix64(seed), mix64(~seed)};
}

__device__ __forceinline__ bool equal(const Word& a, const Word& b) { return a.key == b.key && a.tag == b.tag; }

__device__ __forceinline__ void report_failure(PairReport* report, u32 code, u32 lane, u32 round, const Word& seen) {
    if (atomicExch(&report->claimed, 1u) != 0) return;
    report->code = code;
    report->lane = lane;
    report->round = round;
    report->key = seen.key;
    report->tag = seen.tag;
}

// Keeps the compiler from moving the computation of a word to where it is used.
__device__ __forceinline__ void pin(Word& word) { asm volatile("" : "+l"(word.key), "+l"(word.tag)); }

}  // namespace tpw

// own: this GPU's words [2][lanes], written by the peer. peer: the peer's, written by this GPU. Both zeroed. arrivals: the
// SM's clock at the end of each round of lane 0, [rounds]. writer: 0 on one rank, 1 on the other. lanes = blockDim.x.
extern "C" __global__ void __launch_bounds__(1024)
    pair_test(char* own, char* peer, tpw::PairReport* report, tpw::u32* arrivals, tpw::u32 rounds, tpw::u32 writer,
              tpw::u64 limit_ns) {
    using namespace tpw;
    const u32 lane = threadIdx.x;
    const u64 expiry = now_ns() + limit_ns;
    u64 began = 0, began_ns = 0;
    u64 verified = 0;
    Word sent = pattern(1, lane, writer);
    Word expected = pattern(1, lane, writer ^ 1);
    Word one_before{0, 0}, two_before{0, 0};
    for (u32 round = 1; round <= rounds; ++round) {
        const u32 place = ((round & 1) * blockDim.x + lane) * TPW_WORD_BYTES;
        store_word<Scope::sys>(peer + place, sent.key, sent.tag);
        // While the word travels, so that a round is a hop and nothing else.
        sent = pattern(round + 1, lane, writer);
        pin(sent);
        Word next = pattern(round + 1, lane, writer ^ 1);
        pin(next);
        for (u32 polls = 1;; ++polls) {
            const Word seen = load_word<Scope::sys>(own + place);
            if (equal(seen, expected)) break;
            if (!equal(seen, two_before)) {
                // Noted once, and then on, so that the peer isn't left waiting.
                const bool torn = seen.key == expected.key || seen.tag == expected.tag || seen.key == two_before.key ||
                                  seen.tag == two_before.tag;
                report_failure(report, torn ? kPairTorn : kPairDisorder, lane, round, seen);
            }
            if (polls % POLLS_PER_LOOK == 0 && now_ns() >= expiry) {
                report_failure(report, kPairTimeout, lane, round, seen);
                return;
            }
        }
        ++verified;
        two_before = one_before;
        one_before = expected;
        expected = next;
        if (lane == 0) {
            const u64 now = clock64();
            arrivals[round - 1] = u32(now);
            if (round == TPW_PAIR_WARM_UP) {
                began = now;
                began_ns = now_ns();
            }
        }
    }
    atomicAdd(&report->verified, verified);
    if (lane == 0) {
        report->elapsed_cycles = clock64() - began;
        report->elapsed_ns = now_ns() - began_ns;
    }
}

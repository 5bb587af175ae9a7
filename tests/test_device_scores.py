"""csrc/noise.cuh and csrc/candidate.cuh, run on the host: exact noise is the definition's, approximate noise is as near
as scores are told to be, and of two scores that are too near each other the exact ones decide.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from host_build import build, needs_compiler

from tp_walk import kernels
from tp_walk.noise import gumbel, random_bits

pytestmark = needs_compiler

HARNESS = """
// No header of the host: it would have other names for types.cuh's types.
extern "C" double log(double) noexcept;
extern "C" double log1p(double) noexcept;
template <typename T> inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> inline T max(T a, T b) { return a > b ? a : b; }
template <typename T> inline T fabs(T x) { return x < 0 ? -x : x; }
inline float fabsf(float x) { return fabs(x); }
inline float fmaxf(float a, float b) { return a > b ? a : b; }
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename To, typename From> inline To bits_of(From from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline int __double2hiint(double x) { return static_cast<int>(bits_of<unsigned long long>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(bits_of<unsigned long long>(x)); }
inline double __hiloint2double(int high, int low) {
    const auto upper = static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32;
    return bits_of<double>(upper | static_cast<unsigned>(low));
}
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
// A warp of one lane.
inline bool __any_sync(unsigned, bool value) { return value; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) { return value; }
inline unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int) { return value; }

// How far off each of the two binary logarithms is: between -1 and 1 of what PTX allows.
static float log_errors[2];
static int logs;
inline float approximate_log2_on_host(float x) {
    const double right = __builtin_log2(static_cast<double>(x)), error = log_errors[logs++ & 1] * 0x1p-22;
    return static_cast<float>(x > 0.5f && x < 2.0f ? right + error : right * (1.0 + error));
}

#include "noise.cuh"
#include "score.cuh"
namespace tpw {
struct RowState { unsigned key0, key1, slot, offset; float temperature; };
inline NoiseStream noise_stream(const RowState& row, int step) {
    return {row.key0, row.key1, row.slot, static_cast<uint32_t>(step), row.offset};
}
constexpr bool kCandidates = true;
}
#include "candidate.cuh"

using namespace tpw;

extern "C" {
float gumbel_error() { return kGumbelError; }
int id_bits() { return kCandidateIdBits; }
void exact(const unsigned* bits, int count, float* out) {
    for (int i = 0; i < count; ++i) out[i] = gumbel(bits[i]);
}
void approximate(const unsigned* bits, int count, float outer, float inner, float* out) {
    for (int i = 0; i < count; ++i) {
        // Below 1/16 there is one logarithm.
        logs = uniform(bits[i]) < 0.0625f, log_errors[0] = inner, log_errors[1] = outer;
        out[i] = approximate_gumbel(bits[i]);
    }
}
unsigned long long candidate(float score, unsigned id, unsigned short logit) {
    return make_candidate(ordered(score), id, logit);
}
unsigned id_of(unsigned long long candidate) { return candidate_id(candidate); }
float score_of(unsigned long long candidate) { return candidate_score(candidate); }
float threshold(float best) { return contest_threshold(best); }
float threshold_of_candidates(float best) { return candidate_threshold(best); }
float error_of(float score) { return score_error(score); }
unsigned long long settle(const RowState* row, int step, const unsigned long long* words, int count) {
    unsigned long long first = 0, second = 0;
    for (int i = 0; i < count; ++i) {
        second = max(second, min(first, words[i]));
        first = max(first, words[i]);
    }
    return Settle<1>{*row, step}(first, second, count, [&](int i) { return static_cast<uint64_t>(words[i]); });
}
float approximate_score(const RowState* row, int step, unsigned id, float logit) {
    log_errors[0] = log_errors[1] = 0.0f;
    const float4 noise = noise_stream(*row, step).approximate(id / 4);
    const float four[4] = {noise.x, noise.y, noise.z, noise.w};
    return __fmaf_rn(logit, 1.0f / row->temperature, four[id % 4]);
}
}
"""

RECIPROCAL = 'asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(reciprocal) : "d"(denominator));'
LOG2 = 'asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(x));'
NOISE = {
    RECIPROCAL: "reciprocal = 1.0f / static_cast<float>(denominator);",
    LOG2: "log2 = approximate_log2_on_host(x);",
}

WORD = ctypes.c_uint64


class RowState(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("key0", "key1", "slot", "offset")] + [
        ("temperature", ctypes.c_float)
    ]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    replaced = {"noise.cuh": NOISE, "candidate.cuh": {'#include "cta.cuh"\n': ""}}
    library = build(tmp_path_factory.mktemp("scores"), HARNESS, {}, ["-O2"], replaced)
    for name in ("gumbel_error", "score_of", "threshold", "threshold_of_candidates", "error_of", "approximate_score"):
        getattr(library, name).restype = ctypes.c_float
    library.candidate.restype = library.settle.restype = WORD
    library.candidate.argtypes = [ctypes.c_float, ctypes.c_uint32, ctypes.c_uint16]
    library.id_of.argtypes = library.score_of.argtypes = [WORD]
    for name in ("threshold", "threshold_of_candidates", "error_of"):
        getattr(library, name).argtypes = [ctypes.c_float]
    library.approximate_score.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_float]
    return library


def edges() -> Iterator[int]:
    """Where a branch ends: powers of two (1/16, 1/4, uniforms near 1), and where log_of changes its exponent."""
    yield from (1 << power for power in range(33))
    yield from ((1 << 32) - (1 << power) for power in range(32))
    yield from (round((1.0 - 2.0 / 3.0 * 2.0**-power) * 2**32) for power in range(32))


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    near = np.unique([edge + i for edge in edges() for i in range(-200, 201) if 0 <= edge + i < 1 << 32])
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 21)
    return np.concatenate([near, random]).astype(np.uint32)


def drawn(device: ctypes.CDLL, bits: np.ndarray, *errors: float) -> np.ndarray:
    """Exact noise, or (errors) approximate noise whose logarithms are so far off."""
    out = np.empty(len(bits), dtype=np.float32)
    call = device.approximate if errors else device.exact
    call(
        bits.ctypes.data_as(ctypes.c_void_p),
        len(bits),
        *map(ctypes.c_float, errors),
        out.ctypes.data_as(ctypes.c_void_p),
    )
    return out


def definition(bits: np.ndarray) -> np.ndarray:
    return gumbel(torch.from_numpy(bits.astype(np.int64))).numpy()


def test_exact_noise_is_the_definitions(device: ctypes.CDLL, bits: np.ndarray) -> None:
    np.testing.assert_array_equal(drawn(device, bits), definition(bits))


@pytest.mark.parametrize("outer", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("inner", [-1.0, 0.0, 1.0])
def test_approximate_noise_is_near(device: ctypes.CDLL, bits: np.ndarray, outer: float, inner: float) -> None:
    """However far off the GPU's logarithms are, within what is promised of them."""
    right, near = definition(bits), drawn(device, bits, outer, inner)
    finite = np.isfinite(right)
    assert np.array_equal(near[~finite], right[~finite])
    off = np.abs(near[finite].astype(np.float64) - right[finite])
    assert off.max() <= device.gumbel_error()
    assert (off > 0).any()


# ---- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [0.0, 1.5, -1.5, 3e38, -3e38, 1e-30, -1e-30, 23.75, float("inf"), -float("inf")])
def test_a_candidate_holds_its_parts(device: ctypes.CDLL, score: float) -> None:
    score = float(np.float32(score))
    for token in (0, 1, 151_935, (1 << 20) - 1):
        word = device.candidate(score, token, 0xBEEF)
        assert device.id_of(word) == token
        assert word & 0xFFFF == 0xBEEF
        found = device.score_of(word)
        if np.isinf(score):
            # A score that lost its last bits may be a number, or a NaN.
            assert not abs(found) < 3e38
        else:
            assert score - abs(score) * 2.0**-19 <= found <= score


def test_the_host_knows_how_many_ids_there_may_be(device: ctypes.CDLL) -> None:
    assert 1 << device.id_bits() == kernels.MAX_VOCAB_SIZE


def test_the_larger_score_and_then_the_smaller_id_wins(device: ctypes.CDLL) -> None:
    order = [(-3e38, 5), (-1.0, 5), (0.0, 7), (0.0, 6), (1.0, 9), (1.0, 8), (1.001, 1_000_000), (3e38, 3)]
    words = [device.candidate(*one, 0) for one in order]
    assert words == sorted(words)
    assert min(words) > 0, "0 is no contribution"


def test_whoever_is_below_the_threshold_has_the_smaller_exact_score(device: ctypes.CDLL) -> None:
    """What candidates have lost of their scores included: the best, and where they are compared the others."""

    def error(score: float) -> float:
        """Without the reserve: that of the noise, and five roundings."""
        return float(device.gumbel_error()) + 5 * 2.0**-24 * (abs(score) + 24.0)

    for best in (0.0, 1.0, -1.0, 24.0, 1e4, -1e4, 1e30):
        lowest_exact = best - error(best + abs(best) * 2.0**-19)
        candidate = device.threshold_of_candidates(best)
        for score in (device.threshold(best), candidate + abs(candidate) * 2.0**-19):
            assert score + error(score) <= lowest_exact
            assert device.error_of(score) > error(score)
    for threshold in (device.threshold, device.threshold_of_candidates):
        assert np.isnan(threshold(float("inf")))
        assert np.isnan(threshold(float("nan")))
        assert threshold(-float("inf")) == float("inf")


def bf16(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


def test_of_scores_too_near_each_other_the_exact_ones_decide(device: ctypes.CDLL) -> None:
    """Pairs of ids, and temperatures at which they score the same but for a few units in the last place."""
    rng = np.random.default_rng(5)
    key, offset, slot = 0x1234567_89ABCDEF, 3, 2
    noise = gumbel(random_bits(*(torch.tensor([word]) for word in (key, offset, slot)), 4, 0, 4000))[0].numpy()
    contested = misled = ties = 0
    for _ in range(3000):
        first, second = sorted(rng.choice(4000, 2, replace=False).tolist())
        logits = np.float32(rng.integers(1, 8, 2) / 2.0)
        gap = float(noise[second]) - float(noise[first])
        temperature = np.float32((float(logits[0]) - float(logits[1])) / gap) if gap else np.float32(0)
        if not 0.05 < temperature < 50.0:
            continue
        for _ in range(int(rng.integers(0, 4))):
            temperature = np.nextafter(temperature, np.float32(rng.choice([0.0, 100.0])))
        row = RowState(key & 0xFFFFFFFF, key >> 32, slot, offset, temperature)
        ids, words, exact = (first, second), [], []
        for token, logit in zip(ids, logits, strict=True):
            score = device.approximate_score(ctypes.byref(row), 4, token, logit)
            exact.append(np.float32(np.float32(logit / temperature) + noise[token]))
            assert abs(float(score) - float(exact[-1])) <= device.error_of(score)
            words.append(device.candidate(score, token, bf16(logit)))
        right = second if exact[1] > exact[0] else first
        given = (WORD * 2)(*words)
        assert device.id_of(device.settle(ctypes.byref(row), 4, given, 2)) == right
        contested += 1
        misled += device.id_of(max(words)) != right
        ties += exact[0] == exact[1]
    assert contested > 500
    assert misled > 20, "approximate scores alone would do"
    assert ties > 20


def test_a_greedy_rows_words_are_exact_already(device: ctypes.CDLL) -> None:
    row = RowState(1, 2, 3, 4, 0.0)
    words = (WORD * 3)(device.candidate(1.0, 9, bf16(1.0)), device.candidate(1.0, 8, bf16(1.0)), 0)
    assert device.id_of(device.settle(ctypes.byref(row), 0, words, 3)) == 8

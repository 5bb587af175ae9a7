"""A second opinion on the walk: numpy, float64 sums, one request and step at a time, sharing no code with tp_walk.

Problems have integer weights, so that every dot is exact in float32 too and any order of summation gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F32 = np.float32


@dataclass(frozen=True)
class Problem:
    """One walk's arguments as arrays; weights and base logits are bf16 values held as float32."""

    w1: np.ndarray
    w2: np.ndarray
    base: np.ndarray
    anchors: np.ndarray
    rounding: str
    d2t: np.ndarray | None
    temperatures: np.ndarray | None
    keys: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray | None


@dataclass(frozen=True)
class Answer:
    """lse: float64, exact but for its own rounding."""

    tokens: np.ndarray
    logits: np.ndarray
    lse: np.ndarray


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 → the nearest bf16, ties to even, as float32."""
    bits = np.ascontiguousarray(values, F32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)
    return np.where(np.isnan(values), F32(np.nan), rounded)


def make_problem(
    seed: int,
    *,
    vocab: int,
    rank: int,
    batch: int,
    gamma: int,
    rounding: str = "engine",
    draft: bool = False,
    sampled: bool = False,
    specials: bool = False,
) -> Problem:
    """specials: base logits with infinities, NaNs, signed zeros, many ties and whole rows of -inf."""
    rng = np.random.default_rng(seed)
    target = vocab + int(rng.integers(0, 50)) if draft else vocab
    base = to_bf16(rng.normal(0, 20, (batch, gamma, vocab)).astype(F32))
    if specials:
        base = np.where(rng.random(base.shape) < 0.5, base, to_bf16(np.round(base / 16) * 16))
        values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], F32)
        chosen = rng.random(base.shape) < rng.choice([0.0, 0.02, 0.5], (batch, gamma, 1))
        base = np.where(chosen, rng.choice(values, base.shape), base)
        base[rng.random((batch, gamma)) < 0.2] = -np.inf
    return Problem(
        w1=rng.integers(-8, 9, (target, rank)).astype(F32),
        w2=rng.integers(-8, 9, (vocab, rank)).astype(F32),
        base=base,
        anchors=rng.integers(0, target, batch),
        rounding=rounding,
        d2t=rng.permutation(target)[:vocab] if draft else None,
        temperatures=rng.choice([0.0, -1.0, np.nan, 1.0, 0.7, 1e-7, 30.0, np.inf], batch).astype(F32)
        if sampled
        else None,
        keys=rng.integers(-(2**63), 2**63, batch),
        offsets=rng.integers(0, 2**40, batch),
        rows=rng.integers(0, 2**34, batch) if rng.random() < 0.5 else None,
    )


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    x, y, z, w = counter
    k, l = key  # noqa: E741
    for _ in range(10):
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = b >> 32 ^ y ^ k, b % 2**32, a >> 32 ^ w ^ l, a % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32  # noqa: E741
    return [x, y, z, w]


def gumbel(problem: Problem, request: int, step: int) -> np.ndarray:
    """The noise of every id, float32."""
    row = request if problem.rows is None else int(problem.rows[request])
    key, offset = int(problem.keys[request]) % 2**64, int(problem.offsets[request])
    vocab = problem.base.shape[2]
    words: list[int] = []
    for group in range((vocab + 3) // 4):
        words += philox([group, row % 2**32, step, offset % 2**32], [key % 2**32, key >> 32])
    uniform = (np.array(words[:vocab]).astype(F32) + F32(0.5)) * F32(2.0**-32)
    with np.errstate(divide="ignore"):
        inner = (-np.log1p(-uniform.astype(np.float64))).astype(F32)
        return (-np.log(inner.astype(np.float64))).astype(F32)


def bf16_bias(problem: Problem, previous: int) -> np.ndarray:
    return (problem.w2.astype(np.float64) @ problem.w1[previous].astype(np.float64)).astype(F32)


def int8_bias(problem: Problem, previous: int) -> np.ndarray:
    """The bias of the integer definition, in Python-sized integers."""
    u, largest = problem.w1[previous], np.abs(problem.w1[previous]).max()
    u_scale = F32(largest) / F32(32512) if largest else F32(1)
    t = np.rint(u / u_scale).astype(np.int64)
    high = np.floor_divide(t + 128, 256)
    low = t - 256 * high
    largest_of_row = np.abs(problem.w2).max(axis=1)
    scales = np.where(largest_of_row == 0, F32(1), largest_of_row / F32(127)).astype(F32)
    q = np.rint(problem.w2 / scales[:, None]).astype(np.int64)
    assert np.abs(high).max() <= 127
    assert np.abs(q).max() <= 127
    acc = 256 * (q @ high) + q @ low
    return acc.astype(F32) * u_scale * scales


def pick(scores: np.ndarray) -> int:
    """The first NaN, else the first of the largest."""
    nans = np.flatnonzero(np.isnan(scores))
    return int(nans[0]) if len(nans) else int(np.flatnonzero(scores == scores.max())[0])


def solve(problem: Problem, int8: bool = False) -> Answer:
    batch, gamma, vocab = problem.base.shape
    tokens, lse = np.zeros((batch, gamma), np.int64), np.zeros((batch, gamma))
    logits = np.zeros((batch, gamma, vocab), F32)
    for request in range(batch):
        previous = int(problem.anchors[request])
        temperature = F32(0) if problem.temperatures is None else problem.temperatures[request]
        for step in range(gamma):
            bias = int8_bias(problem, previous) if int8 else bf16_bias(problem, previous)
            if problem.rounding != "once":
                bias = to_bf16(bias)
            total = problem.base[request, step] + bias
            value = total if problem.rounding == "none" else to_bf16(total)
            logits[request, step] = value
            divisor = max(temperature, F32(1e-5)) if temperature > 0 else F32(1)
            with np.errstate(invalid="ignore"):
                lse[request, step] = np.logaddexp.reduce(value.astype(np.float64) / np.float64(divisor))
                score = value / divisor + gumbel(problem, request, step) if temperature > 0 else value
            drafted = pick(score)
            previous = drafted if problem.d2t is None else int(problem.d2t[drafted])
            tokens[request, step] = previous
    return Answer(tokens, logits, lse)

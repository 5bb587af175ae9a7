"""Sampling in the kernels: the definition's draws, the softmax's frequencies, and logits that a verifier can trust."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from agreement import check_problem
from rank_pool import RankPool
from walk_lab import (
    PLANS_AND_WORLDS,
    QWEN3,
    RANDOM_SEEDS,
    SMALL,
    WORLDS,
    assert_same,
    definition,
    generator_of,
    here,
    lab,
    plans_of,
    random_problem,
)

from tp_walk import MarkovHead, Noise, WalkOutput, WalkRuntime
from tp_walk.noise import gumbel, random_bits
from tp_walk.reference import MIN_TEMPERATURE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---- the definition's draws ------------------------------------------------------------------------------------------


def _agrees_with_the_oracle(plan: str, world: int) -> int:
    """Ties, NaNs, infinities, draft vocabularies, keys and offsets of their own: seeds choose."""
    rank, ranks, device = here()
    seeds = RANDOM_SEEDS[rank::ranks] if world == 1 else RANDOM_SEEDS
    for seed in seeds:
        problem = random_problem(seed)
        check_problem(problem, plan, device, ["full", "sharded"][seed % 2], alone=world == 1)
    return len(seeds)


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
def test_random_problems_agree_with_the_oracle(ranks: RankPool, world: int, plan: str) -> None:
    assert sum(ranks(_agrees_with_the_oracle, plan, world)) >= 12


def _draws_by_key_and_offset(world: int) -> None:
    here_is = lab("exact", SMALL, world)
    given, device = here_is.inputs, here_is.device
    batch, gamma = 9, 5
    keys = torch.arange(batch, device=device) * 0x1234_5678_9ABC - 5
    for plan in plans_of(world):
        for noise in (
            Noise(3, (1 << 32) + 7),
            Noise(0xFEDC_BA98_7654_3210, (1 << 63) + 1),
            Noise(-1, -1),
            Noise(keys, 9, keys * 3),
            Noise(torch.tensor([77], device=device), torch.tensor([(1 << 33) + 2], device=device)),
            Noise(keys, torch.arange(batch, device=device) * ((1 << 31) + 3)),
        ):
            walked = []
            for runtime, name in ((here_is.runtime, plan), (here_is.alone.runtime, definition(plan))):
                offset = noise.offset.clone() if isinstance(noise.offset, torch.Tensor) else noise.offset
                own = Noise(noise.key, offset, noise.rows)
                arguments = given.base[:batch, :gamma], given.anchors[:batch], given.temperatures[:batch]
                walked.append(runtime.walk(*arguments, own, name).tokens)
                if isinstance(offset, torch.Tensor):
                    assert (offset - noise.offset == 1).all(), (name, offset)
            assert_same(walked[0], walked[1], (plan, noise))


@pytest.mark.parametrize("world", WORLDS)
def test_keys_and_offsets_of_64_bits_and_of_each_row(ranks: RankPool, world: int) -> None:
    ranks(_draws_by_key_and_offset, world)


def _draws_among_equals(world: int) -> None:
    """Thousands of equal logits, so that noise alone decides, at temperatures where its last bits do."""
    _, _, device = here()
    generator = generator_of(3)
    zeros = torch.zeros(4099, 256, dtype=torch.bfloat16, device=device)
    base = torch.randint(0, 2, (64, 16, 4099), device=device, generator=generator).bfloat16()
    base[:, ::3] = 0.0
    anchors = torch.zeros(64, dtype=torch.int64, device=device)
    kinds = torch.tensor([1e-7, 1e-5, 1e-3, 0.02, 1.0, 30.0, math.inf, 0.0], device=device)
    temperatures = kinds.repeat(8)
    group = dist.group.WORLD if world > 1 else None
    weights = MarkovHead(zeros, zeros)
    with (
        WalkRuntime(weights, device=device, plans=["reference"]) as alone,
        WalkRuntime(weights, group=group, device=device, plans=plans_of(world)) as runtime,
    ):
        for offset in range(6):
            right = alone.walk(base, anchors, temperatures, Noise(4, offset), "reference").tokens
            for plan in plans_of(world):  # without a bias they are the same walk
                got = runtime.walk(base, anchors, temperatures, Noise(4, offset), plan).tokens
                assert_same(got, right, (plan, offset))


@pytest.mark.parametrize("world", WORLDS)
def test_equal_logits_and_low_temperatures(ranks: RankPool, world: int) -> None:
    ranks(_draws_among_equals, world)


# ---- what is reported is what was drawn from -------------------------------------------------------------------------


def _rederives(vocab_size: int, world: int, plan: str) -> None:
    """The tokens again, from the reported logits and the noise alone."""
    here_is = lab("gauss", vocab_size, world)
    batch, gamma = 9, 7
    out = here_is.walk(batch, gamma, plan, sampled=True, logits="full")
    assert out.logits is not None
    temperatures = here_is.inputs.temperatures[:batch]
    sampled = temperatures > 0
    divisors = torch.where(sampled, temperatures.clamp(min=MIN_TEMPERATURE), 1.0)
    key, offset = torch.full((2, batch), 5, device=here_is.device), torch.zeros(batch, dtype=torch.int64)
    rows = torch.arange(batch, device=here_is.device)
    for step in range(gamma):
        value = out.logits[:, step].float()
        noise = gumbel(random_bits(key[0], offset.to(here_is.device), rows, step, 0, vocab_size))
        score = torch.where(sampled[:, None], value / divisors[:, None] + noise, value)
        assert_same(out.tokens[:, step], score.argmax(dim=1), (plan, step))


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3])
def test_tokens_follow_from_logits_and_noise(ranks: RankPool, world: int, vocab_size: int, plan: str) -> None:
    ranks(_rederives, vocab_size, world, plan)


def _writes_only_sampled_rows(world: int) -> None:
    here_is = lab("exact", SMALL, world)
    batch, gamma = 9, 5
    sampled = here_is.inputs.temperatures[:batch] > 0
    for plan in plans_of(world):
        for mode in ("local", "full"):
            whole = here_is.walk(batch, gamma, plan, sampled=True, logits=mode)
            untouched = here_is.runtime.logits_buffer(batch, gamma, mode).fill_(5.0)
            out = WalkOutput(torch.empty_like(whole.tokens), untouched)
            here_is.walk(batch, gamma, plan, sampled=True, logits=mode, logits_rows="sampled", out=out)
            assert whole.logits is not None
            assert_same(untouched[sampled], whole.logits[sampled], (plan, mode))
            assert (untouched[~sampled] == 5.0).all(), (plan, mode)
            assert_same(out.tokens, whole.tokens, (plan, mode))


@pytest.mark.parametrize("world", WORLDS)
def test_logits_of_sampled_rows_only(ranks: RankPool, world: int) -> None:
    ranks(_writes_only_sampled_rows, world)


# ---- frequencies -----------------------------------------------------------------------------------------------------


def _excess(counts: torch.Tensor, expected: torch.Tensor, totals: int = 1) -> float:
    """Pearson's chi-square in standard deviations above its mean. Rare cells count as one. totals: sums that agree by
    construction.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten()
    rare = expected < 10.0
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    if expected[-1] == 0.0:
        assert counts[-1] == 0.0, "ids were drawn that can't be"
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(expected) - totals
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2.0 * freedom))


CHANCE = 5.0


def _frequencies(plan: str, world: int) -> dict[str, float]:
    """204,800 draws from one distribution: every request and step has the same logits."""
    _, _, device = here()
    generator = generator_of(7)
    vocab_size, classes, temperature = 197, 8, 0.8
    w1 = torch.randn(1, 256, device=device, generator=generator).repeat(vocab_size, 1).bfloat16()
    w2 = torch.randn(vocab_size, 256, device=device, generator=generator).mul_(0.06).bfloat16()
    base = torch.randn(vocab_size, device=device, generator=generator).bfloat16().repeat(64, 16, 1)
    anchors = torch.zeros(64, dtype=torch.int64, device=device)
    temperatures = torch.full((64,), temperature, device=device)
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
    steps, rows = (torch.zeros(classes, classes, dtype=torch.int64, device=device) for _ in range(2))
    one = torch.ones((), dtype=torch.int64, device=device)
    group = dist.group.WORLD if world > 1 else None
    with WalkRuntime(MarkovHead(w1, w2), group=group, device=device, plans=[plan]) as runtime:
        logits = runtime.walk(base, anchors, temperatures, Noise(21, 0), plan, logits="full").logits
        assert logits is not None
        assert (logits == logits[0, 0]).all()
        for _ in range(200):
            tokens = runtime.walk(base, anchors, temperatures, Noise(21, offset), plan).tokens
            counts.index_put_((tokens,), one, accumulate=True)
            kinds = tokens % classes
            steps.index_put_((kinds[:, :-1], kinds[:, 1:]), one, accumulate=True)
            rows.index_put_((kinds[:-1], kinds[1:]), one, accumulate=True)
        runtime.check()
    assert int(offset) == 200
    scaled = logits[0, 0].double() / temperature
    right, wrong = scaled.softmax(0), (scaled * 0.97).softmax(0)
    by_class = torch.zeros(classes, dtype=torch.float64, device=device)
    by_class.index_put_((torch.arange(vocab_size, device=device) % classes,), right, accumulate=True)
    return {
        "softmax": _excess(counts, right * counts.sum()),
        "other softmax": _excess(counts, wrong * counts.sum()),
        "steps": _excess(steps, by_class.outer(by_class) * steps.sum()),
        "rows": _excess(rows, by_class.outer(by_class) * rows.sum()),
    }


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
def test_frequencies_are_the_softmaxs(ranks: RankPool, plan: str, world: int) -> None:
    for excess in ranks(_frequencies, plan, world):
        assert excess["softmax"] < CHANCE
        assert excess["steps"] < CHANCE, "a step's draw tells something of the next one's"
        assert excess["rows"] < CHANCE, "a request's draw tells something of its neighbour's"
        assert excess["other softmax"] > CHANCE, "the test can't tell a temperature 3 % off"


# ---- lossless --------------------------------------------------------------------------------------------------------


def _speculates(plan: str, world: int, true_q: bool) -> float:
    """Standard rejection sampling of a Markov chain with drafts of the walk; the excess of the chain's transitions."""
    _, _, device = here()
    generator = generator_of(11)
    vocab_size, batch, gamma, blocks = 16, 64, 3, 2000
    chain = torch.randn(vocab_size, vocab_size, dtype=torch.float64, device=device, generator=generator).softmax(1)
    w1, w2 = (torch.randn(vocab_size, 256, device=device, generator=generator).mul_(0.2).bfloat16() for _ in range(2))
    base = torch.randn(batch, gamma, vocab_size, device=device, generator=generator).bfloat16()
    temperatures = torch.where(torch.arange(batch, device=device) % 2 == 0, 1.0, 0.6)
    claimed = temperatures if true_q else temperatures * 1.25
    anchors = torch.arange(batch, device=device) % vocab_size
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.int64, device=device)
    every = torch.arange(batch, device=device)
    group = dist.group.WORLD if world > 1 else None
    with WalkRuntime(MarkovHead(w1, w2), group=group, device=device, plans=[plan]) as runtime:
        for _ in range(blocks):
            out = runtime.walk(base, anchors, temperatures, Noise(31, offset), plan, logits="full")
            assert out.logits is not None
            q = (out.logits.double() / claimed[:, None, None]).softmax(-1)
            previous = torch.cat([anchors[:, None], out.tokens[:, :-1]], dim=1)
            p = chain[previous]
            ratio = (p / q).gather(-1, out.tokens[..., None])[..., 0]
            accepted = (torch.rand(ratio.shape, device=device, generator=generator) < ratio).long().cumprod(1)
            length = accepted.sum(1)
            stopped = length.clamp(max=gamma - 1)
            residual = (p - q)[every, stopped].clamp(min=0.0)
            whole = length == gamma
            last = torch.where(whole, out.tokens[:, -1], previous[every, stopped])
            final = torch.where(whole[:, None], chain[last], residual)
            anchors = torch.multinomial(final, 1, generator=generator)[:, 0]
            counts.index_put_((previous, out.tokens), accepted, accumulate=True)
            counts.index_put_((last, anchors), torch.ones_like(last), accumulate=True)
        runtime.check()
    assert counts.sum() > 200_000
    return _excess(counts, chain * counts.sum(1, keepdim=True), totals=vocab_size)


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
def test_rejection_sampling_with_these_drafts_loses_nothing(ranks: RankPool, plan: str, world: int) -> None:
    assert max(ranks(_speculates, plan, world, True)) < CHANCE


def test_a_wrong_q_is_noticed(ranks: RankPool) -> None:
    assert min(ranks(_speculates, "tp_bf16", 1, False)) > CHANCE

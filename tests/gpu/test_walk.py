"""The walk kernels against the definitions: golden cases, exact and Gaussian weights, and bits that nothing changes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from golden import cases_for, load_check
from rank_pool import RankPool
from walk_lab import (
    BATCHES,
    PLANS,
    PLANS_AND_WORLDS,
    QWEN3,
    QWEN35,
    SMALL,
    WORLDS,
    assert_same,
    definition,
    generator_of,
    here,
    lab,
    plans_of,
    two_gpus,
)

from tp_walk import MarkovHead, Noise, WalkRuntime
from tp_walk.quantize import quantize_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---- golden cases ----------------------------------------------------------------------------------------------------


def golden_faults(folder: Path, plan: str, layout: str, world: int) -> dict[str, str]:
    rank, ranks, device = here()
    check = load_check(folder)
    arguments = SimpleNamespace(plan=plan, layout=layout, tokens_only=False)
    cases = cases_for(folder, definition(plan))
    if world == 1:
        rank, cases = 0, cases[rank::ranks]
    os.environ["TP_WALK_PLAN"] = plan  # or each runtime would set up all of them
    try:
        found = {path.name: check.run_case(str(path), arguments, device, rank, world) for path in cases}
    finally:
        del os.environ["TP_WALK_PLAN"]
    assert found
    return {name: fault for name, fault in found.items() if fault}


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_golden_cases(ranks: RankPool, cases_dir: Path, world: int, layout: str, plan: str) -> None:
    assert ranks(golden_faults, cases_dir, plan, layout, world) == [{}] * len(ranks.processes)


# ---- exact weights ---------------------------------------------------------------------------------------------------


def _walks_exactly(vocab_size: int, world: int, sampled: bool) -> None:
    here_is = lab("exact", vocab_size, world)
    for plan in plans_of(world):
        right = here_is.right(plan, sampled)
        for layout in ("full", "sharded"):
            for gamma in (7, 16):
                for batch in BATCHES:
                    what = plan, layout, f"gamma {gamma}", f"batch {batch}"
                    tokens = here_is.walk(batch, gamma, plan, sampled=sampled, layout=layout).tokens
                    assert_same(tokens, right[:batch, :gamma], what)
    here_is.runtime.check()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3, QWEN35])
@pytest.mark.parametrize("world", WORLDS)
def test_exact_weights_give_the_definitions_tokens(ranks: RankPool, world: int, vocab_size: int, sampled: bool) -> None:
    ranks(_walks_exactly, vocab_size, world, sampled)


def _reports_exactly(vocab_size: int, world: int, sampled: bool) -> None:
    here_is = lab("exact", vocab_size, world)
    for plan in plans_of(world):
        right = here_is.alone.walk(9, 7, definition(plan), sampled=sampled, logits="local").logits
        assert right is not None
        assert_same(here_is.walk(9, 7, plan, sampled=sampled, logits="full").logits, right, (plan, "full"))
        local = here_is.walk(9, 7, plan, sampled=sampled, logits="local", layout="sharded").logits
        assert_same(local, here_is.columns(right), (plan, "local"))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3])
@pytest.mark.parametrize("world", WORLDS)
def test_exact_weights_give_the_definitions_logits(ranks: RankPool, world: int, vocab_size: int, sampled: bool) -> None:
    ranks(_reports_exactly, vocab_size, world, sampled)


def _sums_log_exactly(world: int) -> None:
    here_is = lab("exact", SMALL, world)
    for plan in plans_of(world):
        for sampled in (False, True):
            right = here_is.alone.walk(9, 7, definition(plan), sampled=sampled, lse=True).lse
            got = here_is.walk(9, 7, plan, sampled=sampled, lse=True).lse
            torch.testing.assert_close(got, right, rtol=2**-23, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_log_sum_exps_are_the_definitions(ranks: RankPool, world: int) -> None:
    ranks(_sums_log_exactly, world)


# ---- Gaussian weights ------------------------------------------------------------------------------------------------


def _ulp(values: torch.Tensor) -> torch.Tensor:
    """Of the bf16 numbers around float64 values."""
    exponent = torch.frexp(values).exponent - 1
    return torch.ldexp(torch.ones_like(values), exponent - 7)


def _is_nearly_best_at_each_step(vocab_size: int, world: int) -> float:
    """Re-scores each step in float64, from the kernel's own previous token; the share of steps that took the best."""
    here_is = lab("gauss", vocab_size, world)
    batch, gamma = 16, 7
    tokens = here_is.walk(batch, gamma, "tp_bf16").tokens
    previous = torch.cat([here_is.inputs.anchors[:batch, None], tokens[:, :-1]], dim=1)
    w2 = here_is.head.w2_rows(0, vocab_size).double()
    took_best = 0
    for step in range(gamma):
        bias = here_is.head.w1[previous[:, step]].double() @ w2.T
        sums = here_is.inputs.base[:batch, step].double() + bias
        chosen, best = tokens[:, step, None], sums.argmax(dim=1, keepdim=True)
        pair = torch.cat([chosen, best], dim=1)
        allowed = _ulp(bias.gather(1, pair)).amax(1) + _ulp(sums.gather(1, pair)).amax(1)
        lack = (sums.gather(1, best) - sums.gather(1, chosen))[:, 0]
        # The excess is for fp32 accumulation, which the two roundings don't count.
        assert (lack <= allowed * (1 + 2**-8)).all(), (step, lack.max().item())
        took_best += int((chosen == best).sum())
    return took_best / (batch * gamma)


@pytest.mark.parametrize("vocab_size", [QWEN3, QWEN35])
@pytest.mark.parametrize("world", WORLDS)
def test_gaussian_weights_give_tokens_within_rounding_of_the_best(ranks: RankPool, world: int, vocab_size: int) -> None:
    for share in ranks(_is_nearly_best_at_each_step, vocab_size, world):
        assert share > 0.5, "rounding decides some steps, not most"


# ---- bits that nothing changes ---------------------------------------------------------------------------------------


def _same_bits_in_every_batch_and_slot(vocab_size: int, world: int, plan: str) -> None:
    """Against one walk of the largest batch: smaller ones, and other slots with the rows' own noise."""
    here_is = lab("gauss", vocab_size, world)
    given, gamma = here_is.inputs, 7
    whole = here_is.walk(64, gamma, plan, sampled=True, logits="local")
    for batch in BATCHES[:-1]:
        order = torch.randperm(64, device=here_is.device, generator=generator_of(batch))[:batch]
        for rows, noise in (
            (torch.arange(batch, device=here_is.device), Noise(5, 0)),
            (order, Noise(5, 0, order)),
        ):
            out = here_is.runtime.walk(
                given.base[rows, :gamma], given.anchors[rows], given.temperatures[rows], noise, plan, logits="local"
            )
            assert_same(out.tokens, whole.tokens[rows], (plan, batch, noise.rows is None))
            assert_same(out.logits, whole.logits[rows], (plan, batch, noise.rows is None))
    # Tokens alone have kernels of their own.
    for batch in (49, 64):
        reported = here_is.walk(batch, gamma, plan, logits="local").tokens
        assert_same(here_is.walk(batch, gamma, plan).tokens, reported, (plan, batch, "greedy"))


@pytest.mark.parametrize(("plan", "world"), PLANS_AND_WORLDS)
@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3])
def test_batch_and_slot_change_no_bit(ranks: RankPool, world: int, vocab_size: int, plan: str) -> None:
    ranks(_same_bits_in_every_batch_and_slot, vocab_size, world, plan)


def _same_bits_in_every_world(vocab_size: int) -> None:
    together = lab("gauss", vocab_size, 2)
    for batch, gamma in ((1, 16), (8, 7), (64, 7)):
        for sampled in (False, True):
            walked = together.walk(batch, gamma, "tp_bf16", sampled=sampled, logits="local", layout="sharded")
            alone = together.alone.walk(batch, gamma, "tp_bf16", sampled=sampled, logits="local")
            assert alone.logits is not None
            assert_same(walked.tokens, alone.tokens, (batch, sampled, "tokens"))
            assert_same(walked.logits, together.columns(alone.logits), (batch, sampled, "logits"))


@two_gpus
@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3, QWEN35])
def test_world_size_changes_no_bit(ranks: RankPool, vocab_size: int) -> None:
    ranks(_same_bits_in_every_world, vocab_size)


def _odd_shards() -> None:
    """Shards as an engine may have them: uneven, not a multiple of a tile, empty."""
    rank, _, device = here()
    alone = lab("exact", SMALL, 1)
    given = alone.inputs
    for split in (4, SMALL // 8 * 4, (SMALL - 1) // 4 * 4, 0):
        shard = [(0, split), (split, SMALL)][rank]
        with WalkRuntime(
            alone.head, 8, 16, group=dist.group.WORLD, device=device, shard=shard, plans=["tp_bf16"]
        ) as runtime:
            for batch in (1, 8):
                own = given.base[:batch, :, shard[0] : shard[1]].contiguous()
                rows = own, given.anchors[:batch], given.temperatures[:batch]
                out = runtime.walk(*rows, Noise(5, 0), "tp_bf16", logits="local")
                runtime.check()
                right = alone.walk(batch, 16, "reference", sampled=True, logits="full")
                assert right.logits is not None
                assert_same(out.tokens, right.tokens, (split, batch))
                assert_same(out.logits, right.logits[..., shard[0] : shard[1]], (split, batch))


@two_gpus
def test_uneven_and_empty_shards(ranks: RankPool) -> None:
    ranks(_odd_shards)


# ---- int8 ------------------------------------------------------------------------------------------------------------


def _awkward_rows(rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """`[rows, 256]` bf16 on which quantisation and scales go wrong, if they can: kinds of rows take turns."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float) -> torch.Tensor:
        return torch.randn(256, generator=generator) * scale

    def ties() -> torch.Tensor:
        row = torch.randint(-127, 127, (256,), generator=generator) + 0.5  # half-way between two of 127 levels
        row[0] = 127.0
        return row

    def one_huge() -> torch.Tensor:
        row = random(1.0)
        row[int(torch.randint(256, (1,), generator=generator))] = 3e38
        return row

    kinds = (
        lambda: random(1.0),
        lambda: torch.zeros(256),
        one_huge,
        lambda: random(1e-39),  # denormal, in bf16 and in fp32
        lambda: torch.full((256,), 9.1835e-41),  # the smallest
        lambda: torch.where(random(1.0) > 0, 3.3895e38, -3.3895e38),  # ± the largest
        lambda: torch.where(random(1.0) > 0, 1.0, -1.0),
        ties,
        lambda: -torch.zeros(256),
        lambda: random(1e-20),
    )
    return torch.stack([kinds[i % len(kinds)]() for i in range(rows)]).bfloat16().to(device)


def _int8_is_exact(seed: int) -> None:
    rank, _, device = here()
    vocab_size = 1000 + 7 * seed
    seed = 2 * seed + rank
    w1, w2 = _awkward_rows(vocab_size, seed, device), _awkward_rows(vocab_size, 100 + seed, device)
    for table in (w1, w2):
        for got, right in zip(quantize_rows(table), quantize_rows(table.cpu()), strict=True):
            assert_same(got.cpu(), right, "quantisation")
    generator = torch.Generator(device).manual_seed(seed)
    # Flat, so that biases decide; every request starts from another kind of row.
    base = torch.empty(16, 16, vocab_size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    anchors = torch.arange(16, device=device)
    with WalkRuntime(MarkovHead(w1, w2), device=device, plans=["int8"]) as runtime:
        for temperatures, noise in ((None, None), (torch.full((16,), 1.0, device=device), Noise(seed, 0))):
            got = runtime.walk(base, anchors, temperatures, noise, "int8", logits="full")
            right = runtime.walk(base, anchors, temperatures, noise, "reference_int8", logits="full")
            assert right.logits is not None
            assert_same(got.tokens, right.tokens, seed)
            # NaNs are NaNs, whatever their bits.
            assert got.logits is not None
            torch.testing.assert_close(got.logits, right.logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_int8_is_its_definition_on_awkward_weights(ranks: RankPool, seed: int) -> None:
    ranks(_int8_is_exact, seed)


def _equal_values_go_to_the_smallest_id(plan: str) -> None:
    """Two rows of one lane, in different places of a CTA: registers and shared memory, at every distance of tiles."""
    _, _, device = here()
    gamma = 4
    zero = torch.zeros(QWEN3, 256, dtype=torch.bfloat16, device=device)
    with WalkRuntime(MarkovHead(zero, zero), device=device, plans=[plan]) as runtime:
        for temperatures, noise in ((None, None), (torch.zeros(1, device=device), Noise(1, 0))):
            for first_slot in range(8):
                base = torch.zeros(1, gamma, QWEN3, dtype=torch.bfloat16, device=device)
                first = 16 * 8 * first_slot  # tile 8 * slot of CTA 0 is its warp 0's
                for step in range(gamma):
                    base[0, step, first] = base[0, step, first + 16 * 8 * (step + 1)] = 5.0
                out = runtime.walk(base, torch.zeros(1, dtype=torch.int64, device=device), temperatures, noise, plan)
                assert out.tokens.tolist() == [[first] * gamma], (plan, first_slot, temperatures)


@pytest.mark.parametrize("plan", PLANS)
def test_equal_values_go_to_the_smallest_id_wherever_rows_lie(ranks: RankPool, plan: str) -> None:
    ranks(_equal_values_go_to_the_smallest_id, plan)

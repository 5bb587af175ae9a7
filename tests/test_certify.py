"""Plan `certified` against the definition, on inputs that try to fool its certificate; and proof that they can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_cases import faults

import tp_walk
from tp_walk import certify
from tp_walk.certified_reference import CertifiedReference
from tp_walk.certify import NOTHING, TOP, from_ordered, keep_best, limit
from tp_walk.plan import EXECUTORS
from tp_walk.reference import ordered

V, R, BATCH, GAMMA = 203, 16, 6, 5
ROUNDINGS = ("engine", "once", "none")
TEMPERATURES = torch.tensor([1.0, 0.0, 0.3, 30.0, 1e-6, float("nan")])


# ---- inputs ----------------------------------------------------------------------------------------------------------


def flat(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    base.fill_(2.0)


def one_huge_bias(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    w2[150] = 64.0


def many_equal(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    base.div_(8).round_()


def ties(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """The last ids, which are kept, reach what the dots give the first ones, which are not."""
    base.zero_()[:, :, -10:] = 1.0
    w1.fill_(1.0)
    w2.zero_()[:50, 0] = 1.0


def specials(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3.3e38, -3.3e38])
    chosen = torch.rand(base.shape) < torch.tensor([0.0, 0.01, 0.6]).repeat(2)[:, None, None]
    base.copy_(torch.where(chosen, values[torch.randint(len(values), base.shape)], base))
    base[0, 1] = float("-inf")


def masked(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    base[torch.rand(base.shape) < 0.97] = -1e9


def masked_away(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    base[torch.rand(base.shape) < 0.97] = float("-inf")


def one_bad_request(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    base[:, :, ::9] += 40.0
    base[2] = 0.0


def unbounded_dots(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    w2[7], w2[9], w2[11] = float("inf"), float("nan"), 3e38


def rounded_up(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """Where a bf16 is coarse: what is added to the first ids, which aren't kept, is doubled by rounding."""
    base.fill_(-302.0)[:, :, -10:] = -300.0
    w1.fill_(1.0)
    w2.zero_()[:50, 0] = 1.0078125


def as_they_come(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    pass


Spoiler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
SPOILERS: tuple[Spoiler, ...] = (
    as_they_come,
    flat,
    one_huge_bias,
    many_equal,
    ties,
    specials,
    masked,
    masked_away,
    one_bad_request,
    unbounded_dots,
    rounded_up,
)


def walks_apart(
    spoil: Spoiler, seed: int, rounding: tp_walk.config.Rounding, sampled: bool, draft: bool = False, length: int = 12
) -> tuple[int, dict[str, int]]:
    """How many tokens of plan `certified` aren't the definition's, alone or as one of a world; and its counts."""
    torch.manual_seed(seed)
    w1, w2 = (torch.randint(-4, 5, (V, R)).float() / 8 for _ in range(2))
    base = torch.randn(BATCH, GAMMA, V) * 8
    spoil(base, w1, w2)
    d2t = torch.randperm(V) if draft else None
    temperatures = TEMPERATURES if sampled else None
    patch = pytest.MonkeyPatch()
    patch.setitem(EXECUTORS, "certified", lambda context: CertifiedReference(context, length))
    head = tp_walk.MarkovHead(w1.bfloat16(), w2.bfloat16(), d2t)
    group = dist.group.WORLD if dist.is_initialized() else None
    arguments = (
        base.bfloat16(),
        torch.randint(V, (BATCH,)),
        temperatures,
        tp_walk.Noise(seed, 3) if sampled else None,
    )
    with tp_walk.WalkRuntime(head, BATCH, GAMMA, rounding, group, "cpu") as runtime:
        right, got = (runtime.walk(*arguments, plan=plan).tokens for plan in ("reference", "certified"))
        counts = runtime.stats()["counts"]["certified"]
    patch.undo()
    return int((right != got).sum()), counts


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", SPOILERS)
def test_nothing_fools_the_certificate(spoil: Spoiler) -> None:
    for seed, rounding, sampled in itertools.product(range(2), ROUNDINGS, (False, True)):
        wrong, counts = walks_apart(spoil, seed, rounding, sampled, draft=seed == 1)
        assert wrong == 0, (seed, rounding, sampled, counts)


def apart_in_a_world() -> int:
    return sum(
        walks_apart(spoil, 1, "engine", sampled)[0] for spoil, sampled in itertools.product(SPOILERS, (False, True))
    )


@pytest.mark.parametrize("world", [2, 3])
def test_nothing_fools_several_ranks(world: int, rank_pool) -> None:
    assert rank_pool(world)(apart_in_a_world) == [0] * world


def counted(spoil: Spoiler, sampled: bool) -> dict[str, int]:
    return walks_apart(spoil, 1, "engine", sampled)[1]


def test_one_bad_request_falls_back_alone() -> None:
    assert counted(one_bad_request, False)["fallbacks"] == 1
    counts = counted(flat, False)
    assert counts["fallbacks"] == counts["blocks"] == BATCH
    assert counts.get("certified_blocks", 0) == 0


def test_masked_vocabularies_are_certified() -> None:
    for spoil in (masked, masked_away):
        for sampled in (False, True):
            assert counted(spoil, sampled)["certified_blocks"] == BATCH


# ---- controls: what the tests above would notice ---------------------------------------------------------------------


def wrong_tokens(sampled: bool, spoilers: tuple[Spoiler, ...]) -> Iterator[int]:
    for spoil, seed, rounding in itertools.product(spoilers, range(2), ROUNDINGS):
        yield walks_apart(spoil, seed, rounding, sampled)[0]


def test_a_certificate_by_ties_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_walk.certified_reference.limit", lambda *given: limit(*given) - 1)
    assert any(wrong_tokens(False, (ties,)))


def test_a_limit_without_slack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "BF16_ROUNDOFF", 0.0)
    monkeypatch.setattr(certify, "SLACK", 0.0)
    assert any(wrong_tokens(True, (rounded_up,)))


def test_a_bound_that_ignores_infinite_dots_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def finite_only(dots: torch.Tensor) -> torch.Tensor:
        return torch.where(dots.abs() < certify.LARGEST_DOT, dots, -torch.inf).amax(dim=1)

    monkeypatch.setattr("tp_walk.certified_reference.bias_bound", finite_only)
    assert any(wrong_tokens(False, (unbounded_dots,)))


def certified_steps(length: int) -> int:
    return walks_apart(low_ids_lead, 1, "engine", False, length=length)[1].get("certified_steps", 0)


def low_ids_lead(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """One rank owns all ids that may win, and a list holds but few more."""
    base[:, :, :20] = 40.0


def test_each_rank_keeps_a_whole_list(rank_pool) -> None:
    alone = certified_steps(24)
    together = rank_pool(2)(certified_steps, 24)
    divided = rank_pool(2)(certified_steps, 12)
    assert together[0] >= alone > divided[0]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_the_order_can_be_undone() -> None:
    values = torch.tensor([0.0, 1.5, -1.5, float("inf"), float("-inf"), 1e-40, -1e-40])
    assert torch.equal(from_ordered(ordered(values)), values)
    assert from_ordered(torch.tensor([NOTHING, TOP])).isnan().all()


def test_ids_equal_to_tau_are_left_out() -> None:
    keep, tau = keep_best(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]), 2)
    assert keep.tolist() == [[False, True, False, False, False]]
    assert from_ordered(tau).tolist() == [2.0]
    keep, tau = keep_best(torch.tensor([[1.0, 3.0]]), 2)
    assert keep.all()
    assert tau.tolist() == [NOTHING]


# ---- golden cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "layout"), [(1, "full"), (1, "sharded"), (2, "sharded"), (3, "full")])
def test_every_case(cases_dir: Path, world: int, layout: str, rank_pool) -> None:
    if world == 1:
        assert faults(cases_dir, "certified", layout) == {}
    else:
        assert rank_pool(world)(faults, cases_dir, "certified", layout) == [{}] * world

"""Plan `certified` on GPUs against tp_bf16, to the bit: usual inputs, and those that try to fool its certificate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from test_certify import SPOILERS, flat, masked, one_bad_request, ties
from test_graphs import captured, node_types
from walk_lab import DEADLINE, QWEN3, SMALL, TEMPERATURES, WORLDS, assert_same, generator_of, head, here, inputs

from tp_walk import MarkovHead, Noise, WalkOutput, WalkRuntime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCH, GAMMA = 33, 7  # on both sides of the batch at which units grow


@contextmanager
def made(walked: MarkovHead, world: int, batch: int = BATCH, **more: object) -> Iterator[WalkRuntime]:
    _, _, device = here()
    group = dist.group.WORLD if world > 1 else None
    plans = ["tp_bf16", "certified"]
    with WalkRuntime(
        walked, batch, GAMMA, group=group, device=device, plans=plans, deadline=DEADLINE, **more
    ) as runtime:
        yield runtime


def check_same(runtime: WalkRuntime, base: torch.Tensor, anchors: torch.Tensor, what: object) -> None:
    """Greedy and sampled, base logits whole and sharded."""
    batch = base.shape[0]
    temperatures = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(batch)], device=base.device)
    own = base[..., runtime.shard.start : runtime.shard.stop].contiguous()
    for drawn, given in itertools.product((False, True), (base, own)):
        arguments = (given, anchors, temperatures, Noise(7, 2)) if drawn else (given, anchors)
        right = runtime.walk(*arguments, plan="tp_bf16", logits="local")
        assert_same(runtime.walk(*arguments, plan="certified").tokens, right.tokens, (what, drawn))
        found = runtime.walk(*arguments, plan="certified", logits="local")
        assert_same(found.tokens, right.tokens, (what, drawn, "with logits"))
        assert_same(found.logits, right.logits, (what, drawn, "logits"))
    runtime.check()


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _usual(vocab_size: int, world: int) -> dict[str, int]:
    given = inputs(vocab_size)
    with made(head("gauss", vocab_size), world) as runtime:
        for factor, (batch, gamma) in itertools.product((1, 8), ((1, 7), (5, 3), (8, 7), (9, 7), (33, 5))):
            base = given.base[:batch, :gamma] * factor  # by 8: the base decides most steps, and they are certified
            check_same(runtime, base, given.anchors[:batch], (factor, batch, gamma))
        return runtime.stats()["counts"]["certified"]


@pytest.mark.parametrize("vocab_size", [SMALL, QWEN3])
@pytest.mark.parametrize("world", WORLDS)
def test_gaussian_weights(ranks: RankPool, world: int, vocab_size: int) -> None:
    counts = ranks(_usual, vocab_size, world)
    assert all(one == counts[0] for one in counts)
    assert counts[0]["steps"] == 2 * 4 * (7 + 15 + 56 + 63 + 165)
    assert 0 < counts[0]["certified_blocks"] < counts[0]["blocks"]


def _adversarial(world: int) -> dict[str, int]:
    _, _, device = here()
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randint(-4, 5, (SMALL, 256), generator=generator).float() / 32 for _ in range(2)]
    with made(MarkovHead(*(table.bfloat16() for table in tables)), world, batch=6) as runtime:
        for spoil in SPOILERS:
            torch.manual_seed(5)
            w1, w2 = (table.clone() for table in tables)
            base = torch.randn(6, 5, SMALL) * 8
            spoil(base, w1, w2)
            runtime.reload(MarkovHead(w1.bfloat16(), w2.bfloat16()))
            check_same(runtime, base.bfloat16().to(device), torch.arange(6, device=device), spoil.__name__)
        return runtime.stats()["counts"]["certified"]


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_fools_the_certificate(ranks: RankPool, world: int) -> None:
    for counts in ranks(_adversarial, world):
        assert 0 < counts["fallbacks"] < counts["blocks"]


def _fallbacks(world: int) -> list[int]:
    _, _, device = here()
    found = []
    tables = torch.randint(-4, 5, (2, SMALL, 256), generator=torch.Generator().manual_seed(3)).float() / 32
    with made(MarkovHead(*tables.bfloat16()), world, batch=6) as runtime:
        for spoil in (flat, ties, masked, one_bad_request):
            before = runtime.stats()["counts"]["certified"]["fallbacks"]
            torch.manual_seed(5)
            base, (w1, w2) = torch.randn(6, 5, SMALL) * 8, tables.clone()
            spoil(base, w1, w2)
            runtime.reload(MarkovHead(w1.bfloat16(), w2.bfloat16()))
            runtime.walk(base.bfloat16().to(device), torch.arange(6, device=device), plan="certified")
            found.append(runtime.stats()["counts"]["certified"]["fallbacks"] - before)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_fallbacks_are_counted(ranks: RankPool, world: int) -> None:
    for found in ranks(_fallbacks, world):
        assert found == [6, 6, 0, 1]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _bounds() -> None:
    """Base logits of 0 with rounding "none" give each dot as bf16; the largest is the bound's."""
    from tp_walk.certified import bias_bounds

    _, _, device = here()
    walked = head("gauss", SMALL)
    bounds = bias_bounds(walked.w1.to(device), walked.w2_rows(0, SMALL).to(device))
    with made(walked, 1, batch=64, rounding="none") as runtime:
        for first in range(0, SMALL, 64):
            anchors = torch.arange(first, min(first + 64, SMALL), device=device)
            base = torch.zeros(len(anchors), 1, SMALL, device=device)
            logits = runtime.walk(base, anchors, plan="tp_bf16", logits="full").logits
            assert logits is not None
            assert_same(logits[:, 0].amax(1), bounds[anchors].bfloat16().float(), first)


def test_bounds_are_the_walks_own_dots(ranks: RankPool) -> None:
    ranks(_bounds)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _graphs(world: int) -> None:
    _, _, device = here()
    given = inputs(SMALL)
    with made(head("gauss", SMALL), world) as runtime:
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        valid = torch.tensor(3, dtype=torch.int32, device=device)
        temperatures = torch.ones(8, device=device)
        tokens = torch.full((8, GAMMA), -1, device=device)
        base, anchors = given.base[:8, :GAMMA].clone(), given.anchors[:8]
        noise = Noise(5, offset)

        def walk() -> object:
            out = WalkOutput(tokens)
            return runtime.walk(base, anchors, temperatures, noise, "certified", num_valid=valid, out=out)

        graph = captured(walk, keep_graph=True)
        assert node_types(graph) == {"Kernel": 2}
        graph.instantiate()
        generator = generator_of(9)
        for replay in range(20):
            if replay % 5 == 0:
                base.fill_(1.0)  # nothing to choose by: every request falls back
            else:
                base.normal_(0.0, 3.0, generator=generator)
            valid.fill_(replay % 9)
            tokens.fill_(-1)
            before = int(offset)
            graph.replay()
            runtime.check()
            right = runtime.walk(base, anchors, temperatures, Noise(5, before), "tp_bf16", num_valid=valid).tokens
            rows = replay % 9
            assert_same(tokens[:rows], right[:rows], replay)
            assert bool((tokens[rows:] == -1).all())
            assert int(offset) == before + 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_walk_is_two_kernels(ranks: RankPool, world: int) -> None:
    ranks(_graphs, world)

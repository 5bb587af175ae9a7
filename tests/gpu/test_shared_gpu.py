"""Worlds of more ranks than there are GPUs, each rank with its part of the SMs: that nothing assumes two.

Processes take turns on a GPU, some milliseconds each, so every exchange waits for the other ranks' turns: these tests
are few and small, and say nothing of speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome
from test_walk import golden_faults
from walk_lab import MAX_BATCH, QWEN3, SHAPES, SMALL, assert_same, compile_ahead, head, here, inputs, lab, two_gpus

from tp_walk import Deadline, Noise, WalkOutput, WalkRuntime, WalkTimeout, precompile
from tp_walk.group import WalkGroup
from tp_walk.pair_test import check_pairs
from tp_walk.topology import survey

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Ranks, and the GPUs that they are spread over.
WORLDS = [
    pytest.param((2, 1), id="2 ranks on 1 GPU"),
    pytest.param((4, 2), id="4 ranks on 2 GPUs", marks=two_gpus),
    pytest.param((8, 2), id="8 ranks on 2 GPUs", marks=two_gpus),
]
SLOW = Deadline(startup_s=60.0, steady_s=20.0)
LATE = Deadline(startup_s=60.0, steady_s=4.0)


@pytest.fixture(scope="module", params=WORLDS)
def sharers(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[RankPool]:
    world, gpus = request.param
    target = precompile.current_gpu()
    target = replace(target, num_sms=target.num_sms // (world // gpus))
    small = [shape for shape in SHAPES if shape.vocab_size < QWEN3]
    compile_ahead([*small, *golden.shapes(golden.folder())], [world], target)
    ranks(_test_links)  # while each GPU has one rank: a path's self-test has no patience with ranks that take turns
    environment = {"TP_WALK_TEST_RANKS_PER_GPU": str(world // gpus)}
    if gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    pool = RankPool(world, [environment] * world)
    yield pool
    pool.close()


def _test_links() -> None:
    _, world, device = here()
    if world > 1:
        group = WalkGroup(dist.group.WORLD, device)
        check_pairs(group, survey(group, device), device)


@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_golden_cases(sharers: RankPool, cases_dir: Path, layout: str) -> None:
    world = len(sharers.processes)
    assert sharers(golden_faults, cases_dir, "tp_bf16", layout, world) == [{}] * world


def _random_blocks(count: int) -> None:
    """One or several groups of requests, odd gammas, inert rows; greedy and sampled, eager and a graph in turns."""
    _, world, device = here()
    alone = lab("exact", SMALL, 1)
    given = alone.inputs
    rng = random.Random(world)  # the same on every rank
    anchors, tokens = given.anchors[:40].clone(), torch.empty(40, 3, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with WalkRuntime(
        alone.head, MAX_BATCH, 16, group=dist.group.WORLD, device=device, plans=["tp_bf16"], deadline=SLOW
    ) as runtime:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            runtime.walk(given.base[:40, :3], anchors, plan="tp_bf16", out=WalkOutput(tokens))
        for block in range(count):
            batch, gamma, sampled = rng.choice([1, 5, 16, 33]), rng.randint(1, 5), rng.random() < 0.5
            live = rng.choice([batch, rng.randint(0, batch)])
            valid = torch.tensor(live, dtype=torch.int32, device=device)
            temperatures, noise = (given.temperatures[:batch], Noise(5, 0)) if sampled else (None, None)
            own = given.base[:batch, :gamma, runtime.shard.start : runtime.shard.stop].contiguous()
            arguments = own, given.anchors[:batch], temperatures, noise, "tp_bf16"
            walked = runtime.walk(*arguments, num_valid=valid).tokens
            right = alone.right("tp_bf16", sampled)
            assert_same(walked[:live], right[:live, :gamma], (block, batch, gamma, sampled, live))
            if block % 3 == 0:
                graph.replay()
                assert_same(tokens, alone.right("tp_bf16", False)[:40, :3], f"replay after block {block}")
        runtime.check()


def test_random_blocks(sharers: RankPool) -> None:
    sharers(_random_blocks, 12)


def _one_is_late(late: int) -> tuple[str, str]:
    """Rank `late` leaves a block out; what this rank is told of it, and of the block after the reset."""
    rank, _, device = here()
    alone = lab("exact", SMALL, 1)
    given, right = alone.inputs, alone.right("tp_bf16", False)[:3, :3]
    with WalkRuntime(
        alone.head, 8, 16, group=dist.group.WORLD, device=device, plans=["tp_bf16"], deadline=LATE
    ) as runtime:

        def walk() -> torch.Tensor:
            tokens = runtime.walk(given.base[:3, :3], given.anchors[:3], plan="tp_bf16").tokens
            torch.cuda.synchronize()
            runtime.check()
            return tokens

        assert_same(walk(), right, "before")
        error = None if rank == late else outcome(walk)
        runtime.reset()
        assert_same(walk(), right, "after the reset")
    return type(error).__name__, str(error)


def test_the_rank_that_is_late_is_named(sharers: RankPool) -> None:
    late = len(sharers.processes) - 1
    told = sharers(_one_is_late, late)
    assert told.pop(late) == ("NoneType", "None")
    for kind, message in told:
        assert kind == WalkTimeout.__name__
        assert f"waited past its deadline for the header of rank {late}" in message


def _groups_side_by_side() -> None:
    """Pairs of ranks, each a runtime of its own on the two GPUs, walk their share of the batch at the same time."""
    rank, world, device = here()
    pairs = [dist.new_group([first, first + 1], backend="gloo") for first in range(0, world, 2)]
    given, share = inputs(SMALL), MAX_BATCH * 2 // world
    mine = slice(rank // 2 * share, (rank // 2 + 1) * share)
    with WalkRuntime(
        head("exact", SMALL), share, 16, group=pairs[rank // 2], device=device, plans=["tp_bf16"], deadline=SLOW
    ) as runtime:
        assert (runtime.world_size, runtime.rank) == (2, rank % 2)
        noise = Noise(5, 0, torch.arange(MAX_BATCH, device=device)[mine])
        walked = runtime.walk(given.base[mine, :5], given.anchors[mine], given.temperatures[mine], noise, "tp_bf16")
        runtime.check()
    assert_same(walked.tokens, lab("exact", SMALL, 1).right("tp_bf16", True)[mine, :5], "this pair's share")


def test_smaller_groups_side_by_side(sharers: RankPool) -> None:
    sharers(_groups_side_by_side)

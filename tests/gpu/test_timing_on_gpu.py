"""The gate holds and lets go, gives up when it must, and what is measured behind it is right first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome

from tp_walk.errors import WalkTimeout
from tp_walk.group import WalkGroup
from tp_walk.timing import BlockTimer, CapturedWork, _Gate
from tp_walk.workload import REPLICATED, SHARDED, SHARDED_LOGITS, SINGLE, Ranks, Walk, Workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def device() -> torch.device:
    index = dist.get_rank() if dist.is_initialized() else 0
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")
    return torch.device("cuda", index)


def test_what_stands_behind_the_gate_waits_for_the_host() -> None:
    gate = _Gate(WalkGroup(None, device()), device(), 30.0)
    behind = torch.cuda.Event()
    behind.record()  # made before anything waits
    torch.cuda.synchronize()
    for _ in range(3):
        gate.enqueue()
        behind.record()
        assert not behind.query()
        gate.open()
        behind.synchronize()
        gate.check()
    gate.close()


def test_a_gate_without_its_host_gives_up() -> None:
    gate = _Gate(WalkGroup(None, device()), device(), 0.05)
    gate.enqueue()
    torch.cuda.synchronize()
    with pytest.raises(WalkTimeout, match="this rank's host didn't come"):
        gate.check()
    gate.close()


def _pass_together_then_alone() -> Any:
    here = device()
    group = WalkGroup(dist.group.WORLD, here)
    gate = _Gate(group, here, 2.0)
    for _ in range(50):
        gate.enqueue()
        gate.open()
    torch.cuda.synchronize()
    gate.check()
    group.barrier()
    if group.rank == 0:
        gate.enqueue()
        gate.open()
        torch.cuda.synchronize()
    alone = outcome(gate.check)
    gate.close()
    return str(alone)


@needs_two
def test_gates_open_together_and_a_missing_rank_is_named(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2)(_pass_together_then_alone)
    assert "the GPU of rank 1 didn't come" in first
    assert second == "None"


def test_a_captured_graph_runs_again_and_again() -> None:
    here = device()
    counter = torch.zeros(1, device=here)
    work = CapturedWork(lambda: counter.add_(1))
    for _ in range(3):
        work()
    assert counter.item() == 3  # the capture itself runs nothing


def _measure(world_walk: Walk) -> tuple[list[str], dict[str, str], list[str]]:
    device()
    ranks = Ranks.of_this_run()
    with (
        Workload(4096, 256, max_batch=4, max_gamma=4, ranks=ranks) as workload,
        BlockTimer(workload.group, ranks.device) as timer,
    ):
        prepared = workload.prepare(world_walk)
        candidates = prepared.ready | {"empty": timer.empty_graph(256)}
        timings = timer.measure(candidates, iterations=5)
        assert all(0.0 < timing.median_us <= timing.p99_us for timing in timings.values())
    return list(timings), prepared.refused, list(workload.not_held)


@pytest.mark.parametrize("sampled", [False, True])
def test_one_gpu_measures(sampled: bool) -> None:
    names, refused, _ = _measure(Walk(4, 4, sampled))
    assert refused == {}
    assert {"tp_bf16", SINGLE, "empty"} <= set(names)


@needs_two
@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize("sampled", [False, True])
def test_two_gpus_measure(sampled: bool, layout: str, rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2)(_measure, Walk(4, 4, sampled, layout=layout))  # type: ignore[arg-type]
    assert first == second
    names, refused, _ = first
    assert refused == {}
    assert {"tp_bf16", REPLICATED, SHARDED, "empty"} <= set(names)
    assert (SHARDED_LOGITS in names) == sampled

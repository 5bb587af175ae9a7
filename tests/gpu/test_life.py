"""Runtimes come and go, stand side by side, and find their GPUs whatever the environment calls them."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from walk_lab import DEADLINE, QWEN3, SMALL, WORLDS, assert_same, head, here, lab, two_gpus

from tp_walk import WalkRuntime
from tp_walk.group import WalkGroup
from tp_walk.topology import survey

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _lives(count: int, world: int) -> dict[str, int]:
    """What `count` lives of a runtime have cost, after some that warm everything up."""
    _, _, device = here()
    alone = lab("exact", SMALL, 1)
    right = alone.right("tp_bf16", False)[:5, :7]
    group = dist.group.WORLD if world > 1 else None

    def live() -> None:
        with WalkRuntime(
            alone.head, 8, 16, group=group, device=device, plans=["tp_bf16"], deadline=DEADLINE, on_poison=print
        ) as runtime:
            tokens = runtime.walk(alone.inputs.base[:5, :7], alone.inputs.anchors[:5], plan="tp_bf16").tokens
            assert_same(tokens, right, "a life's only walk")

    def held() -> dict[str, int]:
        gc.collect()
        time.sleep(0.2)  # threads that were told to end do so now
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {
            "device bytes": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }

    for _ in range(3):
        live()
    before = held()
    for _ in range(count):
        live()
    return {name: now - before[name] for name, now in held().items()}


@pytest.mark.parametrize("world", WORLDS)
def test_lives_of_a_runtime_leave_nothing_behind(ranks: RankPool, world: int) -> None:
    for left in ranks(_lives, 30, world):
        assert max(left.values()) <= 0, left


def _two_runtimes(world: int) -> None:
    """Walks of both in turns, on one stream and on one each; then one closes and the other goes on."""
    big, small = lab("exact", QWEN3, world), lab("exact", SMALL, world)
    _, _, device = here()
    group = dist.group.WORLD if world > 1 else None
    default = torch.cuda.current_stream()
    own = torch.cuda.Stream()
    given, right = small.inputs, small.right("tp_bf16", False)
    with WalkRuntime(
        head("exact", SMALL), 64, 16, group=group, device=device, plans=["tp_bf16"], deadline=DEADLINE
    ) as other:
        walked = []
        for walk in range(60):
            stream = [default, own][walk % 2] if walk >= 30 else default
            with torch.cuda.stream(stream):
                walked.append(big.walk(1 + walk % 9, 7, "tp_bf16").tokens)
                batch = 64 - walk
                walked.append(other.walk(given.base[:batch], given.anchors[:batch], plan="tp_bf16").tokens)
        torch.cuda.synchronize()
        other.check()
    walked.append(big.walk(8, 7, "tp_bf16").tokens)
    big.runtime.check()
    for number, tokens in enumerate(walked):
        expected = right if tokens.shape[1] == 16 else big.right("tp_bf16", False)
        assert_same(tokens, expected[: tokens.shape[0], : tokens.shape[1]], number)


@pytest.mark.parametrize("world", WORLDS)
def test_two_runtimes_side_by_side(ranks: RankPool, world: int) -> None:
    ranks(_two_runtimes, world)


# ---- names of GPUs ---------------------------------------------------------------------------------------------------


def _walks_together(expandable: bool) -> str:
    """Walks as one of two ranks; the UUID of this rank's GPU."""
    rank, _, device = here()
    here_is = lab("exact", SMALL, 2)
    for layout in ("full", "sharded"):
        tokens = here_is.walk(9, 7, "tp_bf16", sampled=True, layout=layout).tokens
        assert_same(tokens, here_is.right("tp_bf16", True)[:9, :7], layout)
    here_is.runtime.check()
    segments = torch.cuda.memory_snapshot()
    assert all(segment["is_expandable"] == expandable for segment in segments)
    gpus = survey(WalkGroup(dist.group.WORLD, device), device).gpus
    here_is.runtime.close()
    return gpus[rank].uuid


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]


def _run_in(environments: list[dict[str, str]], expandable: bool) -> list[str]:
    pool = RankPool(2, environments)
    try:
        return pool(_walks_together, expandable)
    finally:
        pool.close()


@two_gpus
@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="CUDA_VISIBLE_DEVICES is in use")
def test_permuted_gpus_and_expandable_segments(kernels: None) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1,0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert _run_in([environment] * 2, True) == _uuids()[::-1]


@two_gpus
def test_one_visible_gpu_a_rank_named_by_uuid(kernels: None) -> None:
    uuids = _uuids()[::-1]
    assert _run_in([{"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"} for uuid in uuids], False) == uuids

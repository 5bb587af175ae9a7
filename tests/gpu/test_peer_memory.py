"""Memory shared by two GPUs: opened by handle, written by the peer, and nothing left after many lives."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome

from tp_walk.errors import PlanUnavailableError
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MailboxLayout
from tp_walk.pair_test import PATTERNS, PairResult, check_pairs
from tp_walk.peer_memory import PeerBuffer, cuda_call, cuda_runtime
from tp_walk.peers import FIRST_BLOCK, RESET_SKIP, PeerMailboxes
from tp_walk.topology import Topology, survey

WORLD = 2
LAYOUT = MailboxLayout(WORLD, 64, 132)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")


def _here() -> tuple[WalkGroup, torch.device]:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return WalkGroup(dist.group.WORLD, device, timeout_s=60.0), device


def _copy_between(destination: int, source: int, num_bytes: int) -> None:
    cuda_call("cudaMemcpy", destination, source, num_bytes, cuda_runtime().cudaMemcpyKind.cudaMemcpyDefault)


def _written_by_the_peer() -> list[int]:
    group, device = _here()
    buffer = PeerBuffer(group, 4096, device)
    own, peer = buffer.addresses[group.rank], buffer.addresses[1 - group.rank]
    sent = torch.full((512,), 100 + group.rank, dtype=torch.int64, device=device)
    _copy_between(peer, sent.data_ptr(), 4096)
    torch.cuda.synchronize()
    group.barrier()
    got = torch.empty_like(sent)
    _copy_between(got.data_ptr(), own, 4096)
    buffer.close()
    return sorted(set(got.tolist()))


def test_a_peer_writes_into_this_gpus_memory(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(WORLD)(_written_by_the_peer) == [[101], [100]]


def _topology() -> Topology:
    return survey(*_here())


def test_the_gpus_are_told_apart_and_linked(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(WORLD)(_topology)
    assert first.gpus == second.gpus
    assert len({gpu.uuid for gpu in first.gpus}) == WORLD
    assert first.links[0].kind == "same GPU"
    assert first.links[1].obstacle is None


def _pairs(again: bool) -> list[PairResult]:
    group, device = _here()
    return check_pairs(group, survey(group, device), device, again=again)


def test_the_path_between_the_gpus_passes_its_self_test(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, results in enumerate(rank_pool(WORLD)(_pairs, True)):
        (result,) = results
        assert result.peer == 1 - rank
        assert result.patterns == PATTERNS
        assert 0 < result.hop_p50_us <= result.hop_p99_us <= result.hop_max_us
    assert rank_pool(WORLD)(_pairs, False) == rank_pool(WORLD)(_pairs, False), "what passed is remembered"


def _shared_gpu() -> str:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    error = outcome(lambda: survey(WalkGroup(dist.group.WORLD, device, timeout_s=60.0), device))
    torch.cuda.set_device(dist.get_rank())
    assert isinstance(error, PlanUnavailableError)
    return str(error)


def test_ranks_that_share_a_gpu_are_refused(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(WORLD)(_shared_gpu)
    assert first == second
    assert "share one GPU" in first


def _free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _lives(count: int) -> tuple[int, int]:
    """Device bytes and file descriptors that `count` lives have cost, after some that warm everything up."""
    group, device = _here()

    def live() -> None:
        PeerMailboxes(group, LAYOUT, device).close()

    for _ in range(10):
        live()
    group.barrier()
    free, descriptors = _free_bytes(), len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        live()
    group.barrier()
    return free - _free_bytes(), len(os.listdir("/proc/self/fd")) - descriptors


def test_500_lives_leak_no_memory_and_no_descriptors(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(WORLD)(_lives, 500) == [(0, 0)] * WORLD


def _reset() -> tuple[int, int]:
    group, device = _here()
    mailboxes = PeerMailboxes(group, LAYOUT, device)
    before = mailboxes.block()
    mailboxes.reset()
    after = mailboxes.block()
    mailboxes.check()
    mailboxes.close()
    return before, after


def test_reset_moves_all_ranks_to_the_same_block(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(WORLD)(_reset) == [(FIRST_BLOCK, FIRST_BLOCK + RESET_SKIP)] * WORLD

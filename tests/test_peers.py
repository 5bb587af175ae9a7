"""Memory that ranks share: set-up is voted and leaves nothing behind, teardown keeps its order, reset is collective."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeRuntime, install
from rank_pool import RankPool, outcome

from tp_walk.errors import PlanUnavailableError, SetupError, WalkTimeout
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MailboxLayout
from tp_walk.peer_memory import IPC_GRANULARITY, PeerBuffer
from tp_walk.peers import FIRST_BLOCK, RESET_SKIP, PeerMailboxes
from tp_walk.status import Wait, WalkCode, WalkStatus

CPU = torch.device("cpu")
WORLD = 3
LAYOUT = MailboxLayout(WORLD, 4, 2)

fake_cuda = contextlib.contextmanager(install)


@dataclass
class Seen:
    """What a rank saw of its set-up and teardown."""

    error: str | None
    kind: str | None
    addresses: tuple[int, ...]
    left: int  # allocations and mappings that remain
    freed: list[tuple[int, int]]
    closed: list[tuple[int, int]]


def _group() -> WalkGroup:
    return WalkGroup(dist.group.WORLD, CPU, timeout_s=30.0)


def _life(fails: tuple[int, str, int] | None, make: Callable[[WalkGroup], Any]) -> Seen:
    group = _group()
    mine = fails[1:] if fails is not None and fails[0] == group.rank else None
    with fake_cuda(FakeRuntime(group.rank, mine)) as cuda:
        made = outcome(lambda: make(group))
        error = made if isinstance(made, Exception) else None
        addresses = () if error is not None else made.addresses
        if error is None:
            made.close()
            made.close()  # once more: nothing happens, nobody waits
        return Seen(
            None if error is None else str(error),
            None if error is None else type(error).__name__,
            addresses,
            len(cuda.allocated) + len(cuda.opened),
            cuda.times("cudaFree"),
            cuda.times("cudaIpcCloseMemHandle"),
        )


def _buffer_life(fails: tuple[int, str, int] | None = None) -> Seen:
    return _life(fails, lambda group: PeerBuffer(group, 100, CPU))


def _mailboxes_life(fails: tuple[int, str, int] | None = None) -> Seen:
    return _life(fails, lambda group: PeerMailboxes(group, LAYOUT, CPU))


def test_memory_is_freed_only_once_no_peer_maps_it(rank_pool: Callable[[int], RankPool]) -> None:
    seen = rank_pool(WORLD)(_buffer_life)
    for owner, rank in enumerate(seen):
        assert rank.error is None
        assert rank.left == 0
        assert len(set(rank.addresses)) == WORLD
        ((_, freed),) = rank.freed
        closed = [at for other in seen for whose, at in other.closed if whose == owner]
        assert len(closed) == WORLD - 1
        assert max(closed) < freed


@pytest.mark.parametrize("life", [_buffer_life, _mailboxes_life], ids=["buffer", "mailboxes"])
@pytest.mark.parametrize(
    ("call", "nth", "kind"),
    [
        ("cudaMalloc", 1, SetupError),
        ("cudaMemset", 1, SetupError),
        ("cudaIpcGetMemHandle", 1, SetupError),
        ("cudaIpcOpenMemHandle", 1, PlanUnavailableError),
        ("cudaIpcOpenMemHandle", 2, PlanUnavailableError),
    ],
)
def test_a_failure_on_one_rank_is_the_same_error_on_all(
    rank_pool: Callable[[int], RankPool],
    life: Callable[[tuple[int, str, int]], Seen],
    call: str,
    nth: int,
    kind: type[Exception],
) -> None:
    seen = rank_pool(WORLD)(life, (1, call, nth))
    assert {rank.kind for rank in seen} == {kind.__name__}
    assert len({rank.error for rank in seen}) == 1
    assert "rank 1" in str(seen[0].error)
    assert call in str(seen[0].error)
    assert all(rank.left == 0 for rank in seen)


@pytest.mark.parametrize(("call", "nth"), [("cudaHostAlloc", 1), ("cudaMemset", 2)])
def test_a_failure_of_the_status_block_frees_the_mailboxes(
    rank_pool: Callable[[int], RankPool], call: str, nth: int
) -> None:
    seen = rank_pool(WORLD)(_mailboxes_life, (2, call, nth))
    assert {rank.kind for rank in seen} == {"SetupError"}
    assert len({rank.error for rank in seen}) == 1
    assert all(rank.left == 0 for rank in seen)


def test_lives_leave_nothing_behind(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2)(_lives_of_two, 20) == [[0] * 20] * 2


def _lives_of_two(count: int) -> list[int]:
    layout = MailboxLayout(2, 4, 2)
    return [_life(None, lambda group: PeerMailboxes(group, layout, CPU)).left for _ in range(count)]


# ---- reset -----------------------------------------------------------------------------------------------------------


def _reset() -> tuple[str, int, int, bytes, str]:
    group = _group()
    with fake_cuda(FakeRuntime(group.rank)):
        mailboxes = PeerMailboxes(group, LAYOUT, CPU)
        own = mailboxes.addresses[group.rank]
        # Rank 1 is one block ahead of the others; everybody has words, and rank 2 a failure.
        ctypes.c_uint64.from_address(own + LAYOUT.block_offset).value = 41 + (group.rank == 1)
        ctypes.memset(own + LAYOUT.poison_offset, 0x5A, LAYOUT.num_bytes - LAYOUT.poison_offset)
        failure = WalkStatus(code=WalkCode.TIMEOUT, origin=2, wait=Wait.RESULT, source=0, step=1, block=41)
        if group.rank == 2:
            ctypes.memmove(mailboxes.status_address, failure.encode(), 64)
        before = type(outcome(mailboxes.check)).__name__
        mailboxes.reset()
        block = mailboxes.block()
        first = ctypes.c_uint64.from_address(own + LAYOUT.first_block_offset).value
        words = ctypes.string_at(own + LAYOUT.last_tokens_offset, LAYOUT.num_bytes - LAYOUT.last_tokens_offset)
        after = type(outcome(mailboxes.check)).__name__
        mailboxes.close()
        return before, block, first, words.strip(b"\0"), after


def test_reset_clears_everything_and_agrees_on_the_next_block(rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(WORLD)(_reset)
    for rank, (before, block, first, words, after) in enumerate(results):
        assert before == ("WalkTimeout" if rank == 2 else "NoneType")
        assert block == first == 42 + RESET_SKIP
        assert words == b""
        assert after == "NoneType"


# ---- one GPU alone ---------------------------------------------------------------------------------------------------


def test_a_world_of_one_needs_no_ipc() -> None:
    with fake_cuda(FakeRuntime(0)) as cuda:
        mailboxes = PeerMailboxes(None, MailboxLayout(1, 4, 2), CPU)
        assert len(mailboxes.addresses) == 1
        assert mailboxes.num_bytes % IPC_GRANULARITY == 0
        assert mailboxes.block() == FIRST_BLOCK
        assert mailboxes.status() == WalkStatus()
        mailboxes.close()
        assert not cuda.allocated
        assert not cuda.times("cudaIpcGetMemHandle")


def test_a_layout_for_another_world_is_refused() -> None:
    with fake_cuda(FakeRuntime(0)), pytest.raises(SetupError, match="2 ranks in a group of 1"):
        PeerMailboxes(None, MailboxLayout(2, 4, 2), CPU)


class _LostPeer(WalkGroup):
    """A group whose other rank has gone: whoever waits for it times out."""

    def barrier(self) -> None:
        raise WalkTimeout("rank 1 is gone")


def test_memory_that_a_lost_rank_may_map_is_not_freed() -> None:
    with fake_cuda(FakeRuntime(0)) as cuda:
        buffer = PeerBuffer(_LostPeer(None, CPU), 100, CPU)
        with pytest.raises(WalkTimeout):
            buffer.close()
        assert len(cuda.allocated) == 1
        buffer.close()

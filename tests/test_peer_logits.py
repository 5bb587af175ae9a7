"""Buffers for full logits: found again by their address, alike on every rank, freed with the runtime."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeRuntime, install
from rank_pool import RankPool, outcome

from tp_walk import peer_logits
from tp_walk.group import WalkGroup
from tp_walk.mailbox import HEADER_FIELDS
from tp_walk.peer_logits import PeerLogits

CPU = torch.device("cpu")
WORLD = 2
SHAPE = (2, 3, 20)

fake_cuda = contextlib.contextmanager(install)


def _host_bytes(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _made(fails: tuple[str, int] | None = None) -> tuple[list[object], int]:
    """What a rank saw, and what is left of its memory and mappings."""
    group = WalkGroup(dist.group.WORLD, CPU, timeout_s=30.0)
    seen: list[object] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_cuda(FakeRuntime(group.rank, fails if group.rank else None)) as cuda,
    ):
        patch.setattr(peer_logits, "device_bytes", _host_bytes)
        buffers = PeerLogits(group, CPU)

        def use() -> None:
            first, second = (buffers.make(SHAPE, torch.bfloat16) for _ in range(2))
            assert first.shape == SHAPE
            assert first.is_contiguous()
            assert (first.view(torch.int16) == 0).all()
            for tensor, number in ((first, 1), (second, 2), (second[:1], 2)):
                found = buffers.find(tensor)
                assert found is not None
                assert found.number == number
                assert found.addresses[group.rank] == tensor.data_ptr()
                assert len(set(found.addresses)) == WORLD
            assert buffers.find(first[1:]) is None, "its peers' rows would be those of another address"
            assert buffers.find(torch.empty(SHAPE, dtype=torch.bfloat16)) is None
            like = torch.empty(2, 2, 20, dtype=torch.bfloat16)
            staged, on_ranks = buffers.staging(SHAPE, like)
            assert staged.shape == like.shape
            assert staged.is_contiguous()
            assert on_ranks.number == 3
            again, _ = buffers.staging(SHAPE, torch.empty(SHAPE, dtype=torch.bfloat16))
            assert again.data_ptr() == staged.data_ptr(), "graphs keep the address"
            seen.append(buffers.num_bytes > 0)

        seen.append(type(outcome(use)).__name__)
        buffers.close()
        buffers.close()
        return seen, len(cuda.allocated) + len(cuda.opened)


def test_buffers_are_found_and_freed(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(WORLD)(_made) == [([True, "NoneType"], 0)] * WORLD


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaIpcOpenMemHandle"])
def test_a_rank_without_memory_fails_all_and_leaves_nothing(rank_pool: Callable[[int], RankPool], call: str) -> None:
    kind = "SetupError" if call == "cudaMalloc" else "PlanUnavailableError"
    assert rank_pool(WORLD)(_made, (call, 2)) == [([kind], 0)] * WORLD


def test_numbers_fit_the_header_and_none_is_0() -> None:
    with pytest.MonkeyPatch.context() as patch, fake_cuda(FakeRuntime(0)):
        patch.setattr(peer_logits, "device_bytes", _host_bytes)
        buffers = PeerLogits(WalkGroup(None, CPU), CPU)
        found = [buffers.find(buffers.make((1, 1, 1), torch.float32)) for _ in range(70)]
        numbers = [one.number for one in found if one is not None]
        buffers.close()
    assert numbers[:64] == [*range(1, 64), 1]
    assert all(HEADER_FIELDS["logits_buffer"].pack(number) for number in numbers)


def test_every_batch_has_a_way() -> None:
    assert {peer_logits.full_logits_by(batch) for batch in (1, 64, 1 << 16)} <= {"peers", "collective"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_logits, "FULL_LOGITS", ((8, "collective"), (float("inf"), "peers")))
        assert [peer_logits.full_logits_by(batch) for batch in (1, 8, 9)] == ["collective", "collective", "peers"]

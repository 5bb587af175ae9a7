"""Ranks as threads of this process whose plans launch on the emulator: the executors' own host code, on host memory.

What stands in for a GPU: its properties, memory that all ranks see, and launches that wait until every rank has made
them. Objects that talk to other ranks are made and used inside of `Ranks.each` alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from emulated import launch

from tp_walk import certified, executors, jit, peer_logits, runtime, spread
from tp_walk.certify import bias_bound
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MailboxLayout
from tp_walk.peers import FIRST_BLOCK
from tp_walk.status import STATUS_BYTES, WalkStatus

T = TypeVar("T")

_here = threading.local()  # .rank, .ranks


@dataclass(frozen=True)
class Gpu:
    """Of every rank. num_sms: the most CTAs of a launch. shared_limit: bytes of shared memory that a CTA may have."""

    num_sms: int
    shared_limit: int


class HostDevice(str):
    """The CPU to torch, a GPU to the executors."""

    type, index = "cuda", 0


class Ranks:
    """`world` ranks. folder: of the emulator's libraries."""

    def __init__(self, world: int, gpu: Gpu, folder: Path) -> None:
        self.world, self.gpu, self.folder = world, gpu, folder
        self._barrier = threading.Barrier(world)
        self._values: list[Any] = [None] * world

    def each(self, action: Callable[[int], T]) -> list[T]:
        """Runs action(rank) on all ranks at once; their results. Raises what the first of them raises that isn't just
        alone since another failed."""
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def run(rank: int) -> None:
            _here.rank, _here.ranks = rank, self
            try:
                results[rank] = action(rank)
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [results[rank] for rank in range(self.world)]

    def exchange(self, rank: int, value: T) -> list[T]:
        """Every rank's value."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class ThreadGroup(WalkGroup):
    """The group of this thread's ranks."""

    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"))
        self.rank, self.world_size = _here.rank, _here.ranks.world

    def all_gather_object(self, value: Any, what: str = "") -> list[Any]:
        return [value] if self.world_size == 1 else _here.ranks.exchange(self.rank, value)

    def _gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        return self.all_gather_object(tensor.contiguous())


class HostBuffer:
    """As PeerBuffer."""

    def __init__(self, group: WalkGroup | None, num_bytes: int, device: object) -> None:
        self.num_bytes = num_bytes
        # Words are 16-byte aligned, and torch's memory is.
        self.memory = torch.zeros(-(-num_bytes // 8), dtype=torch.int64)
        own = self.memory.data_ptr()
        self.addresses = (own,) if group is None else tuple(group.all_gather_object(own))

    def close(self) -> None:
        self.addresses = ()


class HostMailboxes:
    """As PeerMailboxes."""

    def __init__(self, group: WalkGroup | None, layout: MailboxLayout, device: object) -> None:
        self._buffer = HostBuffer(group, layout.num_bytes, device)
        self._status = ctypes.create_string_buffer(STATUS_BYTES)
        self._rank = 0 if group is None else group.rank
        self.addresses = self._buffer.addresses
        self.status_address = ctypes.addressof(self._status)
        self.reset()

    def close(self) -> None:
        self._buffer.close()

    def reset(self) -> None:
        self._buffer.memory.zero_()[:2] = FIRST_BLOCK  # the block to come, and the first
        ctypes.memset(self.status_address, 0, STATUS_BYTES)

    def check(self) -> None:
        error = WalkStatus.decode(self._status.raw).error(self._rank)
        if error is not None:
            raise error


class EmulatedLaunch:
    """As Launch; kernel: its source's name and macros."""

    def __init__(
        self,
        what: str,
        kernel: tuple[str, Mapping[str, int]],
        *,
        grid: int,
        threads: int,
        num_sms: int,
        shared_bytes: int = 0,
    ) -> None:
        assert grid <= num_sms, what
        self._kernel, self._grid, self._shared_bytes = kernel, grid, shared_bytes

    def __call__(self, arguments: int, stream: int) -> None:
        rank, ranks = _here.rank, _here.ranks
        source, macros = self._kernel
        # Most are given one structure, and the emulator wants to know where it lies.
        given = arguments if source == "spread.cu" else ctypes.c_void_p.from_address(arguments).value
        mine = (source, macros, self._grid, self._shared_bytes)
        everybodys = ranks.exchange(rank, (given, mine))
        assert all(theirs == mine for _, theirs in everybodys), "ranks launch different kernels"
        if rank == 0:
            addresses = [address for address, _ in everybodys]
            launch(source.removesuffix(".cu"), macros, addresses, self._grid, self._shared_bytes, ranks.folder)
        ranks.exchange(rank, None)


class Captured:
    """As CapturedWork, whose graph's replays run no Python: here they do nothing."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        work()

    def __call__(self) -> None:
        pass


def host_bytes(address: int, num_bytes: int, device: object) -> torch.Tensor:
    """As peer_logits.device_bytes."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def emulate_gpus(patch: pytest.MonkeyPatch) -> None:
    """Executors that are made from now on launch on the emulator."""
    patch.setattr(jit, "compile_kernel", lambda source, name, macros: (source, macros))
    unordered = SimpleNamespace(before=lambda stream: None, after=lambda stream: None)
    for module in (executors, certified):
        patch.setattr(module, "PeerMailboxes", HostMailboxes)
        patch.setattr(module, "launch_order", lambda device: unordered)
    for module in (executors, spread, certified):
        patch.setattr(module, "Launch", EmulatedLaunch)
    for module in (peer_logits, spread, certified):
        patch.setattr(module, "PeerBuffer", HostBuffer)
    patch.setattr(certified, "bias_bounds", lambda w1, w2: bias_bound(w1.float() @ w2.float().T))
    patch.setattr(peer_logits, "device_bytes", host_bytes)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            major=9,
            minor=0,
            name="an emulated GPU",
            multi_processor_count=_here.ranks.gpu.num_sms,
            shared_memory_per_block_optin=_here.ranks.gpu.shared_limit,
        ),
    )


def emulate_runtimes(patch: pytest.MonkeyPatch) -> None:
    """So do WalkRuntimes that are made from now on, with `HostDevice("cpu")` as their device."""
    emulate_gpus(patch)
    checker = runtime.InputChecker
    patch.setattr(runtime, "InputChecker", lambda *arguments: checker(*arguments[:-1], torch.device("cpu")))
    patch.setattr(runtime, "_device", lambda device: device)
    patch.setattr(runtime, "WalkGroup", lambda *arguments: ThreadGroup())
    patch.setattr(runtime, "agree_on_selector", lambda *arguments: None)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)

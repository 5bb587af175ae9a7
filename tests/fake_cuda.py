"""The calls of the CUDA runtime that peer memory needs, on host memory: for tests of set-up and teardown without a GPU.

Memory is real (this process's), handles name their owner, and every call is noted with the time, which is one clock for
all processes of a machine. A call can be made to fail.
"""
# ruff: noqa: N815 - the names are CUDA's

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import pytest

from tp_walk import peer_memory, peers


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2


class Copy(IntEnum):
    cudaMemcpyDefault = 4


class IpcHandle:
    """`cudaIpcMemHandle_t`: 64 bytes behind `getPtr()`."""

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.bytes)


class FakeRuntime:
    """Stands in for `cuda.bindings.runtime`. fails: (name, n), the n-th call of that name returns an error."""

    cudaError_t = Error
    cudaMemcpyKind = Copy
    cudaIpcMemHandle_t = IpcHandle
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaHostAllocMapped = 2
    cudaHostAllocPortable = 1

    def __init__(self, rank: int, fails: tuple[str, int] | None = None) -> None:
        self.rank = rank
        self.allocated: dict[int, Any] = {}
        self.opened: dict[int, int] = {}  # address -> owner
        self.calls: list[tuple[str, int, int]] = []  # name, a rank or address, ns
        self._fails = fails
        self._opened_at = itertools.count(1 << 40, 1 << 30)

    def _note(self, name: str, about: int = 0) -> Error:
        self.calls.append((name, about, time.monotonic_ns()))
        made = sum(call == name for call, _, _ in self.calls)
        return Error.cudaErrorMemoryAllocation if self._fails == (name, made) else Error.cudaSuccess

    def _allocate(self, name: str, num_bytes: int) -> tuple[Error, int]:
        status = self._note(name)
        if status:
            return status, 0
        memory = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        self.allocated[ctypes.addressof(memory)] = memory
        return status, ctypes.addressof(memory)

    def cudaGetDevice(self) -> tuple[Error, int]:
        return Error.cudaSuccess, 0

    def cudaSetDevice(self, device: int) -> tuple[Error]:
        return (Error.cudaSuccess,)

    def cudaDeviceSynchronize(self) -> tuple[Error]:
        return (self._note("cudaDeviceSynchronize"),)

    def cudaMalloc(self, num_bytes: int) -> tuple[Error, int]:
        return self._allocate("cudaMalloc", num_bytes)

    def cudaHostAlloc(self, num_bytes: int, flags: int) -> tuple[Error, int]:
        return self._allocate("cudaHostAlloc", num_bytes)

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[Error, int]:
        return Error.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Error]:
        status = self._note("cudaFree", address)
        del self.allocated[address]
        return (status,)

    cudaFreeHost = cudaFree

    def cudaMemset(self, address: int, value: int, num_bytes: int) -> tuple[Error]:
        ctypes.memset(address, value, num_bytes)
        return (self._note("cudaMemset", address),)

    def cudaMemcpy(self, destination: int, source: int, num_bytes: int, kind: Copy) -> tuple[Error]:
        ctypes.memmove(destination, source, num_bytes)
        return (Error.cudaSuccess,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Error, IpcHandle]:
        handle = IpcHandle()
        struct.pack_into("<QQ", handle.bytes, 0, self.rank, address)
        return self._note("cudaIpcGetMemHandle", address), handle

    def cudaIpcOpenMemHandle(self, handle: IpcHandle, flags: int) -> tuple[Error, int]:
        owner, _ = struct.unpack_from("<QQ", handle.bytes)
        status = self._note("cudaIpcOpenMemHandle", owner)
        address = next(self._opened_at)
        if not status:
            self.opened[address] = owner
        return status, address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Error]:
        return (self._note("cudaIpcCloseMemHandle", self.opened.pop(address)),)

    def times(self, name: str) -> list[tuple[int, int]]:
        """(about what, ns) of each call of this name."""
        return [(about, at) for call, about, at in self.calls if call == name]


def install(runtime: FakeRuntime) -> Iterator[FakeRuntime]:
    """A context's body: the package uses `runtime`, and takes links between GPUs for tested."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (peer_memory, peers):
            patch.setattr(module, "cuda_runtime", lambda: runtime)
        patch.setattr(peers, "survey", lambda group, device: None)
        patch.setattr(peers, "check_pairs", lambda group, topology, device: [])
        yield runtime

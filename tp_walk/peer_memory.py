"""Device memory that every rank maps, for mailboxes and for outputs that peers write.

Allocated by the CUDA runtime, because torch's expandable segments can't be exported; shared by CUDA IPC handles over
the ranks' group. Set-up is staged and voted: a failure on any rank raises the same error on all of them and frees what
was taken. Teardown is ordered: synchronise, close the peers' memory, barrier, free one's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tp_walk.errors import PlanUnavailableError, SetupError, WalkError, WalkTimeout
from tp_walk.group import WalkGroup

logger = logging.getLogger(__name__)

# cudaMalloc may cut a smaller allocation out of a block that it shares with others, and an IPC handle maps the block.
IPC_GRANULARITY = 2 << 20

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`, imported when first used: a machine without CUDA may not have it."""
    from cuda.bindings import runtime

    return runtime


def cuda_call(name: str, *arguments: Any) -> Any:
    """`cuda.bindings.runtime.<name>(*arguments)`: its value, or None where it returns only a status.

    Raises:
        SetupError: the status wasn't success.
    """
    runtime = cuda_runtime()
    status, *values = getattr(runtime, name)(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        raise SetupError(f"{name} failed: {status.name}")
    return values[0] if values else None


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Makes `device` the CUDA runtime's current one, as the calls on its memory need."""
    before = cuda_call("cudaGetDevice")
    cuda_call("cudaSetDevice", before if device.index is None else device.index)
    try:
        yield
    finally:
        cuda_call("cudaSetDevice", before)


class PeerBuffer:
    """`num_bytes` of zeroed memory on every rank's GPU, mapped by all ranks. Collective, as is `close`.

    group: the ranks, or None for this process alone, which needs no IPC. There is no destructor: closing talks to the
    other ranks.

    Raises:
        SetupError: a rank couldn't allocate or export. PlanUnavailableError: one couldn't open a peer's memory.
        WalkTimeout: a rank was lost on the way. In every case nothing stays mapped.
    """

    def __init__(self, group: WalkGroup | None, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = -(-num_bytes // IPC_GRANULARITY) * IPC_GRANULARITY
        self._device = device
        self._group = group or WalkGroup(None, device)
        self._own: int | None = None
        self._opened: dict[int, int] = {}
        self._closed = False
        try:
            handle = self._group.stage("allocation of memory to share", self._allocate)
            handles = self._group.all_gather_object(handle)
            self._group.stage("opening of the peers' memory", lambda: self._open(handles))
        except WalkError as error:
            self.close_after(error)
            raise

    @property
    def addresses(self) -> tuple[int, ...]:
        """Each rank's memory as this rank's GPU addresses it, in rank order; empty once closed."""
        if self._own is None:
            return ()
        return tuple(self._opened.get(rank, self._own) for rank in range(self._group.world_size))

    def close(self) -> None:
        """Frees the memory once no rank maps it any more. Idempotent.

        Raises:
            SetupError: CUDA refused; the rest was done all the same. WalkTimeout: a rank is lost and may still hold its
            mapping, so this rank's memory stays allocated until the process ends.
        """
        if not self._closed:
            self._release(peers_are_here=True)

    def close_after(self, error: WalkError) -> None:
        """Closes after a failed set-up, whose error is the one to raise. A lost rank isn't waited for again."""
        with contextlib.suppress(WalkError):
            self._release(peers_are_here=not isinstance(error, WalkTimeout))

    def _allocate(self) -> bytes | None:
        with current_device(self._device):
            self._own = int(cuda_call("cudaMalloc", self.num_bytes))
            cuda_call("cudaMemset", self._own, 0, self.num_bytes)
            cuda_call("cudaDeviceSynchronize")
            if self._group.world_size == 1:
                return None
            # The struct's bytes by its address: `reserved` isn't exposed by every version of cuda-bindings.
            handle = cuda_call("cudaIpcGetMemHandle", self._own)
            return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def _open(self, handles: Sequence[bytes]) -> None:
        runtime = cuda_runtime()
        with current_device(self._device):
            for rank, data in enumerate(handles):
                if rank == self._group.rank:
                    continue
                handle = runtime.cudaIpcMemHandle_t()
                ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)
                try:
                    address = cuda_call("cudaIpcOpenMemHandle", handle, runtime.cudaIpcMemLazyEnablePeerAccess)
                except SetupError as error:
                    raise PlanUnavailableError(
                        f"the GPU memory of rank {rank} can't be opened ({error}); ranks in containers need a common "
                        "IPC namespace and each other's GPUs"
                    ) from error
                self._opened[rank] = int(address)

    def _release(self, *, peers_are_here: bool) -> None:
        self._closed = True
        failures: list[WalkError] = []

        def attempt(name: str, *arguments: Any) -> None:
            try:
                cuda_call(name, *arguments)
            except SetupError as error:
                failures.append(error)

        if self._device.index is not None:
            attempt("cudaSetDevice", self._device.index)
        attempt("cudaDeviceSynchronize")
        for address in self._opened.values():
            attempt("cudaIpcCloseMemHandle", address)
        self._opened.clear()
        if peers_are_here:
            try:
                self._group.barrier()
            except WalkTimeout as error:
                failures.append(error)
                peers_are_here = False
        if self._own is not None:
            # To free what a peer still maps is undefined, and a lost peer may only be stopped.
            if peers_are_here:
                attempt("cudaFree", self._own)
            else:
                logger.warning("%d bytes of shared GPU memory stay allocated: a rank is lost", self.num_bytes)
            self._own = None
        if failures:
            raise failures[0]

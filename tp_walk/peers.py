"""Device memory that every rank maps: mailboxes, and outputs that peers write.

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
from tp_walk.mailbox import MailboxLayout
from tp_walk.status import STATUS_BYTES, WalkStatus

logger = logging.getLogger(__name__)

# cudaMalloc may cut a smaller allocation out of a block that it shares with others, and an IPC handle maps the block.
IPC_GRANULARITY = 2 << 20

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE

FIRST_BLOCK = 1
# Added to the highest block number of any rank at reset: past the launch that failed on some ranks and not on others.
RESET_SKIP = 2


def cuda_call(name: str, *arguments: Any) -> Any:
    """`cuda.bindings.runtime.<name>(*arguments)`: its value, or None where it returns only a status.

    Raises:
        SetupError: the status wasn't success.
    """
    from cuda.bindings import runtime

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
            return ctypes.string_at(cuda_call("cudaIpcGetMemHandle", self._own).getPtr(), _HANDLE_BYTES)

    def _open(self, handles: Sequence[bytes]) -> None:
        from cuda.bindings import runtime

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


class StatusBlock:
    """The 64 bytes of mapped host memory that a kernel reports a failure to. `address` is the device's pointer."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import runtime

        flags = runtime.cudaHostAllocMapped | runtime.cudaHostAllocPortable
        with current_device(device):
            self._host: int | None = int(cuda_call("cudaHostAlloc", STATUS_BYTES, flags))
            self.clear()
            self.address = int(cuda_call("cudaHostGetDevicePointer", self._host, 0))

    def read(self) -> WalkStatus:
        """A host read, no synchronisation. The code is read before the rest, since the kernel writes it last."""
        if self._host is None:
            return WalkStatus()
        code = ctypes.c_uint32.from_address(self._host).value
        status = WalkStatus.decode(ctypes.string_at(self._host, STATUS_BYTES))
        return status if code else WalkStatus(clamped_row=status.clamped_row, clamped_block=status.clamped_block)

    def clear(self) -> None:
        """Only while no kernel of this rank runs."""
        if self._host is not None:
            ctypes.memset(self._host, 0, STATUS_BYTES)

    def close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            cuda_call("cudaFreeHost", host)


class PeerMailboxes:
    """Every rank's mailbox, mapped by all, and this rank's status block. Collective: construction, `reset`, `close`.

    group: the ranks, or None for this GPU alone. layout: its world_size is the group's.

    Raises: as PeerBuffer does.
    """

    def __init__(self, group: WalkGroup | None, layout: MailboxLayout, device: torch.device) -> None:
        self._group = group or WalkGroup(None, device)
        if layout.world_size != self._group.world_size:
            raise SetupError(f"a layout for {layout.world_size} ranks in a group of {self._group.world_size}")
        self._layout = layout
        self._device = device
        self._buffer = PeerBuffer(group, layout.num_bytes, device)
        self._status: StatusBlock | None = None
        try:
            self._group.stage("set-up of the mailboxes", self._start)
        except WalkError as error:
            self._buffer.close_after(error)
            self.close()
            raise

    @property
    def addresses(self) -> tuple[int, ...]:
        """Each rank's mailbox as this rank's GPU addresses it, in rank order."""
        return self._buffer.addresses

    @property
    def num_bytes(self) -> int:
        """Device bytes held."""
        return self._buffer.num_bytes

    @property
    def status_address(self) -> int:
        """The status block as this rank's GPU addresses it."""
        return 0 if self._status is None else self._status.address

    def status(self) -> WalkStatus:
        """What the kernels have reported since set-up or reset. No synchronisation."""
        return WalkStatus() if self._status is None else self._status.read()

    def check(self) -> None:
        """Raises WalkTimeout or WalkMismatch if a kernel has reported a failure. No synchronisation."""
        error = self.status().error(self._group.rank)
        if error is not None:
            raise error

    def block(self) -> int:
        """The number of the block to come. Synchronises."""
        value = ctypes.c_uint64()
        with current_device(self._device):
            cuda_call("cudaDeviceSynchronize")
            self._copy(ctypes.addressof(value), self._own + self._layout.block_offset)
        return value.value

    def reset(self) -> None:
        """Forgets a failure, once all ranks are alive and take part.

        Nobody clears its memory before every rank's launches are complete, nor launches before every memory is clear.

        Raises:
            WalkTimeout: a rank didn't take part. SetupError: CUDA refused.
        """
        blocks = self._group.all_gather_object(self._group.stage("wait for the walks before a reset", self.block))
        self.restart(max(blocks) + RESET_SKIP)

    def restart(self, block: int) -> None:
        """Collective: clears all words and goes on with block number `block`, the same on every rank. No walk runs."""
        self._group.stage("clearing of the mailboxes", lambda: self._clear(block))

    def close(self) -> None:
        """Frees everything, in the order that PeerBuffer.close keeps. Idempotent. Raises as that does."""
        try:
            self._buffer.close()
        finally:
            if self._status is not None:
                self._status.close()

    @property
    def _own(self) -> int:
        return self.addresses[self._group.rank]

    def _start(self) -> None:
        self._status = StatusBlock(self._device)
        self._clear(FIRST_BLOCK)

    def _clear(self, block: int) -> None:
        value = ctypes.c_uint64(block)
        with current_device(self._device):
            cuda_call("cudaMemset", self._own, 0, self._layout.num_bytes)
            for offset in (self._layout.block_offset, self._layout.first_block_offset):
                self._copy(self._own + offset, ctypes.addressof(value))
            cuda_call("cudaDeviceSynchronize")
        if self._status is not None:
            self._status.clear()

    def _copy(self, destination: int, source: int) -> None:
        from cuda.bindings import runtime

        cuda_call("cudaMemcpy", destination, source, 8, runtime.cudaMemcpyKind.cudaMemcpyDefault)

"""Every rank's mailbox, and this rank's status block: what the kernels of all ranks exchange tokens through."""

from __future__ import annotations

import ctypes
import threading

import torch

from tp_walk.errors import SetupError, WalkError
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MailboxLayout
from tp_walk.pair_test import check_pairs
from tp_walk.peer_memory import PeerBuffer, cuda_call, cuda_runtime, current_device
from tp_walk.status import STATUS_BYTES, WalkCode, WalkStatus
from tp_walk.topology import survey

FIRST_BLOCK = 1
# Added to the highest block number of any rank at reset: past the launch that failed on some ranks and not on others.
RESET_SKIP = 2


class StatusBlock:
    """The 64 bytes of mapped host memory that a kernel reports a failure to. `address` is the device's pointer."""

    def __init__(self, device: torch.device) -> None:
        runtime = cuda_runtime()
        flags = runtime.cudaHostAllocMapped | runtime.cudaHostAllocPortable
        self._lock = threading.Lock()  # threads that read, and one that closes
        with current_device(device):
            self._host: int | None = int(cuda_call("cudaHostAlloc", STATUS_BYTES, flags))
            self.clear()
            self.address = int(cuda_call("cudaHostGetDevicePointer", self._host, 0))

    def has_failed(self) -> bool:
        """A host read of one word, for every walk to make."""
        with self._lock:
            return self._host is not None and ctypes.c_uint32.from_address(self._host).value != WalkCode.OK

    def read(self) -> WalkStatus:
        """A host read, no synchronisation. The code is read before the rest, since the kernel writes it last."""
        with self._lock:
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
        with self._lock:
            host, self._host = self._host, None
        if host is not None:
            cuda_call("cudaFreeHost", host)


class PeerMailboxes:
    """Every rank's mailbox, mapped by all, and this rank's status block. Collective: construction, `reset`, `close`.

    group: the ranks, or None for this GPU alone. layout: its world_size is the group's.

    Raises:
        PlanUnavailableError: the ranks' GPUs have no peer access, or a path between two failed its self-test. Else as
        PeerBuffer does. The same on every rank.
    """

    def __init__(self, group: WalkGroup | None, layout: MailboxLayout, device: torch.device) -> None:
        self._group = group or WalkGroup(None, device)
        if layout.world_size != self._group.world_size:
            raise SetupError(f"a layout for {layout.world_size} ranks in a group of {self._group.world_size}")
        self._layout = layout
        self._device = device
        if self._group.world_size > 1:
            check_pairs(self._group, survey(self._group, device), device)
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
        if self._status is None or not self._status.has_failed():
            return
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
        cuda_call("cudaMemcpy", destination, source, 8, cuda_runtime().cudaMemcpyKind.cudaMemcpyDefault)

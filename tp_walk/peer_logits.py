"""Output buffers for full logits that every rank maps: each rank's walk kernel stores its columns into all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tp_walk.errors import WalkError, WalkInputError
from tp_walk.group import WalkGroup
from tp_walk.mailbox import HEADER_FIELDS
from tp_walk.peer_memory import PeerBuffer

# How full logits come about at world > 1, by batch: up to which batch, and how. "peers": the kernels store into all
# ranks' memory while the walk goes on; "collective": each stores its own columns, which are gathered afterwards. At
# every size measured the former is faster: a block took 57 instead of 88 µs at batch 1 and 301 instead of 760 at 64
# (T = 1, γ = 7, V = 151,936 on two H200s, experiments/full_logits.py).
FULL_LOGITS: tuple[tuple[float, Literal["peers", "collective"]], ...] = ((math.inf, "peers"),)

# Ranks that walk with different buffers find out: a buffer's number travels in the header, where 0 is none.
_NUMBERS = (1 << HEADER_FIELDS["logits_buffer"].bits) - 1


def full_logits_by(batch: int) -> Literal["peers", "collective"]:
    """How a walk of this batch makes full logits."""
    return next(how for most, how in FULL_LOGITS if batch <= most)


@dataclass(frozen=True)
class RankBuffers:
    """One buffer: where each rank's lies, as this rank's GPU addresses it, and the number that all ranks know it by."""

    addresses: tuple[int, ...]
    number: int


class PeerLogits:
    """A runtime's buffers. `make`, `staging` where it makes one, and `close` are collectives.

    What a peer writes, and when, is the kernel's affair: csrc/mailbox.cuh. From a failed walk until the reset peers may
    still write for a moment.
    """

    def __init__(self, group: WalkGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._buffers: list[PeerBuffer] = []
        self._by_address: dict[int, RankBuffers] = {}
        self._staging: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes held."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def make(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on this rank's GPU that all ranks may write. Its memory is there until `close`.

        Raises:
            WalkInputError: a graph is being captured. Else as PeerBuffer does.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise WalkInputError(
                "buffers for full logits can't be made while a graph is captured: walk once before with the same "
                "arguments, or walk into runtime.logits_buffer()"
            )
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        buffer = PeerBuffer(self._group, num_bytes, self._device)
        number = len(self._buffers) % _NUMBERS + 1
        self._buffers.append(buffer)
        own = buffer.addresses[self._group.rank]
        self._by_address[own] = RankBuffers(buffer.addresses, number)
        return device_bytes(own, num_bytes, self._device)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def find(self, tensor: torch.Tensor) -> RankBuffers | None:
        """Of a contiguous tensor that begins where one from `make` does; None for any other memory."""
        return self._by_address.get(tensor.data_ptr())

    def staging(self, most: tuple[int, int, int], like: torch.Tensor) -> tuple[torch.Tensor, RankBuffers]:
        """A tensor of the shape and dtype of `like`, for logits on their way into the caller's own memory.

        most: the largest shape that will be asked for; so much is allocated, at the first call. All calls return the
        same memory, since graphs keep its address.

        Raises as `make`.
        """
        if self._staging is None:
            self._staging = self.make(most, like.dtype)
        return self._staging.view(-1)[: like.numel()].view(like.shape), self._by_address[self._staging.data_ptr()]

    def close(self) -> None:
        """Frees everything; idempotent. Raises what the first PeerBuffer that can't close does, after the others."""
        self._staging = None
        self._by_address.clear()
        failure: WalkError | None = None
        while self._buffers:
            try:
                self._buffers.pop().close()
            except WalkError as error:
                failure = failure or error
        if failure is not None:
            raise failure


@dataclass(frozen=True)
class _DeviceBytes:
    """Memory in the words of the CUDA array interface, by which torch makes a tensor of it without a copy."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def device_bytes(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """`[num_bytes]` uint8: a view of memory of a GPU that isn't torch's own."""
    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)

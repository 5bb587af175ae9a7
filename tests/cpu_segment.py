"""The memory through which ranks that are processes walk on the CPU (cpu_exchange.py)."""

from __future__ import annotations

import mmap

from tp_walk.mailbox import MailboxLayout
from tp_walk.peers import FIRST_BLOCK
from tp_walk.status import STATUS_BYTES, WalkStatus

_MASK64 = (1 << 64) - 1


class Segment:
    """Every rank's mailbox and status block, shared by all processes."""

    def __init__(self, layout: MailboxLayout, first_block: int = FIRST_BLOCK) -> None:
        self.layout = layout
        self._stride = layout.num_bytes + STATUS_BYTES
        self.bytes = memoryview(mmap.mmap(-1, layout.world_size * self._stride))
        self._numbers = self.bytes.cast("Q")
        for rank in range(layout.world_size):
            self.clear(rank, first_block)

    def clear(self, rank: int, block: int) -> None:
        start = rank * self._stride
        self.bytes[start : start + self._stride] = bytes(self._stride)
        self.store(rank, self.layout.block_offset, block)
        self.store(rank, self.layout.first_block_offset, block)

    def load(self, rank: int, offset: int) -> int:
        return self._numbers[(rank * self._stride + offset) // 8]

    def store(self, rank: int, offset: int, value: int) -> None:
        self._numbers[(rank * self._stride + offset) // 8] = value & _MASK64

    # Python has no 16-byte access. An invalid tag around the change of the key, and a second look at the tag, make two
    # 8-byte ones as good, where stores become visible in their order (x86; elsewhere the interpreter's own pace helps).
    def store_word(self, rank: int, offset: int, key: int, tag: int) -> None:
        self.store(rank, offset + 8, 0)
        self.store(rank, offset, key)
        self.store(rank, offset + 8, tag)

    def load_word(self, rank: int, offset: int) -> tuple[int, int]:
        while True:
            tag = self.load(rank, offset + 8)
            key = self.load(rank, offset)
            if self.load(rank, offset + 8) == tag:
                return key, tag

    def status(self, rank: int) -> WalkStatus:
        start = rank * self._stride + self.layout.num_bytes
        return WalkStatus.decode(self.bytes[start : start + STATUS_BYTES])

    def write_status(self, rank: int, status: WalkStatus) -> None:
        start = rank * self._stride + self.layout.num_bytes
        self.bytes[start : start + STATUS_BYTES] = status.encode()

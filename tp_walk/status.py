"""The status block, through which a kernel tells its host of a failure, and the poison word that tells its peers.

A failure never traps: the kernel writes what it waited for into 64 bytes of mapped host memory and drains. The numbers
here reach csrc/mailbox.cuh as macros, as those of `MailboxLayout` do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from tp_walk.errors import WalkError, WalkMismatch, WalkOverlap, WalkTimeout
from tp_walk.mailbox import HEADER_FIELDS, BitField, describe_tag, header_field

STATUS_BYTES = 64


class WalkCode(IntEnum):
    """What ended a walk. The kernel writes it last, so that a nonzero code means that the rest is there."""

    OK = 0
    TIMEOUT = 1
    MISMATCH = 2
    OVERLAP = 3


class Wait(IntEnum):
    """The word that was waited for, or found to disagree: a rank's header, a CTA's slot or part of a log-sum-exp, a
    rank's result or part, the arrival of a rank's base logits, a token of a row that another rank walks, the logits of
    a rank's CTA.
    """

    HEADER = 1
    SLOT = 2
    RESULT = 3
    ARRIVAL = 4
    TOKEN = 5
    LOGITS = 6


# name -> (byte offset, struct format), little endian.
STATUS_FIELDS: dict[str, tuple[int, str]] = {
    "code": (0, "I"),
    "origin": (4, "I"),
    "wait": (8, "I"),
    "source": (12, "I"),
    "step": (16, "I"),
    "row": (20, "I"),
    "field": (24, "I"),
    "clamped_row": (28, "I"),
    "expected": (32, "Q"),
    "seen": (40, "Q"),
    "block": (48, "Q"),
    "clamped_block": (56, "Q"),
}

# The key of a poison word; its tag is the failed block's, so it is never 0.
POISON_FIELDS: dict[str, BitField] = {
    "code": BitField(0, 0, 8),
    "wait": BitField(0, 8, 8),
    "source": BitField(0, 16, 8),
    "step": BitField(0, 24, 8),
    "row": BitField(0, 32, 16),
    "field": BitField(0, 48, 8),
}


def status_defines() -> dict[str, int]:
    """The macros of the status block and the poison word."""
    macros = {f"STATUS_{name.upper()}_OFFSET": offset for name, (offset, _) in STATUS_FIELDS.items()}
    macros |= {f"POISON_{name.upper()}_SHIFT": place.shift for name, place in POISON_FIELDS.items()}
    macros |= {f"POISON_{name.upper()}_BITS": place.bits for name, place in POISON_FIELDS.items()}
    macros |= {f"CODE_{code.name}": code.value for code in WalkCode}
    macros |= {f"WAIT_{wait.name}": wait.value for wait in Wait}
    return {f"TPW_{name}": value for name, value in macros.items()}


@dataclass(frozen=True)
class WalkStatus:
    """A rank's status block, decoded.

    code: WalkCode. origin: the rank that failed first, as far as this one knows. wait: Wait. source: the
    rank waited for, or the CTA. step, row: where. field: bit position of a header mismatch. expected, seen: the two
    tags, or in a header mismatch the two keys; known on the origin alone. block: its number. clamped_block,
    clamped_row: the last block with an anchor out of range, which was clamped; 0 when there was none.
    """

    code: int = 0
    origin: int = 0
    wait: int = 0
    source: int = 0
    step: int = 0
    row: int = 0
    field: int = 0
    clamped_row: int = 0
    expected: int = 0
    seen: int = 0
    block: int = 0
    clamped_block: int = 0

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> WalkStatus:
        """Reads STATUS_BYTES bytes."""
        return cls(**{name: struct.unpack_from("<" + kind, data, at)[0] for name, (at, kind) in STATUS_FIELDS.items()})

    def encode(self) -> bytes:
        """The STATUS_BYTES bytes that `decode` reads."""
        data = bytearray(STATUS_BYTES)
        for name, (at, kind) in STATUS_FIELDS.items():
            struct.pack_into("<" + kind, data, at, getattr(self, name))
        return bytes(data)

    def poison_key(self) -> int:
        """The key of the poison word that tells peers of this failure."""
        return sum(place.pack(getattr(self, name)) for name, place in POISON_FIELDS.items())

    @classmethod
    def from_poison(cls, origin: int, key: int, block: int) -> WalkStatus:
        """What a rank knows of a failure that rank `origin` reported."""
        return cls(origin=origin, block=block, **{name: place.unpack(key) for name, place in POISON_FIELDS.items()})

    def message(self, rank: int) -> str:
        """The failure in words, as told by `rank`, whose status block this is."""
        told = "" if self.origin == rank else f"rank {rank} was told by a peer: "
        try:
            text, tags = self._in_words()
        except ValueError:
            # Wrong bits can say anything; what matters is that the block isn't taken for good.
            text = f"rank {self.origin} reports what no kernel writes (code {self.code}, wait {self.wait}, field "
            text += f"{self.field}): a poison word is corrupt"
            tags = ""
        return f"block {self.block}: {told}{text}{tags if self.origin == rank else ''}"

    def error(self, rank: int) -> WalkError | None:
        """The error to raise on `rank`, or None when the code is OK."""
        if self.code == WalkCode.OK:
            return None
        kinds: dict[int, type[WalkError]] = {WalkCode.TIMEOUT: WalkTimeout, WalkCode.OVERLAP: WalkOverlap}
        return kinds.get(self.code, WalkMismatch)(self.message(rank))

    def _in_words(self) -> tuple[str, str]:
        """What happened, and what the origin alone knows of it. Raises ValueError where it can't have."""
        code, wait = WalkCode(self.code), Wait(self.wait)
        what = {
            Wait.HEADER: f"the header of rank {self.source}",
            Wait.SLOT: f"CTA {self.source} of the same GPU at step {self.step}, row {self.row}",
            Wait.RESULT: f"the result of rank {self.source} at step {self.step}, row {self.row}",
            Wait.ARRIVAL: f"the base logits of rank {self.source}, part {self.row}",
            Wait.TOKEN: f"the token of rank {self.source} at step {self.step}, row {self.row}",
            Wait.LOGITS: f"the logits of rank {self.source}",
        }[wait]
        tags = f"expected tag {describe_tag(self.expected)}, last saw {describe_tag(self.seen)}"
        if code == WalkCode.OVERLAP:
            return f"rank {self.origin} ran two walks of this runtime at once; replay its graphs one after another", ""
        if code == WalkCode.TIMEOUT:
            return f"rank {self.origin} waited past its deadline for {what}", f": {tags}"
        if wait != Wait.HEADER:
            return f"rank {self.origin} and {what} went through different tokens before that step", f": {tags}"
        name = header_field(self.field)
        place = HEADER_FIELDS[name]
        values = place.unpack(self.expected), place.unpack(self.seen)
        text = f"ranks {self.origin} and {self.source} were given different {name}"
        return text, f": {values[0]} and {values[1]}" if place.word == 0 else ""

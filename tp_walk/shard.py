"""The vocabulary → each rank's rows of W2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tp_walk.errors import WalkInputError


@dataclass(frozen=True)
class Shard:
    """Rows `[start, stop)` of W2, in global ids. Empty when start == stop."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def shard_bounds(vocab_size: int, world_size: int) -> list[Shard]:
    """The default split: V padded to a multiple of lcm(64, world), divided evenly, bounds clipped to V.

    This is how engines shard a vocabulary-parallel head, so their slices of the base logits fit as they are.
    """
    unit = math.lcm(64, world_size)
    per_rank = -(-vocab_size // unit) * unit // world_size
    return [
        Shard(min(rank * per_rank, vocab_size), min((rank + 1) * per_rank, vocab_size)) for rank in range(world_size)
    ]


def check_shards(shards: Sequence[Shard], vocab_size: int) -> None:
    """Raises WalkInputError unless `shards`, in rank order, tile `[0, vocab_size)`.

    Every start but an empty shard's is a multiple of 4: one Philox call yields the noise of four neighbouring ids, and
    a rank that began inside such a group would draw it for ids that it doesn't own.
    """
    expected = 0
    for rank, shard in enumerate(shards):
        if shard.start != expected or shard.stop < shard.start:
            raise WalkInputError(
                f"rank {rank}'s shard is [{shard.start}, {shard.stop}); it must start at {expected} and not end before "
                f"it starts, as shards tile [0, {vocab_size}) in rank order"
            )
        if shard.width and shard.start % 4:
            raise WalkInputError(f"rank {rank}'s shard starts at {shard.start}; starts must be multiples of 4")
        expected = shard.stop
    if expected != vocab_size:
        raise WalkInputError(f"the shards end at {expected}; they must cover [0, {vocab_size})")

"""The vocabulary's split over ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_walk.errors import WalkInputError
from tp_walk.shard import Shard, check_shards, shard_bounds


@pytest.mark.parametrize(
    ("vocab_size", "world_size", "width"), [(151_936, 2, 75_968), (129_280, 8, 16_160), (248_320, 4, 62_080)]
)
def test_known_splits(vocab_size: int, world_size: int, width: int) -> None:
    assert shard_bounds(vocab_size, world_size) == [
        Shard(rank * width, (rank + 1) * width) for rank in range(world_size)
    ]


def test_the_last_shard_is_clipped_and_later_ones_are_empty() -> None:
    assert shard_bounds(2381, 2) == [Shard(0, 1216), Shard(1216, 2381)]
    assert shard_bounds(66, 3) == [Shard(0, 64), Shard(64, 66), Shard(66, 66)]


@given(st.integers(1, 300_000), st.integers(1, 16))
def test_the_default_split_tiles_the_vocabulary(vocab_size: int, world_size: int) -> None:
    shards = shard_bounds(vocab_size, world_size)
    check_shards(shards, vocab_size)
    padded = -(-vocab_size // math.lcm(64, world_size)) * math.lcm(64, world_size)
    assert len(shards) == world_size
    assert all(shard.width <= padded // world_size for shard in shards)


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([(0, 8), (12, 20)], "rank 1's shard is .12, 20.; it must start at 8"),
        ([(0, 8), (4, 20)], "rank 1's shard is .4, 20.; it must start at 8"),
        ([(4, 20)], "rank 0's shard is .4, 20.; it must start at 0"),
        ([(0, 8), (8, 4), (4, 20)], "rank 1's shard is .8, 4."),
        ([(0, 6), (6, 20)], "rank 1's shard starts at 6; starts must be multiples of 4"),
        ([(0, 8), (8, 16)], r"the shards end at 16; they must cover \[0, 20\)"),
        ([(0, 8), (8, 24)], "the shards end at 24"),
    ],
)
def test_shards_that_do_not_tile_are_refused(shards: list[tuple[int, int]], why: str) -> None:
    with pytest.raises(WalkInputError, match=why):
        check_shards([Shard(*bounds) for bounds in shards], 20)


def test_empty_shards_may_start_anywhere() -> None:
    check_shards([Shard(0, 0), Shard(0, 5), Shard(5, 5)], 5)

"""What all tests share: one thread, and where the golden cases are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """The golden cases: `TP_WALK_CASES`, or `shared/cases` beside the repository; skips where there are none."""
    repository = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TP_WALK_CASES", repository.parent / "shared" / "cases"))
    if not folder.is_dir():
        pytest.skip(f"no golden cases at {folder} (TP_WALK_CASES names another folder)")
    return folder


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(world_size)`: ranks that live as long as the session. Tests that break their ranks make their own."""
    pools: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield of
    for pool in pools.values():
        pool.close()

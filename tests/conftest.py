"""What all tests share: one thread, and where the golden cases are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import golden
import pytest
import torch
from rank_pool import RankPool

from tp_walk import selection
from tp_walk.topology import Gpu, Link

torch.set_num_threads(1)


@pytest.fixture
def two_h200s(monkeypatch: pytest.MonkeyPatch) -> None:
    """What selection sees where two of them are linked, with a driver that no table was measured with."""
    gpus = [Gpu(str(index), "NVIDIA H200", "host", False, "590") for index in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selection, "gpu_of", lambda device: gpus[device.index])
    monkeypatch.setattr(selection, "link_between", lambda own, peer: Link("NVLink", 18))
    monkeypatch.setattr(selection, "software", lambda: {"driver": "590"})


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """The golden cases; skips where there are none."""
    folder = golden.folder()
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

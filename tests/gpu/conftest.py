"""What the GPU tests share: ranks that stay alive, and their kernels compiled by all cores at once."""

from __future__ import annotations

from collections.abc import Callable

import golden
import pytest
import torch
from rank_pool import RankPool
from walk_lab import SHAPES, compile_ahead, random_shapes

from tp_walk import precompile


@pytest.fixture(scope="session")
def kernels() -> None:
    worlds = [1, 2] if torch.cuda.device_count() > 1 else [1]
    shapes = {*SHAPES, *golden.shapes(golden.folder()), *random_shapes()}
    compile_ahead(shapes, worlds, precompile.current_gpu())


@pytest.fixture(scope="session")
def ranks(rank_pool: Callable[[int], RankPool], kernels: None) -> RankPool:
    """A rank on each of two GPUs, or on the one that is here. A walk of a world of one is run by each of them alone."""
    return rank_pool(min(2, torch.cuda.device_count()))

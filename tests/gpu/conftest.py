"""What the GPU tests share: ranks that stay alive, and their kernels compiled by all cores at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from walk_lab import SHAPES

from tp_walk import precompile


@pytest.fixture(scope="session")
def kernels() -> None:
    """Fills the cache with what SHAPES need: a process compiles one kernel at a time, and ranks would do it in turn."""
    target = precompile.current_gpu()
    worlds = [1, 2] if torch.cuda.device_count() > 1 else [1]
    jobs = {
        (job.source, job.macros): job
        for shape in SHAPES
        for job in precompile.jobs(shape.vocab_size, shape.markov_rank, worlds, 64, shape.roundings, target)
    }
    precompile.compile_together(jobs.values(), target.arch)


@pytest.fixture(scope="session")
def ranks(rank_pool: Callable[[int], RankPool], kernels: None) -> RankPool:
    """A rank on each of two GPUs, or on the one that is here. A walk of a world of one is run by each of them alone."""
    return rank_pool(min(2, torch.cuda.device_count()))

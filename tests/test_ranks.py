"""Ranks started from one process."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tp_walk.errors import WalkError
from tp_walk.ranks import run_ranks


def add_up(start: int) -> tuple[int, int]:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the second one fails")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # the other rank would wait for ever


def test_every_rank_runs_in_one_group_and_results_come_in_order() -> None:
    assert run_ranks(2, add_up, 10) == [(0, 21), (1, 21)]


@pytest.mark.parametrize(("how", "why"), [("raise", "ValueError: the second one fails"), ("kill", "SIGKILL")])
def test_one_failing_rank_ends_all_and_is_named(how: str, why: str) -> None:
    with pytest.raises(WalkError, match=f"rank 1 failed: .*{why}"):
        run_ranks(2, fail, how)

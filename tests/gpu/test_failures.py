"""The failure contract on two GPUs, where no rank has to die for it. experiments/fault_matrix.py has the rest."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fault_cases import Case, live
from fault_gpu_cases import SETTING, gpu_cases
from fault_matrix import common_cases
from fault_ranks import Life, Run
from fault_scene import Note
from fault_verdict import judge
from rank_pool import RankPool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SLOW_START_S = 3.0
LOSES_A_RANK = ("killed", "stopped")


def _live(case: Case) -> list[Note]:
    return live(Life(dist.get_rank(), dist.get_world_size(), None), case)


def cases() -> list[Case]:
    found = [*common_cases(SETTING, SLOW_START_S), *gpu_cases()]
    # NCCL sets itself up for seconds, and a held walk needs a build of its own.
    slow = ("NCCL", "corrupted result", "garbage", "corrupted poison", "withholds")
    return [case for case in found if case.fault not in LOSES_A_RANK and not case.fault.startswith(slow)]


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.fault}, {case.phase}")
def test_a_fault_ends_in_an_error_on_every_rank(ranks: RankPool, case: Case) -> None:
    verdict = judge(case, Run(results=ranks(_live, case)))
    assert verdict.outcome == "late" or not verdict.wrong, verdict

"""The golden cases beside the repository, through the check that lies with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from golden import cases_for, load_check

from tp_walk import reference

PLANS = ("reference", "reference_int8")


def faults(folder: Path, plan: str, layout: str) -> dict[str, str]:
    """What this rank finds wrong with each case, alone or as one of a world."""
    check = load_check(folder)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    arguments = SimpleNamespace(plan=plan, layout=layout, tokens_only=False)
    found = {
        path.name: check.run_case(str(path), arguments, torch.device("cpu"), rank, world)
        for path in cases_for(folder, plan)
    }
    assert len(found) >= 9
    return {name: fault for name, fault in found.items() if fault}


@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_case_on_one_rank(cases_dir: Path, plan: str, layout: str) -> None:
    assert faults(cases_dir, plan, layout) == {}


@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", [2, 3])
def test_every_case_on_several_ranks(cases_dir: Path, world: int, plan: str, layout: str, rank_pool) -> None:
    assert rank_pool(world)(faults, cases_dir, plan, layout) == [{}] * world


def test_the_check_itself_under_torchrun(cases_dir: Path) -> None:
    repository = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    options = ["--device", "cpu", "--plan", "reference_int8", "--layout", "sharded"]
    done = subprocess.run(
        [*launch, str(Path(__file__).parent / "end_with_verdict.py"), str(cases_dir / "check.py"), *options],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 cases agree (world 2, cpu, plan reference_int8, sharded, all)" in done.stdout


def test_a_wrong_answer_is_noticed(cases_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_bias = reference.add_bias
    monkeypatch.setattr(reference, "add_bias", lambda base, bias, rounding: add_bias(base, bias, "once"))
    assert "case-17-int8exact-greedy.npz" in faults(cases_dir, "reference", "full")

"""Ranks that fail, at every phase that the definitions have: the others report, and nobody gets other tokens unawares.

The matrix itself is experiments/fault_matrix.py, which also runs it on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fault_matrix
import pytest
import torch.distributed as dist
from fault_cases import Case, Expected, live
from fault_matrix import CPU, LIMIT_S, common_cases, cpu_cases, run_case, set_up_cases, stages_of
from fault_ranks import Life, Ranks, Run
from fault_scene import STAND_IN, Note
from fault_verdict import Verdict, judge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops and resumes processes as Linux does")

SLOW_START_S = 2.5


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param, fault_matrix.nothing_to_prepare, victim=1, substitutes=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    made = Ranks(2, fault_matrix.nothing_to_prepare, victim=1, substitutes=2)
    yield made
    made.close()


def assert_kept(row: fault_matrix.Row) -> None:
    """How fast a rank reports is the experiment's to judge: this machine may be busy."""
    assert row.verdict.outcome == "late" or not row.verdict.wrong, row.verdict


def named(case: Case) -> str:
    return f"{case.fault}, {case.phase}"


@pytest.mark.parametrize("case", [*common_cases(CPU, SLOW_START_S), *cpu_cases()], ids=named)
def test_a_fault_while_walking(two_ranks: Ranks, case: Case) -> None:
    assert_kept(run_case(two_ranks, case))


@pytest.mark.parametrize("action", ["killed", "raises"])
def test_a_fault_at_each_stage_of_set_up(two_ranks: Ranks, action: str) -> None:
    stages = stages_of(two_ranks, CPU)
    assert len(stages) >= 5
    for case in set_up_cases(CPU, stages):
        if case.fault == action:
            assert_kept(run_case(two_ranks, case))


def test_a_rank_that_stops_in_set_up(ranks: Ranks) -> None:
    (case,) = [case for case in set_up_cases(CPU, ["load of W1"]) if case.fault == "stopped"]
    row = run_case(ranks, case)
    assert_kept(row)
    assert row.verdict.message.startswith("rank 0 waited 4.0 s at most for rank 1: ")


@pytest.mark.parametrize("action", ["killed", "stopped"])
def test_a_rank_among_several_is_named(ranks: Ranks, action: str) -> None:
    (case,) = [case for case in cpu_cases() if named(case) == f"{action}, step 3 of 7"]
    row = run_case(ranks, case)
    assert_kept(row)
    assert "for rank 1: " in row.verdict.message


# ---- the harness -----------------------------------------------------------------------------------------------------


def test_the_outer_limit_ends_a_rank_that_hangs(two_ranks: Ranks) -> None:
    run = two_ranks.run(_hangs, None, 2.0)
    assert run.hung == [1]
    assert run.results[0] == "done"
    assert two_ranks.run(_lives_on, None, LIMIT_S).results == [0, 1]


def _hangs(life: Life, case: Any) -> str:
    if life.rank == 1:
        while True:
            pass
    return "done"


def _lives_on(life: Life, case: Any) -> int:
    return life.rank


def test_a_stopped_rank_is_resumed_when_the_others_ask_for_it(two_ranks: Ranks) -> None:
    run = two_ranks.run(_meets_again, None, LIMIT_S)
    assert run.results == ["met", "met"]
    assert run.faulted_at is not None


def _meets_again(life: Life, case: Any) -> str:
    if life.rank == 1:
        life.stop()
    else:
        life.resume_victim()
    dist.barrier()
    return "met"


def test_what_a_rank_raises_is_no_outcome(two_ranks: Ranks) -> None:
    broken = Case("none", "walk", CPU, _divides_by_zero, Expected())
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        two_ranks.run(live, broken, LIMIT_S)
    assert run_case(two_ranks, broken).verdict.outcome == "broken"


def _divides_by_zero(scene: Any, arguments: dict[str, Any]) -> None:
    raise ZeroDivisionError


GOOD = Note("block 1", None, "", 0.0, 1.0, [[5]])
FAILED = Note("block 2", "WalkTimeout", "rank 0 waited for rank 1", 1.0, 2.5, [[3]], anchored=True, right=False)
TOLD = Expected(("WalkTimeout",), "rank 1", 1.5)
RESET = Note("reset", None, "", 3.0, 3.1)
STANDS_IN = replace(GOOD, part=STAND_IN)


@pytest.mark.parametrize(
    ("expected", "first", "outcome", "why"),
    [
        (TOLD, [GOOD, FAILED], "reported", ""),
        (TOLD, [GOOD], "silent", "rank 0 reported nothing"),
        (Expected(), [GOOD], "no error", ""),
        (Expected(), [GOOD, FAILED], "another error", "raised WalkTimeout in block 2"),
        (TOLD, [GOOD, replace(FAILED, kind="WalkMismatch")], "another error", "raised WalkMismatch"),
        (TOLD, [GOOD, replace(FAILED, error="something is lost")], "unclear", "doesn't say 'rank 1'"),
        (TOLD, [GOOD, replace(FAILED, ended=9.0)], "late", "reported after 8.0 s; the limit is 3.5 s"),
        (TOLD, [GOOD, replace(FAILED, anchored=False)], "wrong", "block 2, which failed, aren't the anchors"),
        (TOLD, [replace(GOOD, right=False), FAILED], "wrong", "block 1 is wrong, and no error"),
        (replace(TOLD, next_block=True), [replace(GOOD, right=False), FAILED], "reported", ""),
        (replace(TOLD, next_block=True), [FAILED, replace(GOOD, right=False)], "wrong", "no error"),
        (TOLD, [FAILED, RESET, GOOD], "reported", ""),
        (TOLD, [FAILED, RESET, FAILED], "wrong", "WalkTimeout in block 2 after the reset"),
        (TOLD, [FAILED, STANDS_IN], "reported", ""),
        (TOLD, [FAILED, replace(FAILED, part=STAND_IN)], "wrong", "nothing stands in: WalkTimeout"),
        (TOLD, [FAILED, replace(STANDS_IN, right=False)], "wrong", "stand-in is wrong, and no error"),
        (replace(TOLD, may_pass=True), [GOOD], "no error", ""),
    ],
)
def test_the_judge_knows_the_contract(expected: Expected, first: list[Note], outcome: str, why: str) -> None:
    case = Case("stopped", "walk", CPU, _divides_by_zero, expected)
    verdict = judge(case, Run(results=[first, [GOOD]]))
    assert verdict.outcome == outcome
    assert why in verdict.wrong
    assert bool(verdict.wrong) == bool(why)


def test_the_judge_times_from_the_fault() -> None:
    case = Case("stopped", "walk", CPU, _divides_by_zero, TOLD)
    run = Run(faulted_at=0.5, results=[[GOOD, FAILED], None])
    assert judge(case, run) == Verdict("reported", 2.0, "", "rank 0 waited for rank 1")
    assert judge(case, Run(results=[None, None], hung=[0])).outcome == "hung"

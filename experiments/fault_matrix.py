"""Does a rank that fails ever hang the others, or leave two ranks with different tokens and no error?

    python experiments/fault_matrix.py [--device cuda] [--world 2] [--only REGEX] [--slow-start 60]

Every fault at every phase, each in its own runtime of real ranks (processes), under an outer limit. The table of
fault × phase → outcome goes to experiments/results; the exit status is 1 if a case breaks the contract.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import fault_cases as cases
import fault_gpu_cases as gpu_cases
import torch
from fault_cases import Case, Expected
from fault_ranks import Ranks
from fault_scene import GAMMA, VICTIM, Setting
from fault_verdict import Verdict, judge
from rich.console import Console

from tp_walk import Deadline
from tp_walk.results import Column, ResultTable, environment

RESULTS = Path(__file__).resolve().parent / "results"

# Short, so that the matrix is; long enough for a rank that still loads its kernels.
CPU = Setting("cpu", "reference", 60, 8, Deadline(startup_s=4.0, steady_s=1.5))

LIMIT_S = 30.0  # of a case: one that reaches it hangs

COLUMNS = (
    Column("fault", "rank 1"),
    Column("phase", "phase"),
    Column("count", "cases"),
    Column("outcome", "outcome on the other ranks"),
    Column("report_s", "slowest report, s", 2),
    Column("deadline_s", "deadline, s"),
)

METHOD = (
    "Each case is a runtime of its own; rank 1 is the one with the fault. Times run from the fault, or where there is "
    "no single moment from the call, to the last other rank's report. Deadlines are short for the matrix's sake: "
    "{startup_s} s for set-up, first walk and teardown, {steady_s} s otherwise."
)

LOST = "rank 1"


@dataclass(frozen=True)
class Row:
    """A case and what came of it."""

    case: Case
    verdict: Verdict

    @property
    def group(self) -> tuple[str, str, str]:
        """What cases have in common that are printed as one: the fault, roughly the phase, the outcome."""
        return self.case.fault, re.sub(r"^step .*", "in a step", self.case.phase.split(":")[0]), self.verdict.outcome

    def details(self) -> dict[str, Any]:
        return {
            "phase": self.case.phase,
            "report_s": self.verdict.report_s,
            "message": self.verdict.message,
            "wrong": self.verdict.wrong,
        }


def set_up_cases(setting: Setting, stages: list[str]) -> Iterator[Case]:
    """Every stage of set-up, and every way to fail in it."""
    startup_s = setting.deadline.startup_s
    for stage in stages:
        for action, expected in (
            ("killed", Expected(("WalkTimeout",), LOST, startup_s)),
            ("stopped", Expected(("WalkTimeout",), LOST, startup_s)),
            ("raises", Expected(("SetupError",), _injected(stage), startup_s, victims_too=True)),
        ):
            arguments = {"stage": stage, "action": action}
            yield Case(action, f"set-up: {stage}", setting, cases.lost_in_set_up, expected, arguments)


def _injected(stage: str) -> str:
    """What all ranks say when rank 1 raises at the beginning of a stage. In the self-test the other side fails, too."""
    on = "rank 0: .*; rank 1" if stage == "pair self-test" else "rank 1"
    return f"failed on {on}: .*injected"


def common_cases(setting: Setting, slow_start_s: float) -> Iterator[Case]:
    """What can be done to any plan."""
    steady_s, startup_s = setting.deadline.steady_s, setting.deadline.startup_s
    for action in ("killed", "stopped"):
        expected = Expected(("WalkTimeout",), LOST, steady_s)
        yield Case(action, "between blocks", setting, cases.lost_between_blocks, expected, {"action": action})
    yield from differing_cases(setting)
    yield Case(
        "another rounding",
        "set-up",
        setting,
        cases.opened_otherwise,
        Expected(("WalkMismatch",), "rounding: 'engine' on rank 0, 'once' on rank 1", startup_s, victims_too=True),
        {"different": {"rounding": "once"}},
    )
    told = Expected(("WalkMismatch", "WalkTimeout"), "rank 1|ranks 0 and 1|ranks 1 and 0", steady_s)
    yield Case("one block fewer", "walk", setting, cases.one_block_fewer, told)
    yield Case("one block more", "walk", setting, cases.one_block_more, told, {"late_s": steady_s + 0.5})
    patient = replace(setting, deadline=Deadline(startup_s=slow_start_s + 30.0, steady_s=steady_s))
    fault, arguments = f"starts {slow_start_s:.0f} s late", {"skew_s": slow_start_s}
    yield Case(fault, "first block", patient, cases.slow_to_start, Expected(), arguments)


def differing_cases(setting: Setting) -> Iterator[Case]:
    """Arguments of a walk that differ on rank 1, by the header field that must be named."""
    steady_s = setting.deadline.steady_s
    for fault, names, different in (
        ("another batch", "batch", {"batch": 2}),
        ("another γ", "gamma", {"gamma": 5}),
        ("other anchors", "anchors", {"anchor": 4}),
        ("other temperatures", "temperatures", {"temperatures": (0.0, 1.0, 0.71)}),
        ("no temperatures", "sampled|temperatures", {"temperatures": None}),
        ("another noise key", "key", {"key": 6}),
        ("another noise offset", "offset", {"offset": 77}),
        ("other noise rows", "rows", {"rows": 1}),
        ("another num_valid", "num_valid|batch", {"valid": 2}),
        ("wants logits", "logits", {"logits": "local"}),
        ("wants logits of other rows", "logits_rows", {"logits": "local", "logits_rows": "sampled"}),
    ):
        says = rf"(different|disagree on) (noise )?({names})"
        expected = Expected(("WalkMismatch",), says, steady_s, victims_too=True)
        arguments: dict[str, Any] = {"different": different}
        if names == "logits_rows":
            arguments["alike"] = {"logits": "local"}
        yield Case(fault, "walk", setting, cases.given_something_else, expected, arguments)
    # A plan that asks nobody leaves the others waiting for its rank; the definitions all ask.
    on_cpu = setting.device == "cpu"
    other = "reference_int8" if on_cpu else "int8"
    expected = Expected(("WalkMismatch" if on_cpu else "WalkTimeout",), "plan" if on_cpu else LOST, steady_s)
    arguments = {"different": {"plan": other}, "plans": [setting.plan, other]}
    yield Case("another plan", "walk", setting, cases.given_something_else, expected, arguments)


def cpu_cases() -> Iterator[Case]:
    """What only the definitions can be asked, whose exchanges are calls."""
    for step in (0, GAMMA // 2, GAMMA - 1):
        for action in ("killed", "stopped"):
            expected = Expected(("WalkTimeout",), LOST, CPU.deadline.steady_s)
            arguments = {"step": step, "action": action}
            yield Case(action, f"step {step} of {GAMMA}", CPU, cases.lost_in_a_step, expected, arguments)
    for action in ("killed", "stopped"):
        yield Case(action, "teardown", CPU, cases.lost_at_the_end, Expected(), {"action": action})


def stages_of(ranks: Ranks, setting: Setting) -> list[str]:
    """The stages that set-up passes, each once, in order."""
    run = ranks.run(cases.live, Case("none", "set-up", setting, cases.stages_of_set_up, Expected()), LIMIT_S)
    assert run.results[0], "set-up without a fault failed"
    return list(dict.fromkeys(note.part for note in run.results[0]))


def run_case(ranks: Ranks, case: Case) -> Row:
    try:
        run = ranks.run(cases.live, case, LIMIT_S + case.arguments.get("skew_s", 0.0))
    except AssertionError as error:  # an error that isn't of this package, such as a CUDA context that is lost
        return Row(case, Verdict("broken", None, str(error), ""))
    return Row(case, judge(case, run))


def nothing_to_prepare(rank: int) -> None:
    """On the CPU a rank is ready at once."""


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--world", type=click.IntRange(2, 8), default=2, show_default=True)
@click.option("--only", default="", help="Cases whose fault and phase match this regular expression.")
@click.option("--slow-start", "slow_start_s", type=float, default=6.0, show_default=True, help="Seconds.")
@click.option("--budget-seconds", type=float, default=float("inf"), help="No case is begun after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(device: str, world: int, only: str, slow_start_s: float, budget_seconds: float, out: Path | None) -> None:
    on_gpu = device == "cuda"
    setting = gpu_cases.SETTING if on_gpu else CPU
    console = Console()
    began = time.monotonic()
    if on_gpu:
        gpu_cases.compile_ahead(world)
    ranks = Ranks(world, gpu_cases.prepare if on_gpu else nothing_to_prepare, victim=VICTIM, substitutes=3)
    rows: list[Row] = []
    try:
        wanted = [*(gpu_cases.gpu_cases() if on_gpu else cpu_cases()), *common_cases(setting, slow_start_s)]
        wanted += set_up_cases(setting, stages_of(ranks, setting))
        for case in wanted:
            if re.search(only, f"{case.fault}, {case.phase}") and time.monotonic() - began < budget_seconds:
                rows.append(run_case(ranks, case))
                console.print(_line(rows[-1]), soft_wrap=True, highlight=False, markup=False)
    finally:
        ranks.close()
        _table(setting, world, rows).write(
            out or RESULTS / ("fault_matrix.json" if on_gpu else f"fault_matrix_cpu{world}.json")
        )
    wrong = [row for row in rows if row.verdict.wrong]
    console.print(f"{len(rows) - len(wrong)} of {len(rows)} cases keep the contract ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if wrong or not rows else 0)


def _table(setting: Setting, world: int, rows: Sequence[Row]) -> ResultTable:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    merged = [
        {
            "fault": fault,
            "phase": phase,
            "outcome": outcome,
            "count": len(alike),
            "report_s": max((row.verdict.report_s for row in alike if row.verdict.report_s is not None), default=None),
            "deadline_s": alike[0].case.expected.deadline_s or None,
            "cases": [row.details() for row in alike],
        }
        for (fault, phase, outcome), alike in groups.items()
    ]
    deadline = setting.deadline
    method = METHOD.format(startup_s=deadline.startup_s, steady_s=deadline.steady_s)
    return ResultTable(f"Faults, {world} ranks, plan {setting.plan}", method, environment(), COLUMNS, merged)


def _line(row: Row) -> str:
    verdict = row.verdict
    after = "" if verdict.report_s is None else f" after {verdict.report_s:.2f} s"
    mark = "FAIL" if verdict.wrong else "ok  "
    return f"{mark} {row.case.fault}, {row.case.phase}: {verdict.outcome}{after} {verdict.wrong}"


if __name__ == "__main__":
    main()

"""What the experiments conclude from measured tables: regret, and where one plan overtakes another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import overtaking
import pytest
import regret
import served
from click.testing import CliRunner
from test_plan_table import CROSSING, MACHINE, row, table

from tp_walk.plan_table import PlanTable, Row
from tp_walk.results import ResultTable


def test_regret_is_the_second_runs_time_of_the_first_runs_choice() -> None:
    second = table(row(8, tp_bf16=30.0, int8=40.0), row(12, tp_bf16=30.0, int8=40.0), row(16, tp_bf16=30.0, int8=40.0))
    found = regret.choices(CROSSING, second)
    assert [(choice.selected, choice.best) for choice in found] == [
        ("int8", "tp_bf16"),
        ("tp_bf16", "tp_bf16"),
        ("tp_bf16", "tp_bf16"),
    ]
    assert found[0].regret == pytest.approx(4 / 3)
    line = regret.summary("here", found)
    assert (line["sizes"], line["not_best"]) == (3, 1)
    assert line["mean"] == pytest.approx((4 / 3 + 2) / 3)
    assert line["worst"] == pytest.approx(4 / 3)
    assert line["worst_at"] == "batch 8, γ 7: int8, best tp_bf16"


def test_only_plans_that_ran_in_the_second_run_are_selected() -> None:
    (choice,) = regret.choices(CROSSING, table(row(8, tp_bf16=30.0)))
    assert (choice.selected, choice.regret) == ("tp_bf16", 1.0)


def test_the_regret_of_folders(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        CROSSING.write(tmp_path / folder / MACHINE.file_name)
    arguments = ["--first", str(tmp_path / "first"), "--second", str(tmp_path / "second"), "--out", str(tmp_path / "o")]
    assert CliRunner().invoke(regret.main, arguments, catch_exceptions=False).exit_code == 0
    lines = ResultTable.read(tmp_path / "o").rows
    assert [(line["where"], line["mode"], line["mean"]) for line in lines] == [
        (str(MACHINE), "greedy", 1.0),
        ("all", "greedy", 1.0),
    ]
    (tmp_path / "first" / MACHINE.file_name).unlink()
    assert "has no nvidia-h200-x2" in CliRunner().invoke(regret.main, arguments).output


def test_the_seeds_regret_is_told_of_the_first_run_among_plans_that_it_knows(tmp_path: Path) -> None:
    rows = row(8, tp_bf16=60.0, int8=40.0, certified=9.0), row(64, tp_bf16=100.0, int8=400.0), row(1, certified=9.0)
    table(*rows).write(tmp_path / MACHINE.file_name)
    arguments = ["--first", str(tmp_path), "--seed", "--out", str(tmp_path / "o")]
    assert CliRunner().invoke(regret.main, arguments, catch_exceptions=False).exit_code == 0
    *_, line = ResultTable.read(tmp_path / "o").rows
    assert (line["sizes"], line["worst"], line["worst_at"]) == (2, 1.5, "batch 8, γ 7: tp_bf16, best int8")
    assert CliRunner().invoke(regret.main, arguments[:2]).exit_code == 2


def test_overtaking_counts_from_where_it_lasts() -> None:
    int8 = {1: 30.0, 2: 50.0, 4: 40.0, 8: 60.0, 16: 90.0}
    tp_bf16 = {1: 40.0, 2: 40.0, 4: 40.0, 8: 50.0, 16: 60.0, 32: 70.0}
    found = overtaking.overtaking(int8, tp_bf16)
    assert found["overtakes"] == 8
    assert found["least"] == pytest.approx(20.0)
    assert found["most"] == pytest.approx(50.0)
    assert found["ratios"] == "1: 0.75, 2: 1.25, 4: 1.00, 8: 1.20, 16: 1.50"


def test_what_never_overtakes_says_so() -> None:
    assert overtaking.overtaking({1: 30.0}, {1: 40.0})["overtakes"] is None


def test_both_comparisons_come_from_the_tables(tmp_path: Path) -> None:
    def write(machine: object, rows: list[Row]) -> None:
        measured = PlanTable(machine, CROSSING.provenance, rows)  # type: ignore[arg-type]
        measured.write(tmp_path / "tables" / measured.machine.file_name)

    whole = [replace(one, layout="full") for one in (row(1, tp_bf16=41.0, int8=38.0), row(8, tp_bf16=42.0, int8=44.0))]
    write(MACHINE, [row(1, tp_bf16=40.0, int8=60.0), row(8, tp_bf16=42.0, int8=84.0), *whole])
    write(replace(MACHINE, world_size=1, link="none"), [replace(row(1, int8=33.0), layout="full")])
    arguments = ["--tables", str(tmp_path / "tables"), "--out", str(tmp_path / "o")]
    assert CliRunner().invoke(overtaking.main, arguments, catch_exceptions=False).exit_code == 0
    lines = {line["base"]: line for line in ResultTable.read(tmp_path / "o").rows}
    assert lines["whole"]["ratios"] == f"1: {33 / 41:.2f}"
    assert lines["sharded"]["ratios"] == "1: 1.50, 8: 2.00"
    assert lines["sharded"]["overtakes"] == 1
    (tmp_path / "tables" / replace(MACHINE, world_size=1, link="none").file_name).unlink()
    assert CliRunner().invoke(overtaking.main, arguments, catch_exceptions=False).exit_code == 0
    lines = {line["base"]: line for line in ResultTable.read(tmp_path / "o").rows}
    assert lines["whole"]["ratios"] == f"1: {38 / 41:.2f}, 8: {44 / 42:.2f}"


REPORT = {
    "environment": {"GPU": "2× NVIDIA H200"},
    "setup": {
        "world_size": 2,
        "vocab_size": 4096,
        "markov_rank": 256,
        "gamma": 7,
        "max_batch": 8,
        "temperature": 0.0,
        "work": "synthetic requests",
        "provenance": "measured 2026-11-30",
    },
    "served": {
        "mean_batch": 6.0,
        "seconds": 2.0,
        "blocks": 12,
        "drafted_tokens_per_s": 42.0,
        "walk_p50_ms": 0.2,
        "walk_p99_ms": 0.5,
        "plans": {"certified": 1, "tp_bf16": 1_200},
        "counts": {"certified": {"steps": 7_000, "certified_steps": 6_999}},
    },
    "quality": {"greedy": {"accepted_with_walk": 0.5, "accepted_without": 0.25}},
}


def test_a_report_of_the_main_job_is_a_row() -> None:
    row = served.row_of(REPORT)
    assert row["plans"] == "certified 1, tp_bf16 1,200"
    assert row["certified_steps"] == "6,999 of 7,000"
    assert (row["temperature"], row["chosen_by"], row["accepted_with_walk"]) == ("0", "auto_select", 0.5)
    # Counted is also what was walked before the job began, by plans that it then has no rounds of.
    alone = {**REPORT, "served": {**REPORT["served"], "plans": {"tp_bf16": 2}}, "quality": {}}
    assert served.row_of(alone)["certified_steps"] is None
    named = {**REPORT, "setup": {**REPORT["setup"], "provenance": "named by the caller", "temperature": None}}
    assert (served.row_of(named)["chosen_by"], served.row_of(named)["temperature"]) == ("--plan", "0 and 1 by turns")


def test_reports_of_two_machines_are_no_table(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, gpu in zip(paths, ("H200", "H100"), strict=True):
        path.write_text(json.dumps({**REPORT, "environment": {"GPU": gpu}}))
    out = tmp_path / "served.json"
    result = CliRunner().invoke(served.main, [*map(str, paths), "--out", str(out)])
    assert result.exit_code != 0
    assert "different machines" in result.output
    assert not out.exists()
    result = CliRunner().invoke(served.main, [str(paths[0]), "--out", str(out)])
    assert result.exit_code == 0
    assert len(ResultTable.read(out).rows) == 1

"""The speed table: which points, in which order, and what a row says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tp_walk import bench
from tp_walk.bench import MODES, Options, Point, main, row_of, run_bench
from tp_walk.results import ResultTable
from tp_walk.timing import Timing
from tp_walk.workload import Walk


def options(**changes: object) -> Options:
    defaults: dict[str, object] = {
        "vocab_sizes": (151_936, 248_320),
        "gammas": (7, 16),
        "batches": (1, 2, 4, 8, 16, 32, 64),
        "modes": (MODES["greedy"], MODES["t1-local"]),
        "markov_rank": 256,
        "iterations": 200,
        "budget_s": float("inf"),
        "out": None,
    }
    return Options(**(defaults | changes))  # type: ignore[arg-type]


def small(**changes: object) -> Options:
    return options(vocab_sizes=(300,), gammas=(2,), batches=(1, 3), markov_rank=8, iterations=2, **changes)


def test_every_combination_is_a_point_once() -> None:
    points = options().points()
    assert len(points) == len(set(points)) == 2 * 2 * 7 * 2


def test_the_ends_of_the_first_mode_and_vocabulary_come_first() -> None:
    first = options().points()[:6]
    sizes = [(point.walk.batch, point.walk.gamma) for point in first]
    assert sizes == [(1, 7), (8, 7), (64, 7), (1, 16), (8, 16), (64, 16)]
    assert all(point.vocab_size == 151_936 and not point.walk.sampled for point in first)
    assert {point.walk.batch for point in options().points()[24:]} == {2, 4, 16, 32}


def timing(median_us: float) -> Timing:
    return Timing(median_us, median_us + 5.0, 1.0, 200)


def test_a_row_compares_with_the_best_rival_over_the_same_ranks() -> None:
    timings = {
        "tp_bf16": timing(40.0),
        "torch_replicated": timing(400.0),
        "torch_sharded": timing(200.0),
        "torch_1gpu": timing(100.0),
    }
    row = row_of(Point(300, Walk(4, 7, True, "local")), timings, {"certified": "not there"}, 2)
    assert row["speedup"] == 5.0
    assert (row["mode"], row["batch"], row["world_size"], row["iterations"]) == ("T = 1, local logits", 4, 2, 200)
    assert (row["tp_bf16_us"], row["tp_bf16_p99_us"], row["tp_bf16_spread_us"]) == (40.0, 45.0, 1.0)
    assert row["refused"] == {"certified": "not there"}


def test_without_the_plan_there_is_no_ratio() -> None:
    assert "speedup" not in row_of(Point(300, Walk(1, 7)), {"torch": timing(9.0)}, {}, 1)


def test_a_run_writes_each_row_as_it_comes(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    written: list[int] = []
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        written.append(len(ResultTable.read(out).rows))

    table = run_bench(small(out=out), progress)
    assert len(table.rows) == 4
    assert written == [1, 2, 3, 4]
    assert told[0].startswith("V 300 γ 2 batch 1 greedy: reference ")
    assert [row["batch"] for row in ResultTable.read(out).rows] == [row["batch"] for row in table.rows]


def test_a_shown_run_ends_with_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    bench._run_and_show(small())
    shown = capsys.readouterr().out
    assert shown.count("V 300 γ 2 batch 1 greedy: reference ") == 1
    assert "4/4" in shown
    assert shown.count("│ 300 ") == 4  # the table's rows


def test_no_point_is_begun_once_the_budget_is_spent() -> None:
    assert run_bench(small(budget_s=-1.0)).rows == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--modes", "greedy,t2"], "'t2' is none of greedy"),
        (["--batches", "1,x"], "no list of positive integers"),
        (["--gamma", "0"], "no list of positive integers"),
    ],
)
def test_a_bad_option_is_told_by_name(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert complaint in result.output

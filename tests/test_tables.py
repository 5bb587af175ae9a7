"""The README's figures are those of experiments/results, and a results file survives the way there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tables

from tp_walk.errors import WalkInputError
from tp_walk.plan_table import Machine, PlanTable, Row, Sample
from tp_walk.results import Column, ResultTable, environment

TABLE = ResultTable(
    title="One block, µs",
    method="Median of nothing.",
    environment={"GPU": "2× A GPU", "driver": None, "torch": "9.9"},
    columns=[Column("batch", "batch"), Column("us", "tp|walk", 2), Column("ok", "agrees"), Column("note", "note")],
    rows=[{"batch": 1, "us": 1234.567, "ok": True, "p99": 5.0}, {"batch": 64, "us": None, "ok": False, "note": "a|b"}],
)


def test_the_readme_is_what_the_results_say() -> None:
    assert tables.main(["--check"]) == 0


def test_a_readme_out_of_date_is_told_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    stale = "<!-- table: none.json -->\n12 µs\n<!-- end of table -->\n"
    readme.write_text(stale)
    monkeypatch.setattr(tables, "README", readme)
    assert tables.main(["--check"]) == 1
    assert readme.read_text() == stale
    assert tables.main([]) == 0
    assert "12 µs" not in readme.read_text()
    assert tables.main(["--check"]) == 0


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    TABLE.write(path)
    again = ResultTable.read(path)
    assert again.to_markdown() == TABLE.to_markdown()
    assert again.rows == TABLE.rows
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # others may read what the umask lets them


def test_markdown_shows_the_columns_the_machine_and_the_method() -> None:
    title, header, _, first, second, machine = [line for line in TABLE.to_markdown().splitlines() if line]
    assert title == "**One block, µs**"
    assert header == "| batch | tp\\|walk | agrees | note |"
    assert first == "| 1 | 1,234.57 | yes | – |"
    assert second == "| 64 | – | no | a\\|b |"
    assert machine == "<sub>GPU 2× A GPU, torch 9.9. Median of nothing.</sub>"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "not json", '{"rows": []}', json.dumps({"columns": [{"name": "x"}]}), '{"columns": 5}'],
)
def test_a_file_that_holds_no_table_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(WalkInputError, match=r"odd\.json holds no table"):
        ResultTable.read(path)


def test_tables_are_filled_in_and_out_of_date_ones_found(tmp_path: Path) -> None:
    text = "a\n<!-- table: bench.json -->\nold figures\n<!-- end of table -->\nb\n"
    unmeasured = tables.with_tables(text, tmp_path)
    assert "old figures" not in unmeasured
    assert "Not measured yet: no bench.json" in unmeasured
    TABLE.write(tmp_path / "bench.json")
    filled = tables.with_tables(unmeasured, tmp_path)
    assert filled == f"a\n<!-- table: bench.json -->\n{TABLE.to_markdown()}\n<!-- end of table -->\nb\n"
    assert tables.with_tables(filled, tmp_path) == filled


def row(mode: str, batch: int, layout: str = "sharded", **us: float) -> Row:
    times = {name: Sample(t, 1.0, t + 1) for name, t in us.items()}
    plans = {name: sample for name, sample in times.items() if not name.startswith("torch")}
    baseline = {name: sample for name, sample in times.items() if name.startswith("torch")}
    return Row(layout, mode, 7, batch, plans, baseline, {})  # type: ignore[arg-type]


def test_shipped_crossover_tables_are_shown_the_best_in_bold(tmp_path: Path) -> None:
    rows = [
        row("greedy", 8, tp_bf16=40.0, int8=50.0, torch_a=200.0, torch_b=100.0),
        row("greedy", 1, tp_bf16=40.0, int8=30.0, torch_a=60.0),
        row("sampled", 8, tp_bf16=44.0),
        row("greedy", 2, layout="full", tp_bf16=1.0),
    ]
    machine = Machine("A GPU", 2, "NVLink", 1000, 256)
    PlanTable(machine, {"torch": "9.9", "date": "2026-11-29"}, rows).write(tmp_path / machine.file_name)
    text = f"<!-- table: {machine.file_name} -->\n<!-- end of table -->\n"
    filled = tables.with_tables(text, tmp_path / "none", tmp_path)
    _, title, header, _, one, eight, about, _ = [line for line in filled.splitlines() if line]
    assert title == "**Time of a block by plan, µs, base logits sharded**"
    assert header.split(" | ")[2:5] == ["tp_bf16, greedy", "int8, greedy", "best torch / best, greedy"]
    assert one == "| 7 | 1 | 40.0 | **30.0** | 2.00 | – | – | – |"
    assert eight == "| 7 | 8 | **40.0** | 50.0 | 2.50 | **44.0** | – | – |"
    assert about.startswith(f"<sub>GPU {machine}, torch 9.9, date 2026-11-29. ")
    assert tables.with_tables(filled, tmp_path / "none", tmp_path) == filled


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: a.json -->\n",
        "<!-- end of table -->\n",
        "<!-- table: a.json -->\n<!-- table: b.json -->\n<!-- end of table -->\n<!-- end of table -->\n",
    ],
)
def test_a_marker_without_its_end_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs its own"):
        tables.with_tables(text, tmp_path)


def test_the_environment_names_what_runs_here() -> None:
    import torch

    here = environment()
    assert here["torch"] == torch.__version__
    assert (here["GPU"] is None) == (not torch.cuda.is_available())
    assert (here["GPU"] is None) != (here["CPU"] is None)
    json.dumps(here)

"""Measuring the table, its commands and its chart, where there is no GPU: the ranks are on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from rank_pool import RankPool
from rich.console import Console
from test_plan_table import CROSSING, MACHINE, row, table

from tp_walk import MarkovHead, crossover_cli, plan_table
from tp_walk.blind_base import BlindBaseFit
from tp_walk.crossover import Request, measure
from tp_walk.crossover_plot import crossings, plot
from tp_walk.errors import WalkInputError
from tp_walk.plan_table import Machine, PlanTable, Sample, user_path

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TP_WALK_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(plan_table, "SHIPPED_DIR", tmp_path / "shipped")
    return tmp_path


def request_of(*out: Path, **changes: object) -> Request:
    request = Request(300, 8, (2, 3), (1, 2, 4), ("greedy", "sampled"), ("sharded", "full"), 2, out)
    return replace(request, **changes)  # type: ignore[arg-type]


def test_every_size_once_and_the_ends_first() -> None:
    request = request_of(batches=(1, 2, 4, 8, 16))
    walks = request.walks(2)
    assert len(walks) == len(set(walks)) == 2 * 2 * 2 * 5
    assert {walk.batch for walk in walks[:24]} == {1, 4, 16}
    assert {walk.layout for walk in request.walks(1)} == {"full"}


def test_one_rank_measures_and_keeps(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    steps: list[tuple[int, int, int]] = []

    def progress(done: int, total: int) -> None:
        steps.append((done, total, len(PlanTable.read(out).rows)))

    result = measure(request_of(out, modes=("greedy",)), progress)
    assert steps == [(done, 6, done) for done in range(1, 7)]
    assert PlanTable.read(out) == result
    assert result.machine == Machine("CPU", 1, "none", 300, 8)
    assert [one.place for one in result.rows] == [("full", "greedy", g, b) for g in (2, 3) for b in (1, 2, 4)]
    for one in result.rows:
        assert one.plans.keys() == {"reference", "reference_int8"}
        assert one.baseline.keys() == {"torch"}
        assert one.refused == {}
    assert result.provenance.keys() == {"driver", "CUDA", "torch", "source", "text", "date"}


def test_a_run_that_is_stopped_leaves_what_it_has_over_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    before = measure(request_of(out, modes=("sampled",), gammas=(2,)))
    calls: list[bool] = []

    def enough() -> bool:
        calls.append(len(calls) >= 2)
        return calls[-1]

    stopped = measure(request_of(out, modes=("sampled",), gammas=(2, 3)), should_stop=enough)
    assert len(stopped.rows) == 2
    kept = PlanTable.read(out)
    assert kept.rows == stopped.merged_over(before).rows
    assert len(kept.rows) == 3


def _measure(request: Request) -> PlanTable:
    return measure(request)


def _stop_on_one_rank(request: Request) -> int:
    return len(measure(request, should_stop=lambda: dist.get_rank() == 1).rows)


def test_ranks_measure_one_table_with_both_layouts(tmp_path: Path, rank_pool: Callable[[int], RankPool]) -> None:
    out = tmp_path / "table.json"
    first, second = rank_pool(2)(_measure, request_of(out, batches=(3,), gammas=(2,)))
    assert first == second == PlanTable.read(out)
    assert first.machine == Machine("CPU", 2, "unknown", 300, 8)
    assert {one.layout for one in first.rows} == {"sharded", "full"}
    assert set(first.rows[0].baseline) >= {"torch_replicated", "torch_sharded"}
    assert rank_pool(2)(_stop_on_one_rank, request_of(batches=(3,), gammas=(2,))) == [0, 0]


SCRIPT = """
import sys
from pathlib import Path
from tp_walk.crossover import Request
from tp_walk.crossover_cli import measure_on_ranks
if __name__ == "__main__":
    modes = ("greedy", "sampled")
    request = Request(300, 8, tuple(range(1, 40)), tuple(range(1, 40)), modes, ("full",), 3, (Path(sys.argv[1]),))
    print("whole" if measure_on_ranks(2, request) else "interrupted")
"""


def test_ctrl_c_keeps_what_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not out.exists():
            assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        stdout, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert stdout == "interrupted\n"
    assert PlanTable.read(out).rows


def invoke(command: object, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)  # type: ignore[arg-type]


class TestCrossoverCommand:
    def test_without_gpus_it_says_what_it_needs(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there are GPUs")
        result = invoke(crossover_cli.crossover, "--nproc", "2")
        assert result.exit_code == 1
        assert "--nproc 2 needs as many CUDA devices, and torch finds 0 here" in result.output

    def test_busy_gpus_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(crossover_cli, "gpu_of", lambda device: f"GPU {device.index}")
        monkeypatch.setattr(crossover_cli, "other_use", lambda gpu: "it is 50 % busy" if gpu == "GPU 1" else None)
        result = invoke(crossover_cli.crossover)
        assert result.exit_code == 1
        assert "GPU 1 (GPU 1) isn't free: it is 50 % busy" in result.output

    @pytest.mark.parametrize("measured", [True, False])
    def test_it_keeps_shows_and_draws(self, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def pretend(nproc: int, request: Request, text: Path | None) -> bool:
            assert nproc == 2
            assert text is None
            for path in request.out:
                CROSSING.write(path)
            return measured

        monkeypatch.setattr(crossover_cli, "_check_gpus", lambda nproc, force: None)
        monkeypatch.setattr(crossover_cli, "machine_here", lambda shape: MACHINE)
        monkeypatch.setattr(crossover_cli, "measure_on_ranks", pretend)
        chart, out = tmp_path / "chart.svg", tmp_path / "out.json"
        result = invoke(crossover_cli.crossover, "--nproc", "2", "--out", str(out), "--plot", str(chart))
        assert result.exit_code == (0 if measured else 130)
        assert PlanTable.read(user_path(MACHINE)).rows == PlanTable.read(out).rows
        assert "★ 40.0 ± 0.5" in result.output
        assert "<svg" in chart.read_text()

    @pytest.mark.parametrize("has_text", [True, False])
    def test_a_head_brings_its_shape_and_its_text(
        self, has_text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table, none = torch.zeros(96, 16).bfloat16(), torch.zeros(0)
        MarkovHead(table, table).save_checkpoint(tmp_path / "head")
        if has_text:
            starts = torch.zeros(97, dtype=torch.int32)
            fit = BlindBaseFit(torch.zeros(96), starts, none.int(), none.half(), [torch.tensor([1])], "")
            fit.write(tmp_path / "head")
        given = []

        def pretend(nproc: int, request: Request, text: Path | None) -> bool:
            given.append((request.vocab_size, request.markov_rank, text))
            CROSSING.write(request.out[0])
            return True

        monkeypatch.setattr(crossover_cli, "_check_gpus", lambda nproc, force: None)
        monkeypatch.setattr(crossover_cli, "machine_here", lambda shape: MACHINE)
        monkeypatch.setattr(crossover_cli, "measure_on_ranks", pretend)
        assert invoke(crossover_cli.crossover, "--nproc", "2", "--head", str(tmp_path / "head")).exit_code == 0
        assert given == [(96, 16, tmp_path / "head" if has_text else None)]

    def test_a_file_that_cannot_be_written_is_told_before_anything_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TP_WALK_DATA_DIR", "/proc/tp_walk")
        monkeypatch.setattr(crossover_cli, "_check_gpus", lambda nproc, force: None)
        monkeypatch.setattr(crossover_cli, "machine_here", lambda shape: MACHINE)
        result = invoke(crossover_cli.crossover, "--nproc", "2")
        assert result.exit_code == 1
        assert "can't be written; --out names another" in result.output

    def test_bad_options_are_told_by_name(self) -> None:
        assert "'medium' is none of greedy, sampled" in invoke(crossover_cli.crossover, "--mode", "medium").output
        assert "'square' is none of sharded, full" in invoke(crossover_cli.crossover, "--layout", "square").output


class TestPlanCommand:
    def test_a_laptop_answers_from_the_shipped_tables(self, tmp_path: Path) -> None:
        CROSSING.write(tmp_path / "shipped" / MACHINE.file_name)
        result = invoke(crossover_cli.plan, "--gpu", "h200", "--nproc", "2", "--batch", "8,64")
        assert result.exit_code == 0
        first, second = result.output.splitlines()
        assert first == (
            "batch 8: int8, 40.0 µs expected; next tp_bf16, 1.10 × "
            f"(measured 2026-11-29 on {MACHINE}; a table that comes with tp_walk)"
        )
        assert second.startswith("batch 64: tp_bf16, 46.0 µs expected")
        assert "nearest measured batch 16" in second

    @pytest.mark.parametrize(
        "other", [["--nproc", "4"], ["--nproc", "2", "--vocab", "129280"], ["--nproc", "2", "--gpu", "H100"]]
    )
    def test_what_no_table_covers_comes_from_the_seed(self, other: list[str], tmp_path: Path) -> None:
        CROSSING.write(tmp_path / "shipped" / MACHINE.file_name)
        result = invoke(crossover_cli.plan, "--gpu", "H200", *other)
        assert result.exit_code == 0
        assert "(seed, from the hardware's limits; measure with: tp-walk crossover" in result.output

    def test_a_head_that_no_kernel_holds_is_told(self) -> None:
        result = invoke(crossover_cli.plan, "--gpu", "H200", "--rank", "64")
        assert result.exit_code == 1
        assert "no kernel is known to hold 1× H200, V = 151,936, r = 64, batch 1; plan reference" in result.output

    def test_a_damaged_table_of_ones_own_does_not_hide_the_shipped_ones(self, tmp_path: Path) -> None:
        CROSSING.write(tmp_path / "shipped" / MACHINE.file_name)
        user_path(MACHINE).parent.mkdir(parents=True)
        user_path(MACHINE).write_text("{")
        assert "measured" in invoke(crossover_cli.plan, "--gpu", "H200", "--nproc", "2").output


def test_the_shown_table_marks_the_fastest_and_compares_with_the_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = [replace(one, baseline={"torch_sharded": Sample(200.0, 1.0, 220.0)}) for one in CROSSING.rows]
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    crossover_cli.show(table(*rows), console)
    text = console.export_text()
    assert "greedy, γ = 7, base logits sharded" in text
    eight, sixteen = (line for line in text.splitlines() if "±" in line and "│" in line)
    assert "44.0 ± 0.5" in eight
    assert "★ 40.0 ± 0.5" in eight
    assert "5.00" in eight
    assert "★ 46.0 ± 0.5" in sixteen


class TestChart:
    def test_a_crossover_is_where_the_lines_meet(self) -> None:
        assert crossings(list(CROSSING.rows)) == [(12.0, "int8", "tp_bf16")]
        assert crossings([row(1, tp_bf16=5.0, int8=9.0), row(2, tp_bf16=6.0, int8=9.0)]) == []

    def test_where_a_plan_ends_the_next_size_counts(self) -> None:
        assert crossings([row(1, tp_bf16=5.0, int8=4.0), row(4, tp_bf16=6.0)]) == [(4.0, "int8", "tp_bf16")]

    @pytest.mark.parametrize("suffix", [".png", ".svg"])
    def test_it_is_drawn(self, suffix: str, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        path = tmp_path / f"chart{suffix}"
        plot(CROSSING, path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
        if suffix == ".svg":
            assert b"tp_bf16" in content or b"<path" in content

    def test_what_cannot_be_drawn_is_said(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        with pytest.raises(WalkInputError, match=r"\.png or \.svg"):
            plot(CROSSING, tmp_path / "chart.bmp")
        with pytest.raises(WalkInputError, match="no rows"):
            plot(table(), tmp_path / "chart.png")

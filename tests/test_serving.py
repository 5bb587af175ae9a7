"""The main job: which requests run, how drafts are judged, how ranks stop, and all of it under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import text_head
import torch
import torch.distributed as dist
from rank_pool import RankPool
from rich.console import Console

from launch import serve_walk
from tp_walk.blind_base import FILE_NAME
from tp_walk.errors import WalkInputError
from tp_walk.group import WalkGroup
from tp_walk.head import MarkovHead
from tp_walk.serving import (
    TOP_SIZES,
    ContinuousBatch,
    Quality,
    QualityMeter,
    StopSignal,
    accepted_length,
    percentile,
)
from tp_walk.serving_report import Draft, Progress, Report, Served, plans_by_batch
from tp_walk.shard import Shard
from tp_walk.text import VOCAB_SIZE

REPOSITORY = Path(__file__).resolve().parents[1]
GAMMA = 4
ALONE = WalkGroup(None, torch.device("cpu"))


def texts() -> list[torch.Tensor]:
    return [torch.arange(60), torch.arange(100, 103), torch.arange(1000, 1200)]


@pytest.mark.parametrize(("draft", "right", "length"), [([1, 2, 3], [1, 2, 3], 3), ([1, 9, 3], [1, 2, 3], 1)])
def test_accepted_length(draft: list[int], right: list[int], length: int) -> None:
    assert accepted_length(draft, right) == length
    assert accepted_length([0, *draft[1:]], right) == 0


def test_requests_come_and_go() -> None:
    batch = ContinuousBatch(texts(), 6, GAMMA, None, seed=1)
    sizes, numbers = set(), set()
    for turn in range(400):
        running = batch.admit()
        sizes.add(len(running))
        assert 1 <= len(running) <= 6
        for request in running:
            numbers.add(request.number)
            assert request.temperature == request.number % 2
            assert len(request.continuation(GAMMA)) == GAMMA
            assert request.continuation(GAMMA)[0] == request.anchor + 1
        before = [(request, request.position) for request in running]
        drafts = [request.continuation(GAMMA)[: turn % 3] + [-1] * (GAMMA - turn % 3) for request in running]
        assert batch.advance(drafts) == [turn % 3] * len(running)
        assert all(request.position == position + turn % 3 + 1 for request, position in before)
    assert len(sizes) > 3
    assert numbers == set(range(len(numbers)))
    assert batch.finished == len(numbers) - len(batch.running)


def test_the_same_seed_serves_the_same_requests() -> None:
    def positions(seed: int) -> list[tuple[int, int]]:
        batch = ContinuousBatch(texts(), 3, GAMMA, 0.0, seed)
        return [
            (r.anchor, r.stop)
            for _ in range(50)
            for r in batch.admit()
            if batch.advance([[0] * 4] * len(batch.running))
        ]

    assert positions(1) == positions(1)
    assert positions(1) != positions(2)


def test_a_steady_batch_is_always_full() -> None:
    batch = ContinuousBatch(texts(), 5, GAMMA, 0.7, seed=3, steady=True)
    for _ in range(100):
        assert [request.temperature for request in batch.admit()] == [0.7] * 5
        batch.advance([[-1] * GAMMA] * 5)


def test_texts_that_are_too_short() -> None:
    with pytest.raises(WalkInputError, match="longer than gamma = 4"):
        ContinuousBatch([torch.arange(4)], 2, GAMMA, None, seed=0)


def observed(group: WalkGroup, shard: Shard, base: torch.Tensor, tokens: torch.Tensor, right: torch.Tensor) -> Any:
    meter = QualityMeter(group, shard, seed=0, timeout_s=60.0)
    meter.observe(base[..., shard.start : shard.stop], tokens, right, [0.0] * len(tokens))
    return meter.by_temperature[0.0]


def on_rank(shards: list[Shard], base: torch.Tensor, tokens: torch.Tensor, right: torch.Tensor) -> Any:
    return observed(WalkGroup(dist.group.WORLD, torch.device("cpu")), shards[dist.get_rank()], base, tokens, right)


def problem(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    # Few values, so that ties are the rule.
    base = torch.randint(-3, 4, (5, GAMMA, vocab_size), generator=generator).bfloat16()
    tokens = torch.randint(vocab_size, (5, GAMMA), generator=generator)
    right = torch.where(torch.rand(5, GAMMA, generator=generator) < 0.6, tokens, base.float().argmax(-1))
    return base, tokens, right


def expected_quality(base: torch.Tensor, tokens: torch.Tensor, right: torch.Tensor) -> Quality:
    quality = Quality(blocks=len(tokens), tokens=tokens.numel())
    for row in range(len(tokens)):
        orders = [sorted(range(base.shape[2]), key=lambda i: (-float(base[row, k, i]), i)) for k in range(GAMMA)]
        alone = [order[0] for order in orders]
        for i, draft in enumerate((tokens[row].tolist(), alone)):
            quality.matching[i] += sum(a == b for a, b in zip(draft, right[row].tolist(), strict=True))
            quality.accepted[i] += accepted_length(draft, right[row].tolist())
        for step in range(GAMMA):
            rank = orders[step].index(int(tokens[row, step]))
            quality.top = [hits + (rank < size) for hits, size in zip(quality.top, TOP_SIZES, strict=True)]
    return quality


def test_quality_of_one_rank() -> None:
    assert observed(ALONE, Shard(0, 40), *problem(40)) == expected_quality(*problem(40))


def test_quality_over_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    shards = [Shard(0, 24), Shard(24, 24), Shard(24, 41)]
    results = rank_pool(3)(on_rank, shards, *problem(41))
    assert results == [expected_quality(*problem(41))] * 3


def test_the_base_is_sampled_at_its_temperature() -> None:
    base = torch.tensor([0.0, 1.0, -1.0]).bfloat16().expand(1000, GAMMA, 3)
    zeros = torch.zeros(1000, GAMMA, dtype=torch.int64)
    meter = QualityMeter(ALONE, Shard(0, 3), seed=0, timeout_s=60.0)
    meter.observe(base, zeros, zeros, [0.5] * 1000)
    share = meter.by_temperature[0.5].report()["matching_without"]
    right = float(torch.softmax(base[0, 0].float() / 0.5, -1)[0])
    # Five standard deviations of 4,000 draws.
    assert abs(share - right) < 5 * (right * (1 - right) / 4000) ** 0.5


def test_signals_are_requests_to_stop() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.agreed(ALONE, 1.0)
        assert stop.agreed(ALONE, 1.0, stop_here=True)
        signal.raise_signal(signal.SIGINT)
        assert stop.agreed(ALONE, 1.0)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def stop_on_rank(stopping: int) -> list[tuple[bool, bool]]:
    group, stop = WalkGroup(dist.group.WORLD, torch.device("cpu")), StopSignal()
    answers = [(stop.agreed(group, 60.0), stop.requested)]
    answers.append((stop.agreed(group, 60.0, stop_here=dist.get_rank() == stopping), stop.requested))
    stop.requested = dist.get_rank() == stopping
    answers.append((stop.agreed(group, 60.0), stop.requested))
    return answers


def test_one_rank_stops_all(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(3)(stop_on_rank, 1) == [[(False, False), (True, False), (True, True)]] * 3


@pytest.mark.parametrize(("values", "p50", "p99"), [([3.0], 3.0, 3.0), ([4.0, 1.0, 2.0, 3.0], 2.0, 4.0)])
def test_percentiles(values: list[float], p50: float, p99: float) -> None:
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (p50, p99)


def a_report() -> Report:
    served = Served(gamma=7)
    served.add(3, "reference", 2.0)
    served.add(1, "int8", 4.0)
    served.seconds, served.finished = 2.0, 1
    quality = {0.0: expected_quality(*problem(40)).report(), 1.0: expected_quality(*problem(41)).report()}
    draft = Draft("def ", "f(", "x):", "f(y):", 1.0, 1)
    return Report({"world_size": 1}, served.report(), quality, [draft])


def test_served_counts() -> None:
    served = a_report().served
    assert served["blocks"] == 4
    assert served["blocks_per_s"] == 2.0
    assert served["drafted_tokens_per_s"] == 14.0
    assert served["batches"] == {"1": {"int8": 1}, "3": {"reference": 1}}
    assert served["plans"] == {"reference": 1, "int8": 1}
    assert (served["walk_p50_ms"], served["walk_p99_ms"]) == (2.0, 4.0)


def test_plans_are_told_by_batch() -> None:
    rounds = {"1": {"certified": 2}, "2": {"certified": 1}, "5": {"certified": 1, "tp_bf16": 3}, "8": {"tp_bf16": 1}}
    assert plans_by_batch(rounds) == "1 to 2: certified, 5: certified and tp_bf16, 8: tp_bf16"
    assert plans_by_batch({}) == ""


def test_report_for_people_and_programs(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    a_report().print(console)
    text = console.export_text()
    for part in (
        "4 in 2 rounds",
        "reference 1, int8 1",
        "1: int8, 3: reference",
        "greedy",
        "T = 1",
        "base's top 512",
        "⟦f(┊x):⟧",
        "'f(y):'",
    ):
        assert part in text
    a_report().write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["served"]["blocks"] == 4
    assert set(written["quality"]) == {"greedy", "T = 1"}
    assert written["quality"]["greedy"]["chosen_in_top"].keys() == {str(size) for size in TOP_SIZES}


def test_a_job_without_blocks_has_a_report() -> None:
    served = Served(gamma=7)
    Report({}, served.report(), {}, []).print(Console(file=open(os.devnull, "w")))  # noqa: SIM115
    assert served.report()["walk_p50_ms"] is None


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    served = Served(gamma=7, seconds=1.0)
    served.add(2, "reference", 3.0)
    with (tmp_path / "out").open("w+") as file:
        with Progress(Console(file=file, force_terminal=terminal, width=200), served) as progress:
            progress.update()
            assert "2 blocks" not in (tmp_path / "out").read_text()
            now[0] += 20.0
            progress.update()
        file.flush()
        assert "2 blocks, 2.0 blocks/s; batch 2.0; reference" in (tmp_path / "out").read_text()


# The job itself: one rank in this process, or two under torchrun.

SMALL = ("--synthetic", "--vocab-size", 300, "--markov-rank", 16, "--max-batch", 3)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["serve_walk.py", *map(str, arguments)])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TP_WALK_PLAN"):
        monkeypatch.delenv(name, raising=False)
    return serve_walk.main()


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TP_WALK_PLAN", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "launch/serve_walk.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *map(str, arguments)], cwd=REPOSITORY, env=environment, text=True, **pipes)


def complaints(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("serve_walk:")]


def test_synthetic_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(monkeypatch, *SMALL, "--blocks", 30, "--gamma", 3, "--json", tmp_path / "out.json") == 0
    out = capsys.readouterr().out
    assert "1 rank(s) on" in out
    assert "Served" in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["served"]["blocks"] == 30
    assert written["served"]["batches"] == {"3": {"reference": 10}}
    assert written["quality"] == {}


@pytest.fixture(scope="module")
def small_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A head fitted to a text that says one thing over and over, and that text."""
    folder = tmp_path_factory.mktemp("head")
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten eleven twelve\n" * 40)
    text_head.fit_text_head([text], folder / "head", 8, 4, lambda stage: None)
    return folder / "head", text


def test_text_job_of_two_ranks(small_head: tuple[Path, Path], tmp_path: Path) -> None:
    head, text = small_head
    out_file = tmp_path / "out.json"
    options = ("--head", head, "--text", text, "--blocks", 20, "--gamma", 4, "--max-batch", 2, "--json", out_file)
    with start(*options, "--temperature", 0) as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert out.count("Served") == 1
    assert out.count("⟦") == 4
    written = json.loads(out_file.read_text())
    assert written["setup"]["world_size"] == 2
    # After each of its words the text has one other, and the head knows it.
    assert written["quality"]["greedy"]["accepted_with_walk"] > 3.5
    assert written["drafts"][-1]["rejected"] == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gamma", 65), "65 is not in the range 1<=x<=64"),
        (("--temperature", -1), "-1"),
        (("--plan", "fastest"), "'fastest' is not one of"),
        (("--blcks", 3), "No such option"),
        (("--synthetic", "--text", "x.txt"), "--synthetic takes neither"),
        (("--text", "missing.txt"), "missing.txt can't be read"),
        (("--head", "missing"), "missing: no such file"),
        ((*SMALL, "--json", "no/such/folder/out.json"), "no such folder"),
        ((*SMALL, "--plan", "tp_bf16"), "tp_bf16"),
    ],
)
def test_complaints_are_one_line(
    options: tuple[object, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "tp_bf16" in options and torch.cuda.is_available():
        pytest.skip("a GPU is here, which runs this plan")
    assert run_here(monkeypatch, *options) != 0
    printed = capsys.readouterr()
    assert "Served" not in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("serve_walk: ")
    assert says in line


def test_a_data_directory_that_cannot_be_written_is_found_out_before_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TP_WALK_DATA_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(serve_walk, "fit_text_head", lambda *_: pytest.fail("it is fitted"))
    assert run_here(monkeypatch, "--blocks", 1) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "TP_WALK_DATA_DIR names another folder" in line


def test_heads_that_are_not_the_tokenizers(
    small_head: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = (small_head[0] / FILE_NAME).read_bytes()
    rows = torch.zeros(VOCAB_SIZE, 2, dtype=torch.bfloat16)
    heads = {
        "has 300 ids": MarkovHead(rows[:300], rows[:300]),
        "draft ids": MarkovHead(rows, rows, torch.arange(VOCAB_SIZE)),
    }
    for says, head in heads.items():
        head.save_checkpoint(tmp_path)
        (tmp_path / FILE_NAME).write_bytes(base)
        assert run_here(monkeypatch, "--head", tmp_path) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert "the tokenizer 151,936 ids" in line


def test_more_steps_than_the_base_has(
    small_head: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, "--head", small_head[0], "--gamma", 9) != 0
    assert "--gamma is 9; the base was fitted for 4 steps" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--gamma", 65), ("--text", "missing.txt")])
def test_two_ranks_complain_once_and_end(options: tuple[object, ...]) -> None:
    with start(*options) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "Served" not in out
    assert len(complaints(err)) == 1


def test_a_signal_to_one_rank_ends_the_job_in_order() -> None:
    with start(*SMALL, "--seconds", 120) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "rank(s) on" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "stopped by a signal" in out
    assert "Served" in out

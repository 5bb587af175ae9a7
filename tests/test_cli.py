"""The command line: what it says, and its exit status."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tp_walk import cli, doctor, jit, precompile
from tp_walk.doctor import PlanReport, RankReport, Report
from tp_walk.errors import PlanUnavailableError, WalkTimeout
from tp_walk.head import MarkovHead
from tp_walk.pair_test import PairResult
from tp_walk.plan import EXECUTORS, PLAN_NAMES, ExecutorContext, ExecutorFactory, WalkInputs
from tp_walk.reference import ReferenceExecutor, reference
from tp_walk.topology import Gpu

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
needs_nvrtc = pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="kernels are compiled on Linux only")


def tp_walk(*arguments: str) -> Result:
    # Wide, so that no message is broken into lines.
    return CliRunner(env={"COLUMNS": "250"}).invoke(cli.main, arguments)


@needs_no_gpu
def test_doctor_without_a_gpu_says_what_is_missing_and_is_content() -> None:
    result = tp_walk("doctor")
    assert result.exit_code == 0, result.output
    assert "no NVIDIA driver" in result.output
    assert torch.__version__ in result.output
    assert "needs a CUDA device" in result.output
    assert "all that is here works" in result.output


@needs_no_gpu
def test_doctor_examines_several_ranks_and_reports_in_json() -> None:
    result = tp_walk("doctor", "--nproc", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["is_healthy"] is True
    assert len(report["ranks"]) == 2
    for rank in report["ranks"]:
        assert list(rank["plans"]) == list(PLAN_NAMES)
        states = {name: plan["state"] for name, plan in rank["plans"].items()}
        assert states["reference"] == states["reference_int8"] == "runs"
        assert states["tp_bf16"] == "can't run here"


def wrong(context: ExecutorContext) -> ReferenceExecutor:
    """An executor whose last token is another one."""
    executor = reference(context)
    walk = executor.walk

    def walk_astray(inputs: WalkInputs) -> None:
        walk(inputs)
        inputs.tokens[-1, -1] ^= 1

    executor.walk = walk_astray  # type: ignore[method-assign]
    return executor


def stuck(context: ExecutorContext) -> ReferenceExecutor:
    """An executor whose peer never answers."""

    def wait(inputs: WalkInputs) -> None:
        raise WalkTimeout("rank 1 never answered")

    executor = reference(context)
    executor.walk = wait  # type: ignore[method-assign]
    return executor


@needs_no_gpu
@pytest.mark.parametrize(("executor", "why"), [(wrong, "its tokens are"), (stuck, "rank 1 never answered")])
def test_doctor_tries_each_plan_and_fails_when_one_is_broken(
    executor: ExecutorFactory, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXECUTORS, "int8", executor)
    result = tp_walk("doctor")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if "│ int8 " in line]
    assert "broken" in line
    assert why in line
    assert "doesn't work" in result.output


@needs_no_gpu
@pytest.mark.parametrize(("forced", "exit_code"), [("reference", 0), ("tp_bf16", 1), ("no-such-plan", 1)])
def test_doctor_minds_the_plan_that_is_forced(forced: str, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_WALK_PLAN", forced)
    result = tp_walk("doctor")
    assert result.exit_code == exit_code, result.output
    assert f"TP_WALK_PLAN forces {forced}" in result.output


def two_gpus(**changes: Any) -> Report:
    def rank(number: int) -> RankReport:
        gpu = Gpu(f"{number}000-uuid", "NVIDIA H200", "host", is_mig=False, driver="580.1")
        links = tuple("same GPU" if peer == number else "NVLink x18" for peer in range(2))
        hops = (PairResult(peer=1 - number, hop_p50_us=0.625 + number, hop_p99_us=0.875, hop_max_us=1.5, patterns=1),)
        plans = {"tp_bf16": PlanReport("runs")}
        return RankReport(**{"gpu": gpu, "links": links, "hops": hops, "obstacle": None, "plans": plans, **changes})

    return Report({"GPU": "2× NVIDIA H200", "driver": "580.1"}, (), (rank(0), rank(1)))


def test_doctor_shows_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "examine", lambda nproc: two_gpus())
    result = tp_walk("doctor", "--nproc", "2")
    assert result.exit_code == 0, result.output
    for expected in (
        "NVIDIA H200",
        "0000-uuid",
        "1000-uuid",
        "NVLink x18",
        "580.1",
        "0.62 / 0.88 µs",
        "1.62 / 0.88 µs",
    ):
        assert expected in result.output


def test_doctor_fails_when_ranks_cannot_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "examine", lambda nproc: two_gpus(obstacle="ranks 0 and 1 have no peer access"))
    result = tp_walk("doctor")
    assert result.exit_code == 1
    assert "have no peer access" in result.output


def test_an_expected_error_is_one_line_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(nproc: int) -> Report:
        raise WalkTimeout("rank 1 is lost")

    monkeypatch.setattr(cli, "examine", lost)
    result = tp_walk("doctor")
    assert result.exit_code == 1
    assert result.output == "Error: rank 1 is lost\n"


@needs_no_gpu
def test_bench_without_a_gpu_is_refused_in_one_line() -> None:
    result = tp_walk("bench", "--batches", "1")
    assert result.exit_code == 1
    assert result.output == "Error: the bench times GPUs, and torch finds no CUDA device here\n"


@pytest.mark.parametrize("arguments", [["doctor", "--nproc", "0"], ["doctor", "--nproc", "two"], ["docter"]])
def test_bad_usage_is_told(arguments: list[str]) -> None:
    result = tp_walk(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output


def test_the_exact_problem_is_one() -> None:
    head, base_logits, _ = doctor._exact_problem(torch.device("cpu"))
    rows = head.w2_rows(0, doctor.VOCAB_SIZE).double()
    assert torch.equal(rows.abs().amax(1), torch.full((doctor.VOCAB_SIZE,), 127.0, dtype=torch.float64))
    assert torch.equal(rows, rows.round())
    assert doctor.MARKOV_RANK * 127 * 127 < 1 << 24
    assert torch.equal(base_logits.double(), base_logits.double().round())


@needs_nvrtc
def test_compile_fills_the_cache_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_cubins", {})
    # One kernel's worth of time: the list itself is tested below.
    monkeypatch.setattr(cli, "jobs", lambda *shape: precompile.jobs(*shape)[-1:])
    result = tp_walk("compile", "--vocab", "4096", "--nproc", "2")
    assert result.exit_code == 0, result.output
    assert "self-test of 2 ranks" in result.output
    (cubin,) = (tmp_path / "cache").iterdir()
    assert cubin.name.startswith("pair_test-")
    written = cubin.stat()
    monkeypatch.setattr(jit, "_cubins", {})
    assert tp_walk("compile", "--vocab", "4096,2048", "--nproc", "2").exit_code == 0
    assert cubin.stat() == written  # by rename: another one would be another file


def test_compile_takes_the_shape_of_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cli, "jobs", lambda *shape: asked.append(shape) or [])
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "cache"))
    MarkovHead(torch.zeros(96, 16).bfloat16(), torch.zeros(80, 16).bfloat16()).save_checkpoint(
        tmp_path / "head.safetensors"
    )
    result = tp_walk("compile", "--head", str(tmp_path / "head.safetensors"), "--nproc", "4", "--rounding", "none")
    assert result.exit_code == 0, result.output
    assert asked == [(80, 16, (4,), 64, ("none",))]


def test_compile_says_when_the_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = tp_walk("compile")
    assert result.exit_code == 1
    assert "TP_WALK_CACHE_DIR" in result.output


def test_the_jobs_are_each_plans_specialisations_once() -> None:
    found = precompile.jobs(151_936, 256, (1, 2), 64, ("engine",))
    assert len({(job.source, job.macros) for job in found}) == len(found)
    walks = [job for job in found if job.source == "walk.cu"]
    # Plan certified; the exchange of base logits, and the self-test, of two ranks.
    others = Counter(job.source for job in found if job.source != "walk.cu")
    assert others == {"certify.cu": 8, "certify_bounds.cu": 1, "spread.cu": 1, "pair_test.cu": 1}
    for plan, world_size in (("tp_bf16", 1), ("int8", 1), ("tp_bf16", 2), ("int8", 2)):
        purposes = [job.purpose for job in walks if job.purpose.startswith(f"{plan} on {world_size}:")]
        assert {("greedy" in purpose, "none" in purpose) for purpose in purposes} == {
            (greedy, none) for greedy in (False, True) for none in (False, True)
        }
    fp32 = [job.source for job in precompile.jobs(151_936, 256, (2,), 64, ("none",)) if "fp32 base" in job.purpose]
    assert set(fp32) == {"walk.cu", "spread.cu", "certify.cu"}


def test_a_shape_that_no_kernel_serves_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanUnavailableError, match=r"world size 2: tp_bf16: .*markov_rank 256 and 512, not 100"):
        precompile.jobs(4096, 100, (2,), 64, ("engine",))

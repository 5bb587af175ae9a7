"""The pair self-test's host half: what a report means, and what is remembered."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeRuntime, install
from rank_pool import RankPool, outcome

from tp_walk import jit, pair_test
from tp_walk.errors import KernelError, PlanUnavailableError
from tp_walk.group import WalkGroup
from tp_walk.pair_test import PATTERNS, PairReport, PairResult
from tp_walk.topology import Gpu, Link, Topology

GPUS = tuple(Gpu(uuid, "NVIDIA H200", "host", False, "580.159") for uuid in ("aaaa", "bbbb", "cccc"))
TOPOLOGY = Topology(GPUS, (Link("same GPU"), Link("NVLink", 18), Link("NVLink", 18)))


def test_enough_patterns_are_exchanged() -> None:
    assert PATTERNS >= 10**6


def test_the_kernel_fits_one_cta_without_spilling() -> None:
    resources = jit.compile_kernel("pair_test.cu", "pair_test", pair_test.macros(), "sm_90a").resources
    assert resources.registers * pair_test.LANES <= 65_536
    assert resources.stack_bytes == 0


def test_a_report_that_is_laid_out_otherwise_doesnt_compile() -> None:
    macros = pair_test.macros() | {"TPW_PAIR_REPORT_BYTES": ctypes.sizeof(PairReport) + 8}
    source = (jit.csrc_dir() / "pair_test.cu").read_text()
    with pytest.raises(KernelError, match="PairReport differs"):
        jit.compile_source(source, "pair_test.cu", macros, "sm_90a")


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (PairReport(code=1, lane=3, round=9), "didn't arrive in time"),
        (PairReport(code=2, lane=3, round=9, key=0xABC), "in pieces in lane 3, round 9: 0x0000000000000abc"),
        (PairReport(code=3), "out of order"),
        (PairReport(verified=PATTERNS - 1), f"{PATTERNS - 1} of {PATTERNS} words"),
    ],
)
def test_a_failure_is_told(report: PairReport, words: str) -> None:
    assert words in str(report.failure(PATTERNS))


def test_a_whole_exchange_is_no_failure() -> None:
    assert PairReport(verified=PATTERNS).failure(PATTERNS) is None


def test_what_passed_is_remembered_by_pair_driver_boot_and_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "new"))
    entries = {peer: pair_test._cache_path(TOPOLOGY, 0, peer, b"cubin") for peer in (1, 2)}
    results = [PairResult(1, 0.7, 0.9, 3.0, PATTERNS), PairResult(2, 0.8, 1.0, 4.0, PATTERNS)]
    assert pair_test._read_cached(entries) is None
    pair_test._write_cached(entries[1], results[0])
    assert pair_test._read_cached(entries) is None, "one pair is still to be tested"
    pair_test._write_cached(entries[2], results[1])
    assert pair_test._read_cached(entries) == results
    entries[2].write_text("{")
    assert pair_test._read_cached(entries) is None, "a damaged entry is no entry"

    def path(driver: str = "580.159", host: str = "host", cubin: bytes = b"cubin", peer: int = 1) -> Path:
        gpus = tuple(Gpu(gpu.uuid, gpu.name, host, False, driver) for gpu in GPUS)
        return pair_test._cache_path(Topology(gpus, TOPOLOGY.links), 0, peer, cubin)

    assert len({path(), path(driver="1"), path(host="2"), path(cubin=b"3"), path(peer=2)}) == 5


# ---- meetings --------------------------------------------------------------------------------------------------------


def _meetings(cache: str, faulty: tuple[int, int] | None, shared: bool) -> tuple[Any, list[int], int]:
    """A self-test in which nothing is launched: its outcome, whom this rank met, and what is left allocated."""
    group = WalkGroup(dist.group.WORLD, torch.device("cpu"), timeout_s=30.0)
    gpus = tuple(replace(GPUS[0], uuid="one" if shared and rank < 2 else str(rank)) for rank in range(group.world_size))
    links = tuple(Link("NVLink", 18) for _ in gpus)
    met: list[int] = []

    def exchange(*arguments: Any, region: int, lanes: int, rounds: int) -> tuple[PairReport, list[int]]:
        peer = arguments[-1]
        if region == 0:
            met.append(peer)
        code = 2 if faulty == (peer, group.rank) else 0
        report = PairReport(code=code, verified=lanes * rounds, elapsed_ns=10**6, elapsed_cycles=10**6)
        return report, [700 * round for round in range(rounds)]

    with pytest.MonkeyPatch.context() as patch, contextlib.contextmanager(install)(FakeRuntime(group.rank)) as cuda:
        patch.setenv("TP_WALK_CACHE_DIR", cache)
        patch.setattr(pair_test, "_load", lambda kernel, device: None)
        patch.setattr(pair_test, "_exchange", exchange)
        result = outcome(lambda: pair_test.check_pairs(group, Topology(gpus, links), group.device))
        return result, met, len(cuda.allocated) + len(cuda.opened)


def test_every_pair_meets_once_and_is_remembered(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    world = 3
    for rank, (results, met, left) in enumerate(rank_pool(world)(_meetings, str(tmp_path), None, False)):
        others = [other for other in range(world) if other != rank]
        assert sorted(met) == others
        assert results == [PairResult(other, *[pytest.approx(0.7)] * 3, PATTERNS) for other in others]
        assert left == 0
    again = rank_pool(world)(_meetings, str(tmp_path), None, False)
    assert [met for _, met, _ in again] == [[]] * world


def test_a_path_that_fails_is_refused_on_every_rank(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    seen = rank_pool(3)(_meetings, str(tmp_path), (0, 2), False)
    assert {type(error) for error, _, _ in seen} == {PlanUnavailableError}
    assert len({str(error) for error, _, _ in seen}) == 1
    assert "the path from rank 0" in str(seen[0][0])
    assert "to rank 2" in str(seen[0][0])
    assert "NVLink x18" in str(seen[0][0])
    assert [left for _, _, left in seen] == [0, 0, 0]
    assert not list(tmp_path.glob("pair-*")), "nothing is remembered of a test that failed"


def test_ranks_on_one_gpu_have_no_path_to_test(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    seen = rank_pool(3)(_meetings, str(tmp_path), None, True)
    assert [sorted(met) for _, met, _ in seen] == [[2], [2], [0, 1]]


def test_a_home_that_cant_be_written_to_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "file" / "below"))
    path = pair_test._cache_path(TOPOLOGY, 0, 1, b"cubin")
    pair_test._write_cached(path, PairResult(1, 0.7, 0.9, 3.0, PATTERNS))
    assert not path.exists()

"""The compiler, its cache and what a cubin says of itself; no GPU."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_pool import RankPool

from tp_walk import jit
from tp_walk.cubin import resource_usage
from tp_walk.errors import KernelError, PlanUnavailableError

pytest.importorskip("cuda.core", reason="kernels are compiled on Linux only")

SOURCE = """
#include "scale.cuh"
extern "C" __global__ void scale(float* data) { data[threadIdx.x] *= scale_by(); }
extern "C" __global__ void tail(float* data) { __shared__ float s[192]; s[threadIdx.x] = data[0]; data[1] = s[7]; }
"""
HEADER = "__device__ inline float scale_by() { return FACTOR; }"

# 128 live values a thread do not fit the 64 registers that 1024 threads leave each.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* data, int rounds) {
  float live[128];
  #pragma unroll
  for (int i = 0; i < 128; i++) live[i] = data[i * 1024 + threadIdx.x];
  for (int k = 0; k < rounds; k++) {
    #pragma unroll
    for (int i = 0; i < 128; i++) live[i] = live[i] * live[(i * 7 + 1) % 128] + data[i];
  }
  #pragma unroll
  for (int i = 0; i < 128; i++) data[i * 1024 + threadIdx.x] = live[i];
}
"""


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc and a cache of the test's own; nothing compiled before."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "scale.cuh").write_text(HEADER)
    monkeypatch.setattr(jit, "csrc_dir", lambda: folder)
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_cubins", {})
    return folder


@pytest.fixture
def compilations(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that really went to the compiler, in order."""
    names: list[str] = []
    compile_source = jit.compile_source

    def counted(source: str, name: str, *rest: object) -> bytes:
        names.append(name)
        return compile_source(source, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(jit, "compile_source", counted)
    return names


def scale(factor: int = 3, arch: str = "sm_90a") -> jit.CompiledKernel:
    return jit.compile_kernel("scale.cu", "scale", {"FACTOR": factor}, arch)


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next process sees: the disk alone."""
    monkeypatch.setattr(jit, "_cubins", {})


def cache_files(csrc: Path) -> list[Path]:
    return sorted((csrc.parent / "cache").iterdir())


def test_compiles_an_entry_with_macros_and_headers_of_csrc(csrc: Path) -> None:
    kernel = scale()
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.resources.registers > 0
    ptx = jit.to_ptx("scale.cu", {"FACTOR": 3})
    assert ".target sm_90a" in ptx
    assert "0f40400000" in ptx  # 3.0


def test_a_product_and_a_sum_stay_two_roundings(csrc: Path) -> None:
    (csrc / "axpy.cu").write_text('extern "C" __global__ void axpy(float* x) { x[0] = x[1] * x[2] + x[3] / x[4]; }')
    ptx = jit.to_ptx("axpy.cu")
    assert "fma" not in ptx
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx


def test_the_real_sources_are_found() -> None:
    assert any(path.suffix == ".cuh" for path in jit.csrc_dir().iterdir())


def test_second_compilation_comes_from_memory_then_from_disk(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scale()
    assert scale().cubin == first.cubin
    restart(monkeypatch)
    assert scale().cubin == first.cubin
    assert compilations == ["scale.cu"]


@pytest.mark.parametrize("changed", ["macro", "arch", "source", "header", "options"])
def test_whatever_the_cubin_depends_on_is_in_its_key(
    changed: str, csrc: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale()
    factor, arch = 3, "sm_90a"
    if changed == "macro":
        factor = 4
    elif changed == "arch":
        arch = "sm_80"
    elif changed == "source":
        (csrc / "scale.cu").write_text(SOURCE + "\n")
    elif changed == "header":
        (csrc / "scale.cuh").write_text(HEADER + "\n")
    else:
        monkeypatch.setattr(jit, "COMPILER_OPTIONS", {**jit.COMPILER_OPTIONS, "ftz": True})
    scale(factor, arch)
    assert len(compilations) == 2
    assert len(cache_files(csrc)) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_compiled_again_and_mended(
    damage: str, csrc: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = scale().cubin
    (entry,) = cache_files(csrc)
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    entry.write_bytes({"cut": whole[:-9], "flipped": bytes(flipped), "empty": b"", "foreign": b"x" * 99}[damage])
    restart(monkeypatch)
    assert scale().cubin == right
    assert compilations == ["scale.cu"] * 2
    assert "damaged" in caplog.text
    assert entry.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_cache_that_cannot_be_written_is_no_error(
    obstacle: str, csrc: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = csrc.parent / "blocked"
    if obstacle == "file":
        blocked.write_text("a file where a folder should be")
        cache = blocked / "cache"
    else:
        cache = Path("/proc/tp_walk")  # nobody can write here, root neither
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(cache))
    assert scale().cubin == scale().cubin
    assert compilations == ["scale.cu"]
    assert not cache.exists()


def test_a_write_that_fails_midway_leaves_nothing_behind(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert scale().cubin
    assert cache_files(csrc) == []


def compile_in_a_rank(folder: Path, cache: Path) -> list[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_WALK_CACHE_DIR", str(cache))
        patch.setattr(jit, "csrc_dir", lambda: folder)
        patch.setattr(jit, "_cubins", {})
        dist.barrier()
        return [scale(factor).cubin for factor in range(4)]


def test_ranks_that_race_on_the_cache_all_get_whole_kernels(csrc: Path, rank_pool: Callable[[int], RankPool]) -> None:
    compiled = rank_pool(3)(compile_in_a_rank, csrc, csrc.parent / "cache")
    assert compiled[0] == compiled[1] == compiled[2]
    assert len(set(compiled[0])) == 4
    assert len(cache_files(csrc)) == 4  # no temporary file is left
    for path in cache_files(csrc):
        assert jit._read_cached(path) in compiled[0]


def test_a_source_that_does_not_compile_says_where(csrc: Path) -> None:
    (csrc / "scale.cuh").write_text("__device__ float scale_by() { return }")
    with pytest.raises(
        KernelError, match=r"scale\.cu doesn't compile for sm_90a(.|\n)*scale\.cuh.*expected an expression"
    ):
        scale()


def test_an_entry_that_is_not_there_is_named_beside_those_that_are(csrc: Path) -> None:
    with pytest.raises(KernelError, match=r"no entry 'sclae'.*\['scale', 'tail'\]"):
        jit.compile_kernel("scale.cu", "sclae", {"FACTOR": 3}, "sm_90a")


def test_without_a_compiler_the_reason_is_given(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(PlanUnavailableError, match=r"tp-walk\[cu13\]"):
        scale()


def test_a_kernel_is_loaded_only_into_a_context(csrc: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a context to load it into")
    with pytest.raises((KernelError, RuntimeError)):
        scale().load()


def ptxas_report(source: str, arch: str) -> dict[str, tuple[int, int, int, int]]:
    """The assembler's own words: entry → registers, stack bytes, bytes of spill stores, static shared bytes."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    Program(source, "c++", ProgramOptions(arch=arch, ptxas_options=["-v"], std="c++17")).compile("cubin", logs=log)
    report = {}
    for part in log.getvalue().split("Compiling entry function '")[1:]:
        shared = re.search(r"(\d+) bytes smem", part)
        numbers = [int(re.search(rf"(\d+) bytes {what}", part)[1]) for what in ("stack frame", "spill stores")]  # type: ignore[index]
        registers = int(re.search(r"Used (\d+) registers", part)[1])  # type: ignore[index]
        report[part.split("'")[0]] = (registers, *numbers, int(shared[1]) if shared else 0)
    return report  # type: ignore[return-value]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_resources_are_the_assemblers_and_a_spill_shows(arch: str) -> None:
    source = SPILLING + SOURCE.replace('#include "scale.cuh"', HEADER.replace("FACTOR", "3"))
    usage = resource_usage(jit.compile_source(source, "spill.cu", {}, arch))
    report = ptxas_report(source, arch)
    assert sorted(usage) == sorted(report) == ["scale", "spilling", "tail"]
    _, _, spilled, _ = report["spilling"]
    assert spilled > 0, "this kernel is here because it spills"
    assert usage["spilling"].stack_bytes > 0
    assert usage["scale"].stack_bytes == usage["tail"].stack_bytes == 0
    for entry, (registers, stack_bytes, _, shared_bytes) in report.items():
        found = usage[entry]
        # COMPILER_OPTIONS may cost the spilling kernel another register allocation, not another kind of one.
        if entry != "spilling":
            assert (found.registers, found.stack_bytes) == (registers, stack_bytes)
        assert found.static_shared_bytes == shared_bytes
    assert usage["tail"].static_shared_bytes == 192 * 4


@pytest.mark.parametrize("keep", [0, 3, 64, 700, 1500])
def test_a_cubin_that_is_cut_off_is_refused(csrc: Path, keep: int) -> None:
    with pytest.raises(KernelError, match="no whole cubin"):
        resource_usage(scale().cubin[:keep])

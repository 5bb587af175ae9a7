"""Where a step's time goes: every build that lacks a part compiles, keeps its registers, and really lacks it."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import kernel_variants
import pytest
import steps
from kernel_variants import EXCHANGE, LEFT_OUT, NOISE, PRODUCTS, ROWS, STEPS, W2, U
from ptx_access import compile_to_ptx
from test_specialisations import SPILL_BYTES

from tp_walk import jit, kernels
from tp_walk.kernels import Specialisation
from tp_walk.precompile import HOPPER
from tp_walk.timing import Timing

OPTIONS = steps.Options(151_936, (1, 8, 64), (7, 16), 200, 60.0, Path("steps.json"), 0.0)


def specialisation(plan: str, batch: int, sampled: bool) -> Specialisation:
    (one,) = (one for one in steps.specialisations_of(plan, 151_936, batch, 2, HOPPER) if one.sampled == sampled)
    return one


@pytest.mark.parametrize(
    ("name", "plan", "batch", "sampled"),
    [
        *((name, "tp_bf16", 1, False) for name in LEFT_OUT if name != NOISE),
        (NOISE, "int8", 64, True),
        *((name, "int8", 1, True) for name in LEFT_OUT),
    ],
)
def test_a_build_without_a_part_keeps_its_registers(
    name: str, plan: str, batch: int, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "csrc_dir", jit.csrc_dir)  # put back afterwards
    macros = specialisation(plan, batch, sampled).macros
    whole = jit.compile_kernel("walk.cu", "walk", macros, HOPPER.arch)
    kernel_variants.use(name)
    build = jit.compile_kernel("walk.cu", "walk", macros, HOPPER.arch)
    kernel_variants.use("production")
    assert build.cubin != whole.cubin
    assert build.resources.stack_bytes <= SPILL_BYTES[sampled]
    assert build.resources.registers * kernels.THREADS <= 65_536
    assert build.resources.static_shared_bytes == whole.resources.static_shared_bytes


# What there is none of in the code, and what there is less of.
NONE = {
    PRODUCTS: "mma.sync",
    U: "ld.global.nc.v4",
    NOISE: "lg2.approx",
    W2: "ld.global.nc.L1::no_allocate",
    STEPS: "mma.sync",
}
FEWER = {
    ROWS: "add.rn.bf16x2",
    EXCHANGE: "ld.relaxed.sys.global.b128",
    U: "prefetch.global.L2",
    W2: "cp.async.bulk.shared::cluster",
}
# What must not go with it, though nobody reads it.
KEPT = {
    PRODUCTS: "ld.global.nc.L1::no_allocate",
    ROWS: "mma.sync",
    W2: "mma.sync",
    STEPS: "ld.global.nc.L1::no_allocate",
}


@pytest.mark.parametrize("batch", OPTIONS.batches)
@pytest.mark.parametrize("plan", steps.PLANS)
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_left_out_is_gone_and_nothing_else(plan: str, batch: int, sampled: bool, tmp_path: Path) -> None:
    one = specialisation(plan, batch, sampled)
    macros = one.macros
    whole = compile_to_ptx(jit.csrc_dir(), "walk.cu", macros)

    def of_kernel(instruction: str) -> str:
        return "wgmma.mma_async" if one.placement.by_warpgroups and instruction == "mma.sync" else instruction

    for name in steps.builds(sampled)[1:]:
        build = compile_to_ptx(kernel_variants.edited(name, tmp_path), "walk.cu", macros)
        if name in NONE:
            assert build.count(of_kernel(NONE[name])) == 0, name
        # By warpgroups all of W2 comes by the same loads.
        if name in FEWER and not (one.placement.by_warpgroups and name == W2):
            assert build.count(FEWER[name]) < whole.count(FEWER[name]), name
        if name in KEPT:
            step_k = 32 if plan == "int8" else 16
            loads = macros["TPW_REG_TILES"] * steps.MARKOV_RANK // step_k
            least = whole.count(of_kernel("mma.sync")) if KEPT[name] == "mma.sync" else loads
            assert least > 0
            assert build.count(of_kernel(KEPT[name])) >= least, name


def test_every_timed_kernel_is_compiled_ahead_and_no_other() -> None:
    wanted = steps.jobs(OPTIONS, 2, HOPPER)
    assert len(wanted) == len({(job.variant, job.macros) for job in wanted})
    for plan, batch, sampled in itertools.product(steps.PLANS, OPTIONS.batches, (False, True)):
        macros = tuple(specialisation(plan, batch, sampled).macros.items())
        assert {job.variant for job in wanted if job.macros == macros} == set(steps.builds(sampled))
    for job in wanted:
        assert not dict(job.macros)["TPW_LOGITS"]


def test_the_first_batch_has_all_gammas_and_the_first_gamma_comes_first() -> None:
    sizes = [size for batch in OPTIONS.batches for plan in steps.PLANS for size in OPTIONS.sizes(plan, batch)]
    assert len(sizes) == len(set(sizes)) == 2 * 2 * (2 + 1 + 1)
    assert {size.batch for size in sizes if size.gamma == 16} == {1}
    assert [(size.gamma, size.sampled) for size in sizes[:4]] == [(7, False), (7, True), (16, False), (16, True)]


@pytest.mark.parametrize(("takes_s", "codes"), [(0.0, []), (0.3, [1])])
def test_a_process_whose_kernel_hangs_ends_and_says_where(
    takes_s: float, codes: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with steps.ended_if_hung("build x", 0.1):
        time.sleep(takes_s)
    time.sleep(0.2)
    assert ended == codes
    assert capsys.readouterr().err == "build x hangs: given up after 0.1 s\n" * len(codes)


def test_a_row_says_what_each_part_takes() -> None:
    def timing(median_us: float) -> Timing:
        return Timing(median_us, median_us + 5.0, 1.0, 200)

    timings = {steps.WHOLE: timing(40.0), PRODUCTS: timing(26.0), W2: timing(31.0), steps.EMPTY: timing(5.0)}
    row = steps.row_of(steps.Size("tp_bf16", 1, 7, False), timings, 2)
    assert (row["where"], row["mode"], row["whole_us"], row["empty_us"]) == ("tp_bf16 on 2", "greedy", 40.0, 5.0)
    assert (row["products_us"], row["products_step_us"], row["products_text"]) == (14.0, 2.0, "14.0 / 2.00")
    assert row["w2_text"] == "9.0"
    assert "noise_text" not in row
    table = steps.table_of([row], 151_936)
    (cells,) = table.cells()
    assert cells[table.columns.index(next(one for one in table.columns if one.key == "noise_text"))] == "–"
    assert {column.key for column in table.columns} >= {f"{key}_text" for key in steps.KEYS.values()}

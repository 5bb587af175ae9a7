"""Every specialisation of the walk kernel compiles for Hopper, and keeps its registers."""

from __future__ import annotations

import pytest

from tp_walk import certified, jit, kernels, precompile, spread
from tp_walk.config import Rounding
from tp_walk.errors import PlanUnavailableError
from tp_walk.executors import TpBf16Executor
from tp_walk.int8_executors import Int8Executor
from tp_walk.placement import (
    MULTIPLY_WARPS,
    SERVICE_WARPS,
    WARP_SIZE,
    ColumnUse,
    column_uses,
)
from tp_walk.precompile import HOPPER, jobs

# (int8, rows of W2 on a rank, world size): V = 151,936 over 2 and 8 ranks, and whole as int8.
SHAPES = [(False, 75_968, 2), (False, 18_992, 8), (True, 151_936, 1), (True, 151_936, 2), (True, 151_936, 8)]

# What the assembler may spill, in bytes a thread, of greedy and of sampled walks: registers of the service warps, most
# of them where a sampled score is contested, or logits are copied. W2 in the multiply warps would be far more: a
# spilled register of it is waited for at the start and read back each step.
SPILL_BYTES = {False: 48, True: 64}


def specialisations(
    int8: bool, rows: int, world_size: int, rounding: Rounding = "engine", num_sms: int = HOPPER.num_sms
) -> list[kernels.Specialisation]:
    return kernels.specialisations(
        int8=int8,
        markov_rank=256,
        rows=rows,
        world_size=world_size,
        max_batch=64,
        rounding=rounding,
        num_sms=num_sms,
        shared_limit=HOPPER.shared_limit,
    )


# Those of int8 differ by a few constants from world to world.
COMPILED = SHAPES[:3]


def compiled(int8: bool, rows: int, world_size: int) -> list[kernels.Specialisation]:
    found = specialisations(int8, rows, world_size)
    return [one for one in found if one.logits == "none" or world_size == 2]  # as do others' from those of world 2


@pytest.fixture(scope="module")
def cache() -> None:
    """Filled by all cores."""
    every = [one for shape in COMPILED for one in compiled(*shape)]
    jobs = {precompile.Job("walk", "walk.cu", "walk", tuple(one.macros.items())) for one in every}
    precompile.compile_together(jobs, HOPPER.arch)


@pytest.mark.parametrize(("int8", "rows", "world_size"), COMPILED)
def test_specialisations_keep_their_registers(int8: bool, rows: int, world_size: int, cache: None) -> None:
    for one in compiled(int8, rows, world_size):
        used = jit.compile_kernel("walk.cu", "walk", one.macros, HOPPER.arch).resources
        assert used.stack_bytes <= SPILL_BYTES[one.sampled], (one.sampled, one.logits, one.columns)
        # setmaxnreg hands registers from warp group to warp group; a launch must come with enough to hand out.
        assert used.registers * kernels.THREADS <= 65_536
        multiply, service = one.placement.registers
        handed_out = WARP_SIZE * (MULTIPLY_WARPS * multiply + SERVICE_WARPS * service)
        assert handed_out <= used.registers * kernels.THREADS
        assert used.static_shared_bytes + one.placement.shared_bytes <= HOPPER.shared_limit


@pytest.mark.parametrize(("int8", "rows", "world_size"), SHAPES)
def test_every_row_has_one_place(int8: bool, rows: int, world_size: int) -> None:
    for one in specialisations(int8, rows, world_size):
        placed = one.placement
        resident = placed.reg_tiles * kernels.MULTIPLY_WARPS + placed.smem_tiles
        assert placed.grid * placed.tiles_per_cta * 16 >= rows > (placed.grid - 1) * placed.tiles_per_cta * 16
        assert placed.streamed_tiles == max(0, placed.tiles_per_cta - resident)
        assert placed.grid <= HOPPER.num_sms


# What columns are used for → the batches walked so.
SINGLE, NARROW = ColumnUse(1, narrow=True, single=True), ColumnUse(1, narrow=True)
OF_INT8 = {ColumnUse(1, single=True): (1, 1), ColumnUse(1): (2, 4), ColumnUse(2): (5, 64)}
FOR_BATCHES = {
    (False, False): {SINGLE: (1, 1), ColumnUse(1): (2, 8), ColumnUse(2): (9, 64)},
    (False, True): {SINGLE: (1, 1), NARROW: (2, 4), ColumnUse(1): (5, 8), ColumnUse(2): (9, 64)},
    (True, False): OF_INT8,
    (True, True): OF_INT8,
}


@pytest.mark.parametrize(("int8", "sampled"), FOR_BATCHES)
def test_each_batch_is_walked_by_the_kernel_that_is_for_it(int8: bool, sampled: bool) -> None:
    executor_class = Int8Executor if int8 else TpBf16Executor
    executor = executor_class.__new__(executor_class)
    found = [one for one in specialisations(int8, 75_968, 2) if (one.sampled, one.logits) == (sampled, "none")]
    executor._launches = {(False, sampled, "none"): [(None, one) for one in found]}  # type: ignore[list-item]
    walked: dict[ColumnUse, list[int]] = {}
    for batch in range(1, 65):
        columns = executor._chosen(False, sampled, "none", batch)[1].columns
        walked.setdefault(columns, []).append(batch)
    assert {use: (batches[0], batches[-1]) for use, batches in walked.items()} == FOR_BATCHES[int8, sampled]


@pytest.mark.parametrize(("sms", "rows"), [(40, 151_936), (60, 248_320), (132, 500_000)])
def test_without_room_for_eight_no_batch_falls_to_the_kernel_of_one(sms: int, rows: int) -> None:
    found = specialisations(False, rows, 1, "none", sms)
    last = [one for one in found if (one.base_fp32, one.sampled, one.logits) == (True, False, "none")][-1]
    assert (last.columns, last.serves) == (NARROW, 4)


@pytest.mark.parametrize(("max_batch", "greedy", "sampled"), [(1, 1, 1), (2, 2, 2), (4, 2, 2), (5, 2, 3), (9, 3, 4)])
def test_no_kernel_is_loaded_that_no_batch_wants(max_batch: int, greedy: int, sampled: int) -> None:
    assert len(column_uses(False, max_batch, False)) == greedy
    assert len(column_uses(False, max_batch, True)) == sampled


@pytest.mark.parametrize("base_fp32", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_exchange_of_base_logits_spills_nothing(world_size: int, base_fp32: bool) -> None:
    macros = spread.spread_macros(world_size, 64, base_fp32=base_fp32)
    used = jit.compile_kernel("spread.cu", "spread", macros, HOPPER.arch).resources
    assert used.stack_bytes == 0
    assert used.registers * spread.SPREAD_WARPS * 32 <= 65_536


def test_ranks_that_are_no_power_of_two_hold_int8_too() -> None:
    (one, *_) = specialisations(True, 151_936, 3)
    assert (
        jit.compile_kernel("walk.cu", "walk", one.macros, HOPPER.arch).resources.stack_bytes <= SPILL_BYTES[one.sampled]
    )


# With two tiles a warp in registers, and with one.
@pytest.mark.parametrize(("rows", "world_size"), [(75_968, 2), (2_100, 1)])
@pytest.mark.parametrize("rounding", ["once", "none"])
def test_other_roundings_find_registers(rows: int, world_size: int, rounding: Rounding) -> None:
    """Of the kernels that have most to keep: sampled, with logits and two groups of columns."""
    found = specialisations(False, rows, world_size, rounding)
    wanted = [one for one in found if one.sampled and one.logits != "none" and one.columns.groups == 2]
    assert {one.logits for one in wanted} == ({"local", "full"} if world_size > 1 else {"local"})
    for one in wanted:
        used = jit.compile_kernel("walk.cu", "walk", one.macros, HOPPER.arch).resources
        assert used.stack_bytes <= SPILL_BYTES[True], (one.logits, one.base_fp32)


# Ids on each rank.
@pytest.mark.parametrize(
    ("widths", "rounding"),
    [([75_968] * 2, "engine"), ([18_992] * 8, "engine"), ([248_320], "engine"), ([75_968] * 2, "none")],
)
def test_certified_specialisations_keep_their_registers(widths: list[int], rounding: Rounding) -> None:
    found = certified.certify_specialisations(
        markov_rank=256,
        widths=widths,
        max_batch=64,
        rounding=rounding,
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
    )
    assert {one.sampled for one in found} == {False, True}
    for one in found:
        used = jit.compile_kernel("certify.cu", "certify", one.macros, HOPPER.arch).resources
        # The logarithms of exact noise, in double precision and away from the chase, take some. fp32 base logits, which
        # sampled walks of rounding "none" have, take twice the registers for the next unit.
        most = 208 if one.base_fp32 else 64 if one.sampled else 0
        assert used.stack_bytes <= most, (one.max_batch, one.sampled)
        assert used.registers * certified.WARPS * 32 <= 65_536
        assert used.static_shared_bytes + one.shared_bytes <= HOPPER.shared_limit


def test_a_vocabulary_with_more_candidates_than_are_gathered_has_no_plan_certified() -> None:
    with pytest.raises(PlanUnavailableError, match=r"gathers 16384 words .* 1 ranks with 450000 ids would send 17160"):
        certified.certify_specialisations(
            markov_rank=256,
            widths=[450_000],
            max_batch=64,
            rounding="none",
            num_sms=HOPPER.num_sms,
            shared_limit=HOPPER.shared_limit,
        )


@pytest.mark.parametrize("markov_rank", [256, 512])
def test_bounds_keep_their_registers(markov_rank: int) -> None:
    macros = certified.bound_macros(markov_rank)
    used = jit.compile_kernel("certify_bounds.cu", "certify_bounds", macros, HOPPER.arch).resources
    assert used.stack_bytes == 0
    assert used.registers * certified.BOUND_THREADS <= 65_536


@pytest.mark.parametrize(
    ("batch", "gamma", "ranks", "expected"),
    [
        (1, 7, 2, (1, 16, 1)),  # no more than the tier has tokens for
        (1, 16, 2, (1, 7, 1)),
        (2, 7, 2, (1, 8, 1)),
        (8, 7, 2, (2, 4, 0)),
        (8, 7, 1, (1, 2, 0)),
        (5, 16, 2, (2, 2, 0)),  # one of the ranks has three of the five
        (64, 16, 2, (2, 1, 0)),
        (2, 64, 4, (1, 1, 0)),  # too few requests for four ranks
    ],
)
def test_shares_of_plan_certified(batch: int, gamma: int, ranks: int, expected: tuple[int, int, int]) -> None:
    (one, *_) = certified.certify_specialisations(
        markov_rank=256,
        widths=[151_936 // ranks] * ranks,
        max_batch=64,
        rounding="engine",
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
    )
    owners, team, helpers = certified.shares(batch, gamma, ranks, one)
    assert (owners, team, helpers) == expected
    # A follower waits for its helper: both are on the GPU if each CTA has one step.
    assert helpers == 0 or -(-batch // owners) * gamma * (team + helpers) <= one.grid


def test_three_ranks_have_the_kernels_of_one_gpu_alone() -> None:
    wanted = jobs(2_384, 256, [3], 1, ["engine"])
    assert {job.purpose.split(" on ")[0].split(" of ")[0] for job in wanted} == {
        "int8",
        "int8 and int8_split",
        "self-test",
    }

"""The stopwatch's arithmetic and order, and its device half as far as a compiler can tell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from tp_walk import jit
from tp_walk.errors import WalkError
from tp_walk.group import WalkGroup
from tp_walk.timing import WARM_UP_ITERATIONS, BlockTimer, Timing, gate_macros

CPU = torch.device("cpu")


def timer() -> BlockTimer:
    return BlockTimer(WalkGroup(dist.group.WORLD if dist.is_initialized() else None, CPU), CPU)


def test_a_time_is_the_slowest_ranks_iteration_by_iteration() -> None:
    # Neither rank's own median is 3: slow iterations fall on different ranks.
    timing = Timing.of(np.array([[3.0, 1.0, 1.0, 3.0], [1.0, 3.0, 3.0, 1.0]]))
    assert timing == Timing(median_us=3.0, p99_us=3.0, spread_us=0.0, iterations=4)


def test_median_tail_and_quartiles() -> None:
    timing = Timing.of(np.arange(101.0)[None])
    assert timing == Timing(median_us=50.0, p99_us=99.0, spread_us=50.0, iterations=101)


def test_candidates_take_turns_and_each_comes_first_equally_often() -> None:
    calls: list[str] = []
    names = ["a", "b", "c"]
    with timer() as stopwatch:
        timings = stopwatch.measure({name: (lambda name=name: calls.append(name)) for name in names}, iterations=6)
    assert list(timings) == names
    assert all(timing.iterations == 6 for timing in timings.values())
    measured = calls[WARM_UP_ITERATIONS * 3 :]
    rounds = [measured[start : start + 3] for start in range(0, len(measured), 3)]
    assert len(rounds) == 6
    assert all(sorted(one) == names for one in rounds)
    assert sorted(one[0] for one in rounds) == ["a", "a", "b", "b", "c", "c"]


def test_nothing_to_measure_is_no_error() -> None:
    with timer() as stopwatch:
        assert stopwatch.measure({}) == {}


def _measure_together() -> dict[str, Timing]:
    with timer() as stopwatch:
        return stopwatch.measure({"nothing": lambda: None}, iterations=3)


def test_ranks_get_the_same_figures(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2)(_measure_together)
    assert first == second


def test_an_empty_graph_needs_a_gpu() -> None:
    with timer() as stopwatch, pytest.raises(WalkError, match="needs a CUDA device"):
        stopwatch.empty_graph(32)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_gate_compiles_and_moves_whole_words_of_system_scope(world_size: int) -> None:
    macros = gate_macros(world_size)
    for entry in ("gate", "empty"):
        assert jit.compile_kernel("gate.cu", entry, macros, "sm_90a").resources.stack_bytes == 0
    accesses = [line for line in jit.to_ptx("gate.cu", macros).splitlines() if "b128 word" in line]
    assert any("st.relaxed.sys.global.b128" in line for line in accesses)
    assert all(".relaxed.sys.global.b128" in line for line in accesses)


def test_the_gates_two_halves_must_have_the_same_fields() -> None:
    macros = gate_macros(2)
    macros["TPW_GATE_BYTES"] += 8
    with pytest.raises(WalkError, match="GateParams has other fields"):
        jit.compile_source((jit.csrc_dir() / "gate.cu").read_text(), "gate.cu", macros, "sm_90a")

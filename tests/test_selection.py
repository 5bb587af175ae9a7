"""Which plan is selected, and what is said about it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome
from test_plan_table import CROSSING, MACHINE, row, table

import tp_walk
from tp_walk import cost_model, plan_table, selection
from tp_walk.config import WalkShape
from tp_walk.errors import PlanUnavailableError, WalkMismatch
from tp_walk.group import WalkGroup
from tp_walk.plan import EXECUTORS, Plan
from tp_walk.plan_table import PlanTable, user_path
from tp_walk.selection import Selector, agree_on_selector, changes, machine_of

CPU = torch.device("cpu")
KERNELS = ("tp_bf16", "int8", "int8_split")


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TP_WALK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(plan_table, "_warned", set())
    return tmp_path


class TestFromATable:
    selector = Selector(MACHINE, CROSSING, KERNELS)

    def test_the_fastest_is_taken_with_its_margin(self) -> None:
        plan = self.selector(8, 7, False, "sharded")
        assert plan == Plan("int8", 40.0, "tp_bf16", 1.1, f"measured 2026-11-29 on {MACHINE}")

    @pytest.mark.parametrize(("batch", "name"), [(1, "int8"), (11, "int8"), (13, "tp_bf16"), (64, "tp_bf16")])
    def test_the_winner_changes_where_the_times_cross(self, batch: int, name: str) -> None:
        assert self.selector(batch, 7, False, "sharded").name == name

    def test_what_was_not_measured_is_said(self) -> None:
        assert "interpolated between batch 8 and 16" in self.selector(12, 7, False, "sharded").provenance
        assert "nearest measured batch 16" in self.selector(64, 7, False, "sharded").provenance
        assert "nearest measured gamma 7" in self.selector(8, 16, False, "sharded").provenance

    def test_an_empty_batch_is_taken_for_one_request(self) -> None:
        assert self.selector(0, 7, False, "sharded").name == "int8"

    def test_a_plan_that_cannot_run_here_is_never_taken(self) -> None:
        plan = self.selector.among(["tp_bf16", "reference"])(8, 7, False, "sharded")
        assert (plan.name, plan.runner_up, plan.margin) == ("tp_bf16", None, None)

    def test_the_definitions_are_taken_only_where_nothing_else_runs(self) -> None:
        fast_reference = table(row(8, tp_bf16=44.0, reference=1.0))
        assert Selector(MACHINE, fast_reference, ["tp_bf16", "reference"])(8, 7, False, "sharded").name == "tp_bf16"
        assert Selector(MACHINE, fast_reference, ["reference_int8"])(8, 7, False, "sharded").name == "reference_int8"

    def test_a_mode_that_was_not_measured_falls_back_on_the_seed(self) -> None:
        plan = self.selector(8, 7, True, "sharded")
        assert plan.provenance.startswith("seed")
        assert "tp-walk crossover --nproc 2 --vocab 151936 --rank 256" in plan.provenance

    def test_other_software_is_said(self) -> None:
        changed = changes({"driver": "580", "CUDA": "13.0", "date": "x"}, {"driver": "590", "CUDA": "13.0"})
        assert changed == "since then: driver 580 → 590"
        assert changes({"driver": "580", "date": "x"}, {"driver": "580"}) == ""
        assert changes({"driver": "580"}, {"driver": None}) == ""  # not known here
        assert Selector(MACHINE, CROSSING, KERNELS, changed)(8, 7, False, "sharded").provenance.endswith(changed)

    def test_a_second_call_looks_nothing_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        selector = Selector(MACHINE, CROSSING, KERNELS)
        first = selector(9, 7, False, "sharded")
        monkeypatch.setattr(PlanTable, "estimate", None)
        assert selector(9, 7, False, "sharded") is first

    def test_walks_that_report_leave_out_what_is_slow_to_report(self) -> None:
        measured = table(row(8, tp_bf16=44.0, int8=50.0, int8_split=30.0))
        selector = Selector(MACHINE, measured, KERNELS)
        assert selector(8, 7, False, "sharded").name == "int8_split"
        assert selector.reporting(8, 7, False, "sharded").name == "tp_bf16"
        alone = Selector(MACHINE, measured, ["int8_split", "reference"])
        assert alone.reporting(8, 7, False, "sharded").name == "int8_split"
        on_text = Selector(MACHINE, table(row(8, tp_bf16=44.0, int8=40.0, certified=30.0)), [*KERNELS, "certified"])
        assert on_text(8, 7, False, "sharded").name == "certified"
        assert on_text.reporting(8, 7, False, "sharded").name == "int8"

    def test_what_certified_was_timed_on_is_said_where_it_is_compared(self) -> None:
        for text, said in (("a corpus", "certified on a corpus"), (None, "certified on random weights")):
            measured = table(row(8, tp_bf16=44.0, certified=30.0), text=text)
            assert Selector(MACHINE, measured, ["tp_bf16", "certified"])(8, 7, False, "sharded").provenance == (
                f"measured 2026-11-29 on {MACHINE}; {said}"
            )
            assert "certified" not in Selector(MACHINE, measured, KERNELS)(8, 7, False, "sharded").provenance


class TestFromTheSeed:
    def seed(self, plan: str, batch: int, **changes: Any) -> float:
        size = {
            "vocab_size": 151_936,
            "markov_rank": 256,
            "world_size": 2,
            "gamma": 7,
            "sampled": False,
            "layout": "sharded",
        }
        us = cost_model.seed_us(plan, batch=batch, **(size | changes))
        assert us is not None
        return us

    def test_the_limits_of_the_hardware_are_kept(self) -> None:
        """Two GPUs at batch 1: 4.4 + 13.9 + γ · (1.94 + 0.9) µs, as DESIGN section 5 has it; then half of it again."""
        for gamma in (7, 16):
            limit = 4.4 + 13.9 + gamma * (1.94 + 0.9)
            assert limit < self.seed("tp_bf16", 1, gamma=gamma) < 1.5 * limit

    def test_what_grows_costs_more(self) -> None:
        for plan in KERNELS:
            assert self.seed(plan, 8, sampled=True) > self.seed(plan, 8)
            assert self.seed(plan, 8, gamma=16) > self.seed(plan, 8)
            assert self.seed(plan, 8, vocab_size=248_320) > self.seed(plan, 8)
            assert self.seed(plan, 64) > self.seed(plan, 8)

    def test_gathering_costs_only_the_plans_that_gather(self) -> None:
        assert self.seed("tp_bf16", 8, layout="full") == self.seed("tp_bf16", 8)
        assert self.seed("int8", 8, layout="full") < self.seed("int8", 8)
        assert self.seed("int8", 8, world_size=1) == self.seed("int8", 8, layout="full")

    def test_splitting_the_batch_pays_once_it_is_large(self) -> None:
        assert self.seed("int8", 1, layout="full") < self.seed("int8_split", 1, layout="full")
        for layout in ("full", "sharded"):
            assert self.seed("int8_split", 64, layout=layout) < self.seed("int8", 64, layout=layout)
        assert self.seed("int8_split", 8, layout="full") < self.seed("int8_split", 8)

    def test_weights_that_one_gpu_cannot_hold_are_streamed_in_every_step(self) -> None:
        held, streamed = (
            self.seed(plan, 1, gamma=16, world_size=1, layout="full") - self.seed(plan, 1, world_size=1, layout="full")
            for plan in ("int8", "tp_bf16")
        )
        assert streamed > 3 * held

    def test_a_crossover_where_the_base_logits_are_whole(self) -> None:
        chosen = {b: Selector(MACHINE, None, KERNELS)(b, 7, False, "full").name for b in (1, 8, 64)}
        assert chosen == {1: "int8", 8: "tp_bf16", 64: "tp_bf16"}

    def test_a_head_that_kernels_do_not_hold_has_no_time(self) -> None:
        sizes = {"world_size": 2, "batch": 1, "gamma": 7, "sampled": False, "layout": "full"}
        assert cost_model.seed_us("int8", vocab_size=151_936, markov_rank=64, **sizes) is None
        assert cost_model.seed_us("int8", vocab_size=151_936, markov_rank=512, **sizes) is not None

    def test_a_world_of_one_has_no_batch_to_split(self) -> None:
        alone = replace(MACHINE, world_size=1, link="none")
        assert Selector(alone, None, KERNELS)(8, 7, False, "full").runner_up == "tp_bf16"

    def test_a_plan_of_which_nothing_is_known_is_not_preferred(self) -> None:
        assert (
            cost_model.seed_us(
                "certified",
                vocab_size=9,
                markov_rank=1,
                world_size=1,
                batch=1,
                gamma=1,
                sampled=False,
                layout="full",
            )
            is None
        )
        assert Selector(MACHINE, None, ["certified", "int8"])(64, 7, False, "sharded").name == "int8"
        alone = Selector(MACHINE, None, ["certified"])(64, 7, False, "sharded")
        assert (alone.name, alone.expected_us) == ("certified", None)


def _cpu_machine(world_size: int) -> plan_table.Machine:
    return plan_table.Machine("CPU", world_size, "none" if world_size == 1 else "unknown", 300, 8)


def _agree(plans_of_rank: list[list[str]], data_dirs: list[str]) -> Any:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_WALK_DATA_DIR", data_dirs[rank])
        group = WalkGroup(dist.group.WORLD, CPU)

        def agree() -> tuple[Plan, str]:
            selector = agree_on_selector(group, CPU, WalkShape(300, 8, group.world_size), plans_of_rank[rank])
            return selector(8, 7, False, "sharded"), selector.digest()

        return outcome(agree)


class TestAgreement:
    def test_all_ranks_use_the_table_of_rank_0(self, tmp_path: Path, rank_pool: Callable[[int], RankPool]) -> None:
        machine = _cpu_machine(2)
        folders = [tmp_path / "zero", tmp_path / "one"]
        replace(CROSSING, machine=machine).write(folders[0] / "crossover" / machine.file_name)
        opposite = table(row(8, tp_bf16=1.0, int8=2.0))
        replace(opposite, machine=machine).write(folders[1] / "crossover" / machine.file_name)
        answers = rank_pool(2)(_agree, [["tp_bf16", "int8"]] * 2, [str(folder) for folder in folders])
        assert answers[0] == answers[1]
        assert answers[0][0].name == "int8"
        assert answers[0][0].provenance.startswith("measured 2026-11-29 on 2× CPU")
        assert "; since then: torch None → " in answers[0][0].provenance

    def test_ranks_that_would_choose_differently_all_say_so(
        self, tmp_path: Path, rank_pool: Callable[[int], RankPool]
    ) -> None:
        answers = rank_pool(2)(_agree, [["tp_bf16", "int8"], ["tp_bf16"]], [str(tmp_path)] * 2)
        assert all(isinstance(answer, WalkMismatch) for answer in answers)
        assert str(answers[0]) == str(answers[1])

    def test_a_world_of_one_has_no_link(self) -> None:
        assert machine_of(WalkGroup(None, CPU), CPU, WalkShape(300, 8, 1)) == _cpu_machine(1)

    def test_where_only_definitions_run_no_table_is_looked_for(
        self, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        path = user_path(_cpu_machine(1))
        path.parent.mkdir(parents=True)
        path.write_text("{")
        with caplog.at_level(logging.WARNING):
            agree_on_selector(WalkGroup(None, CPU), CPU, WalkShape(300, 8, 1), ["reference"])
            assert not caplog.records
            agree_on_selector(WalkGroup(None, CPU), CPU, WalkShape(300, 8, 1), ["reference", "int8"])
            assert len(caplog.records) == 1


class _Fake:
    """An executor that does nothing, under a kernel plan's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def memory_bytes(self) -> int:
        return 0

    def walk(self, inputs: tp_walk.plan.WalkInputs) -> None:
        inputs.tokens.zero_()

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[tp_walk.WalkRuntime]:
    """Holds what pretends to be tp_bf16 and int8, with a table measured on "this machine"."""
    for name in ("tp_bf16", "int8"):
        monkeypatch.setitem(EXECUTORS, name, lambda context, name=name: _Fake(name))
    rows = [replace(one, layout="full") for one in CROSSING.rows]
    PlanTable(_cpu_machine(1), CROSSING.provenance, rows).write(user_path(_cpu_machine(1)))
    head = tp_walk.MarkovHead(*(torch.zeros(300, 8, dtype=torch.bfloat16) for _ in range(2)))
    with tp_walk.WalkRuntime(head, device="cpu", max_batch=64, max_gamma=7) as made:
        yield made


class TestInARuntime:
    def walked(self, runtime: tp_walk.WalkRuntime, batch: int) -> Plan:
        base = torch.zeros(batch, 7, 300, dtype=torch.bfloat16)
        plan = runtime.walk(base, torch.zeros(batch, dtype=torch.int64)).plan
        assert plan is not None
        return plan

    def test_each_walk_takes_the_plan_of_its_size(self, runtime: tp_walk.WalkRuntime) -> None:
        assert [self.walked(runtime, batch).name for batch in (8, 16, 64)] == ["int8", "tp_bf16", "tp_bf16"]
        assert self.walked(runtime, 8) == runtime.auto_select(8)
        assert runtime.auto_select(8).runner_up == "tp_bf16"

    def test_explain_gives_times_and_reasons(self, runtime: tp_walk.WalkRuntime) -> None:
        first, *lines = runtime.explain(12).splitlines()
        assert first.startswith("batch 12: ")
        assert "interpolated between batch 8 and 16" in first
        told = {line.split(":")[0].strip(): line for line in lines}
        assert "45.0 µs expected" in told["int8"]

    def test_the_environment_goes_first(self, monkeypatch: pytest.MonkeyPatch, runtime: tp_walk.WalkRuntime) -> None:
        monkeypatch.setenv("TP_WALK_PLAN", "tp_bf16")
        head = tp_walk.MarkovHead(*(torch.zeros(300, 8, dtype=torch.bfloat16) for _ in range(2)))
        with tp_walk.WalkRuntime(head, device="cpu", max_gamma=7) as forced:
            assert self.walked(forced, 8).name == "tp_bf16"

    def test_a_repeated_call_costs_microseconds(self, runtime: tp_walk.WalkRuntime) -> None:
        """No clock is trusted here: the number of Python calls that a repeated selection makes is counted."""
        import sys

        runtime.auto_select(8)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
        try:
            runtime.auto_select(8)
        finally:
            sys.setprofile(None)
        assert len(calls) < 10


class TestWithoutARuntime:
    @pytest.fixture(autouse=True)
    def _no_runtime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that tests of other files have left to the garbage collector are none of these tests'."""
        monkeypatch.setattr(tp_walk.runtime, "_open", weakref.WeakValueDictionary())

    def test_without_a_gpu_there_is_nothing_to_select(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        with pytest.raises(PlanUnavailableError, match="no CUDA device"):
            tp_walk.auto_select(8, shape=WalkShape(151_936, 256, 2))

    def test_on_a_gpu_the_table_or_the_seed_answers(self, two_h200s: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "software", lambda: {"driver": "580"})  # as when CROSSING was measured
        monkeypatch.setattr(plan_table, "SHIPPED_DIR", Path("/nowhere"))
        shape = WalkShape(151_936, 256, 2)
        assert tp_walk.auto_select(8, shape=shape).provenance.startswith("seed")
        CROSSING.write(user_path(MACHINE))
        plan = tp_walk.auto_select(8, shape=shape)
        told = f"measured 2026-11-29 on {MACHINE}; a table of your own"
        assert plan == Plan("int8", 40.0, "tp_bf16", 1.1, told)

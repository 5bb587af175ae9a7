"""A plan that fails: who is told, what serves meanwhile, and that closing goes on."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field

import pytest
import torch

import tp_walk
from tp_walk import WalkRuntime, WalkTimeout
from tp_walk.plan import EXECUTORS, WalkInputs

LIMIT_S = 20.0


@dataclass
class Executor:
    """Walks nothing, fails when told to."""

    failure: str | None = None
    refuses_to_close: bool = False
    closed: list[bool] = field(default_factory=list)
    looks: int = 0

    def memory_bytes(self) -> int:
        return 0

    def walk(self, inputs: WalkInputs) -> None:
        self.check()

    def check(self) -> None:
        self.looks += 1
        if self.failure is not None:
            raise WalkTimeout(self.failure)

    def reset(self) -> None:
        self.failure = None

    def close(self) -> None:
        self.closed.append(True)
        if self.refuses_to_close:
            raise WalkTimeout("rank 1 still maps it")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Executor]:
    """The executors that the next runtimes hold, by plan."""
    made = {"tp_bf16": Executor(), "int8": Executor()}
    for name, executor in made.items():
        monkeypatch.setitem(EXECUTORS, name, lambda context, executor=executor: executor)
    return made


def make_runtime(**arguments) -> WalkRuntime:
    head = tp_walk.MarkovHead(torch.zeros(64, 4).bfloat16(), torch.zeros(64, 4).bfloat16())
    return WalkRuntime(head, device="cpu", **arguments)


def test_a_failure_reaches_on_poison_without_a_call(plans: dict[str, Executor]) -> None:
    told: queue.Queue[Exception] = queue.Queue()
    with make_runtime(on_poison=told.put) as runtime:
        for message in ("rank 1 is gone", "rank 1 is gone again"):
            plans["tp_bf16"].failure = message
            error = told.get(timeout=LIMIT_S)
            assert isinstance(error, WalkTimeout)
            assert str(error) == message
            with pytest.raises(WalkTimeout, match=message):
                runtime.check()
            runtime.reset()
            runtime.check()
            # The thread must have seen the reset, or the next failure would be the same one to it.
            looks, limit = plans["tp_bf16"].looks + 2, time.monotonic() + LIMIT_S
            while plans["tp_bf16"].looks < looks:
                assert time.monotonic() < limit
                time.sleep(0.005)


def test_the_standby_is_the_plan_that_waits_for_no_rank(plans: dict[str, Executor]) -> None:
    with make_runtime() as runtime:
        assert runtime.standby().name == "int8"
        plans["tp_bf16"].failure = "rank 1 is gone"
        assert runtime.standby().name == "int8"
        with pytest.raises(WalkTimeout, match="rank 1 is gone"):
            runtime.walk(torch.zeros(1, 2, 64).bfloat16(), torch.tensor([0]), plan="tp_bf16")
        assert (
            runtime.walk(torch.zeros(1, 2, 64).bfloat16(), torch.tensor([0]), plan=runtime.standby()).plan.name
            == "int8"
        )
    with make_runtime(plans=["tp_bf16"]) as runtime:
        assert runtime.standby().name == "reference"


def test_explain_names_the_failure_and_the_standby(plans: dict[str, Executor]) -> None:
    with make_runtime() as runtime:
        assert "failed" not in runtime.explain(1)
        plans["tp_bf16"].failure = "rank 1 is gone"
        (line,) = [line for line in runtime.explain(1).splitlines() if line.startswith("  tp_bf16:")]
        assert "held" in line
        assert "failed: rank 1 is gone; until reset(), walk with plan='int8'" in line


def test_closing_goes_on_after_an_error(plans: dict[str, Executor]) -> None:
    plans["int8"].refuses_to_close = True
    runtime = make_runtime()
    with pytest.raises(WalkTimeout, match="rank 1 still maps it"):
        runtime.close()
    assert [executor.closed for executor in plans.values()] == [[True], [True]]
    runtime.close()
    assert [executor.closed for executor in plans.values()] == [[True], [True]]


def test_a_failed_set_up_tells_its_own_error(plans: dict[str, Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    plans["tp_bf16"].refuses_to_close = True
    monkeypatch.setitem(EXECUTORS, "int8", lambda context: 1 / 0)
    with pytest.raises(tp_walk.SetupError, match="ZeroDivisionError"):
        make_runtime()
    assert plans["tp_bf16"].closed == [True]

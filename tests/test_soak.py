"""When a soak is a success."""

from __future__ import annotations

from math import inf
from unittest.mock import create_autospec

import pytest
import soak
from kernel_variants import BROKEN
from soak import Task, outcome

from tp_walk import Deadline, PlanUnavailableError
from tp_walk.group import WalkGroup


@pytest.mark.parametrize(
    ("build", "wanted", "noticed", "exchanges", "expected"),
    [
        ("production", 100, "", 100, "all right"),
        ("production", 100, "", 99, "TOO FEW"),
        ("production", 100, "tokens differ", 100, "FAILED"),
        ("delays", inf, "", 5, "all right"),
        (next(iter(BROKEN)), inf, "tokens differ", 5, "caught"),
        (next(iter(BROKEN)), inf, "", 5, "NOT CAUGHT"),
    ],
)
def test_only_what_is_as_it_should_be_is_a_success(
    build: str, wanted: float, noticed: str, exchanges: int, expected: str
) -> None:
    assert outcome(Task(build, wanted, 1.0, ("tp_bf16",), Deadline()), noticed, exchanges) == expected


def test_a_broken_build_that_set_up_refuses_is_caught_and_the_production_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(group: WalkGroup, task: Task) -> None:
        raise PlanUnavailableError("a 16-byte store arrived in pieces")

    monkeypatch.setattr(soak, "Soak", refuses)
    group = create_autospec(WalkGroup, instance=True)
    broken, whole = (Task(build, inf, 1.0, ("tp_bf16",), Deadline()) for build in (next(iter(BROKEN)), "production"))
    noticed, counted = soak.run_until_noticed(group, broken)
    assert "in pieces" in noticed
    assert outcome(broken, noticed, counted[0]) == "caught"
    with pytest.raises(PlanUnavailableError):
        soak.run_until_noticed(group, whole)

"""When a soak is a success."""

from __future__ import annotations

from math import inf

import pytest
from kernel_variants import BROKEN
from soak import Task, outcome

from tp_walk import Deadline


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

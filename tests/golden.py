"""The golden cases: where they are, which are a plan's, and what runtimes their check makes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, cast

import numpy as np

from tp_walk.config import Rounding


class Shape(NamedTuple):
    """Of a runtime, as far as its kernels depend on it."""

    vocab_size: int
    markov_rank: int
    max_batch: int
    rounding: Rounding


def folder() -> Path:
    """`TP_WALK_CASES`, or `shared/cases` beside the repository; there may be nothing."""
    repository = Path(__file__).resolve().parents[1]
    return Path(os.environ.get("TP_WALK_CASES", repository.parent / "shared" / "cases"))


def load_check(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", folder / "check.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    return check


def cases_for(folder: Path, plan: str) -> list[Path]:
    """bf16 and int8 cases have their own answers; the int8exact ones have the same in both."""
    chosen = []
    for path in sorted(folder.glob("*.npz")):
        exact, int8 = "int8exact" in path.name, "int8" in path.name
        if exact or int8 == (plan == "reference_int8"):
            chosen.append(path)
    return chosen


def shapes(folder: Path) -> set[Shape]:
    """What the check makes runtimes of, all cases together."""
    found = set()
    for path in folder.glob("*.npz"):
        with np.load(path) as case:
            rows, markov_rank = case["w2"].shape
            found.add(Shape(rows, markov_rank, max(case["base"].shape[0], 4), cast(Rounding, str(case["rounding"]))))
    return found

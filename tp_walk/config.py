"""Frozen configuration, and the one reader of the TP_WALK_* environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from tp_walk.errors import WalkInputError

Rounding = Literal["engine", "once", "none"]
LogitsMode = Literal["none", "local", "full"]
LogitsRows = Literal["all", "sampled"]

ROUNDINGS: tuple[Rounding, ...] = ("engine", "once", "none")
LOGITS_MODES: tuple[LogitsMode, ...] = ("none", "local", "full")
LOGITS_ROWS: tuple[LogitsRows, ...] = ("all", "sampled")

# A step number travels in the low byte of a mailbox tag, below the values kept for headers.
MAX_GAMMA = 64


@dataclass(frozen=True)
class WalkShape:
    """What fixes the size of every table and kernel of a runtime.

    vocab_size: rows of W2 (the draft vocabulary where there is one). markov_rank: columns of W1 and W2.
    world_size: ranks that W2 is split over.
    """

    vocab_size: int
    markov_rank: int
    world_size: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "markov_rank", "world_size"):
            value = getattr(self, name)
            if value < 1:
                raise WalkInputError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Deadline:
    """Seconds that a rank waits for its peers: `startup_s` in set-up and in the first walk, `steady_s` after that."""

    startup_s: float = 300.0
    steady_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("startup_s", "steady_s"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise WalkInputError(f"deadline {name} is {value}; it must be a positive, finite number of seconds")


@dataclass(frozen=True)
class Settings:
    """The TP_WALK_* variables as they were when read.

    plan: TP_WALK_PLAN, the plan forced on every walk (`reference` is the kill switch), or None.
    cache_dir: TP_WALK_CACHE_DIR, compiled kernels. data_dir: TP_WALK_DATA_DIR, fitted heads and measured tables.
    test_ranks_per_gpu: TP_WALK_TEST_RANKS_PER_GPU, how many ranks may share a GPU, each with its part of the SMs; 1 but
        in tests. Their kernels take turns on it, some milliseconds each, so that a walk is a thousand times slower.
    """

    plan: str | None
    cache_dir: Path
    data_dir: Path
    test_ranks_per_gpu: int


def settings() -> Settings:
    """Reads the environment; the directories needn't exist or be writable. Raises WalkInputError."""
    ranks_per_gpu = os.environ.get("TP_WALK_TEST_RANKS_PER_GPU") or "1"
    if not ranks_per_gpu.isdecimal() or int(ranks_per_gpu) < 1:
        raise WalkInputError(f"TP_WALK_TEST_RANKS_PER_GPU is {ranks_per_gpu!r}; it must be a positive integer")
    cache_dir = os.environ.get("TP_WALK_CACHE_DIR") or platformdirs.user_cache_dir("tp_walk", appauthor=False)
    data_dir = os.environ.get("TP_WALK_DATA_DIR") or platformdirs.user_data_dir("tp_walk", appauthor=False)
    return Settings(
        plan=os.environ.get("TP_WALK_PLAN") or None,
        cache_dir=Path(cache_dir).expanduser(),
        data_dir=Path(data_dir).expanduser(),
        test_ranks_per_gpu=int(ranks_per_gpu),
    )

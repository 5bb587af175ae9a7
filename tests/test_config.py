"""Configuration and the environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tp_walk.config import WalkShape, settings
from tp_walk.errors import WalkInputError


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TP_WALK_PLAN", "reference")
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TP_WALK_DATA_DIR", "~/data")
    read = settings()
    assert (read.plan, read.cache_dir, read.data_dir) == ("reference", tmp_path / "cache", Path.home() / "data")


def test_empty_and_missing_variables_mean_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_WALK_PLAN", "")
    monkeypatch.setenv("TP_WALK_CACHE_DIR", "")
    monkeypatch.delenv("TP_WALK_DATA_DIR", raising=False)
    read = settings()
    assert read.plan is None
    assert read.cache_dir.name == read.data_dir.name == "tp_walk"
    assert read.test_ranks_per_gpu == 1


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_number_of_ranks_is_positive(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TP_WALK_TEST_RANKS_PER_GPU", "2")
    assert settings().test_ranks_per_gpu == 2
    monkeypatch.setenv("TP_WALK_TEST_RANKS_PER_GPU", value)
    with pytest.raises(WalkInputError, match=f"TP_WALK_TEST_RANKS_PER_GPU is '{value}'"):
        settings()


@pytest.mark.parametrize("field", ["vocab_size", "markov_rank", "world_size"])
def test_a_shape_is_positive(field: str) -> None:
    sizes = {"vocab_size": 1, "markov_rank": 1, "world_size": 1}
    with pytest.raises(WalkInputError, match=f"{field} is 0; it must be at least 1"):
        WalkShape(**{**sizes, field: 0})

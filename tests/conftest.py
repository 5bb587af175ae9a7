"""What all tests share: one thread, and where the golden cases are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """The golden cases: `TP_WALK_CASES`, or `shared/cases` beside the repository; skips where there are none."""
    repository = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TP_WALK_CASES", repository.parent / "shared" / "cases"))
    if not folder.is_dir():
        pytest.skip(f"no golden cases at {folder} (TP_WALK_CASES names another folder)")
    return folder

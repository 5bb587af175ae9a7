"""Warps of a warpgroup that come late, on the emulator: nobody takes another's place at a barrier."""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest
from emulated import HAS_COMPILER
from emulated_ranks import emulate_gpus
from test_emulated_walk import Case, check, int8, tp

from tp_walk import jit

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

PLACE = "    if (is_second) named_barrier("
WAIT = "for (int i = 0; i < 4000; ++i) let_others_run();\n"
LATE = {
    "a warp": f"    if (cta.warp == 5 && pass.index == 2) {WAIT}",
    "a warpgroup": f"    if (is_second && pass.index == 2) {WAIT}",
    "any": f"    if ((cta.warp * 77 + pass.index * 991 + cta.index * 13) * 2654435761u >> 24 > 180) {WAIT}",
}
# Of three groups of requests u is two passes ahead; of one no pass begins before all warps have finished the last one.
CASES = {
    "tp_bf16": Case(tp(1, 1, logits="none", lse=False), 300, 40, sampled=False),
    "int8": Case(int8(1, 1, logits="none", lse=False), 300, 20, sampled=False),
    "one group": Case(tp(1, 1, logits="none", lse=False), 300, 16, sampled=False),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("name", CASES)
def test_a_late_warp_is_waited_for(name: str, late: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert PLACE in (jit.csrc_dir() / "multiply_warpgroup.cuh").read_text()
    translated = emulated.translated
    monkeypatch.setattr(emulated, "translated", lambda source: translated(source.replace(PLACE, LATE[late] + PLACE)))
    monkeypatch.setattr(emulated, "LIMIT_S", 40.0)
    emulate_gpus(monkeypatch)
    case = CASES[name]
    check(case.problem(0), case.how, tmp_path)

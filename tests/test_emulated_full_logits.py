"""The walks that experiments/full_logits.py times, on the emulator: every one runs, and all ways give the same bits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import full_logits
import pytest
import torch
from emulated import HAS_COMPILER
from emulated_ranks import Captured, Gpu, HostDevice, Ranks, emulate_runtimes

from tp_walk import MarkovHead, WalkRuntime, peer_logits
from tp_walk.precompile import HOPPER

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

VOCAB_SIZE, BATCH, GAMMA = 192, 2, 3


def test_all_ways_to_full_logits_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_runtimes(monkeypatch)
    monkeypatch.setattr(full_logits, "CapturedWork", Captured)
    monkeypatch.setattr(peer_logits, "FULL_LOGITS", peer_logits.FULL_LOGITS)  # put back, whichever rank is last
    torch.manual_seed(1)
    head = MarkovHead(*(torch.randn(VOCAB_SIZE, 256).mul_(0.06).bfloat16() for _ in range(2)))

    def walk(rank: int) -> list[str]:
        device = HostDevice("cpu")
        with WalkRuntime(head, BATCH, GAMMA, device=device, plans=["tp_bf16"]) as runtime:  # type: ignore[arg-type]
            walks = full_logits.Walks(runtime, VOCAB_SIZE, BATCH, GAMMA)
            walks.check()
        names, kept = list(walks.ready), weakref.ref(walks)
        del walks
        assert kept() is None, "graphs outlive their use until a garbage collection"
        return names

    gc.disable()
    try:
        ready = Ranks(2, Gpu(3, HOPPER.shared_limit), tmp_path / "emulated").each(walk)
    finally:
        gc.enable()
    timed = {column.key for column in full_logits.COLUMNS if column.key.endswith("_us")}
    assert ready == [ready[0]] * 2
    assert {f"{name}_us" for name in ready[0]} == timed

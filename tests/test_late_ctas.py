"""A block without a valid row ends with CTA 0, whoever else has begun by then: on the emulator."""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest
import torch
from emulated import HAS_COMPILER, run_kernel, translated

from tp_walk import executors, jit, kernels
from tp_walk.mailbox import MailboxLayout
from tp_walk.plan import WalkInputs
from tp_walk.precompile import HOPPER
from tp_walk.status import STATUS_BYTES

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

WORLD, GRID, VOCAB, RANK = 2, 2, 100, 256
DEADLINE_NS = 2 * 10**9

START = "const u64 block = load_control(mailbox, TPW_BLOCK_OFFSET);\n"
# All CTAs but the first begin when that is done, and so read the number of the block to come.
LATE = "while (blockIdx.x > 0 && load_control(mailbox, TPW_BLOCK_OFFSET) == 1) let_others_run();\n"


@pytest.mark.parametrize("logits", ["none", "full"])
def test_a_late_cta_of_an_empty_block_waits_for_nothing(
    logits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(START in file.read_text() for file in jit.csrc_dir().iterdir()) == 1
    monkeypatch.setattr(emulated, "translated", lambda source: translated(source.replace(START, LATE + START)))
    one = next(
        one
        for one in kernels.specialisations(
            int8=False,
            markov_rank=RANK,
            rows=VOCAB // WORLD,
            world_size=WORLD,
            max_batch=2,
            rounding="engine",
            num_sms=GRID,
            shared_limit=HOPPER.shared_limit,
        )
        if one.logits == logits and not one.sampled
    )
    assert one.placement.grid == GRID
    words = MailboxLayout(WORLD, 2, GRID).num_bytes // 8
    mailboxes = [torch.zeros(words + 32, dtype=torch.int64) for _ in range(WORLD)]
    statuses = [torch.zeros(STATUS_BYTES // 8, dtype=torch.int64) for _ in range(WORLD)]
    w1 = torch.zeros(VOCAB, RANK, dtype=torch.bfloat16)
    fragments = kernels.to_fragments(w1[: VOCAB // WORLD], one.placement)
    base, tokens = torch.zeros(2, 3, VOCAB, dtype=torch.bfloat16), torch.full((2, 3), -1)
    out = None if logits == "none" else torch.zeros_like(base)
    inputs = WalkInputs(
        base, True, torch.zeros(2, dtype=torch.int64), None, None, torch.tensor(0, dtype=torch.int32), "none", "all",
        tokens, out, None,
    )  # fmt: skip
    given = []
    for rank in range(WORLD):
        p = kernels.WalkParams()
        p.w2_fragments, p.u_rows = fragments.data_ptr(), w1.data_ptr()
        for peer, mailbox in enumerate(mailboxes):
            mailbox[:2] = 1  # the block to come, and the first
            p.mailboxes[peer] = mailbox.data_ptr()
        p.status = statuses[rank].data_ptr()
        p.startup_deadline_ns = p.steady_deadline_ns = DEADLINE_NS
        p.vocab_size = p.target_vocab_size = VOCAB
        p.shard_start, p.shard_width, p.rank, p.shares = rank * VOCAB // WORLD, VOCAB // WORLD, rank, 1
        executors.describe_walk(p, inputs, "tp_bf16", "engine")
        executors.point_at_base(p, base, True)
        given.append(p)
    run_kernel("walk", one.macros, given, GRID, one.placement.shared_bytes, tmp_path)
    assert [status[0].item() for status in statuses] == [0, 0]
    assert [mailbox[0].item() for mailbox in mailboxes] == [2, 2]
    assert bool((tokens == -1).all())

"""Blocks that end without results, on the emulator: none of their threads waits for what doesn't come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import emulated
import pytest
import torch
from emulated import HAS_COMPILER, run_kernel, translated

from tp_walk import executors, jit, kernels
from tp_walk.mailbox import MailboxLayout
from tp_walk.placement import MULTIPLY_WARPS, STREAM_SLOTS
from tp_walk.plan import WalkInputs
from tp_walk.precompile import HOPPER
from tp_walk.status import STATUS_BYTES

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

WORLD, GRID, RANK = 2, 2, 256

START = "const u64 block = load_control(mailbox, TPW_BLOCK_OFFSET);\n"
# All CTAs but the first begin when that is done, and so read the number of the block to come.
LATE = "while (blockIdx.x > 0 && load_control(mailbox, TPW_BLOCK_OFFSET) == 1) let_others_run();\n"


def specialisation(vocab_size: int, shared_limit: int, logits: str) -> kernels.Specialisation:
    return next(
        one
        for one in kernels.specialisations(
            int8=False,
            markov_rank=RANK,
            rows=vocab_size // WORLD,
            world_size=WORLD,
            max_batch=2,
            rounding="engine",
            num_sms=GRID,
            shared_limit=shared_limit,
        )
        if one.logits == logits and not one.sampled
    )


@dataclass
class Blocks:
    """One block of two requests, γ = 3, on the ranks that take part, and what it leaves."""

    tokens: torch.Tensor
    mailboxes: list[torch.Tensor]
    statuses: list[torch.Tensor]


def walk(
    one: kernels.Specialisation, vocab_size: int, ranks: int, num_valid: int, deadline_ns: int, folder: Path
) -> Blocks:
    words = MailboxLayout(WORLD, 2, GRID).num_bytes // 8
    mailboxes = [torch.zeros(words + 32, dtype=torch.int64) for _ in range(WORLD)]
    statuses = [torch.zeros(STATUS_BYTES // 8, dtype=torch.int64) for _ in range(ranks)]
    w1 = torch.zeros(vocab_size, RANK, dtype=torch.bfloat16)
    fragments = kernels.to_fragments(w1[: vocab_size // WORLD], one.placement)
    base, tokens = torch.zeros(2, 3, vocab_size, dtype=torch.bfloat16), torch.full((2, 3), -1)
    anchors, out = torch.tensor([5, 6]), None if one.logits == "none" else torch.zeros_like(base)
    inputs = WalkInputs(
        base, True, anchors, None, None, torch.tensor(num_valid, dtype=torch.int32), "none", "all", tokens, out, None
    )
    for mailbox in mailboxes:
        mailbox[:2] = 1  # the block to come, and the first
    given = []
    for rank in range(ranks):
        p = kernels.WalkParams()
        p.w2_fragments, p.u_rows = fragments.data_ptr(), w1.data_ptr()
        for peer, mailbox in enumerate(mailboxes):
            p.mailboxes[peer] = mailbox.data_ptr()
        p.status = statuses[rank].data_ptr()
        p.startup_deadline_ns = p.steady_deadline_ns = deadline_ns
        p.vocab_size = p.target_vocab_size = vocab_size
        p.shard_start, p.shard_width, p.rank, p.shares = rank * vocab_size // WORLD, vocab_size // WORLD, rank, 1
        executors.describe_walk(p, inputs, "tp_bf16", "engine")
        executors.point_at_base(p, base, True)
        given.append(p)
    run_kernel("walk", one.macros, given, GRID, one.placement.shared_bytes, folder)
    return Blocks(tokens, mailboxes, statuses)


@pytest.mark.parametrize("logits", ["none", "full"])
def test_a_late_cta_of_an_empty_block_waits_for_nothing(
    logits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with CTA 0, whoever else has begun by then."""
    assert sum(START in file.read_text() for file in jit.csrc_dir().iterdir()) == 1
    monkeypatch.setattr(emulated, "translated", lambda source: translated(source.replace(START, LATE + START)))
    one = specialisation(100, HOPPER.shared_limit, logits)
    assert one.placement.grid == GRID
    left = walk(one, 100, WORLD, 0, 2 * 10**9, tmp_path)
    assert [status[0].item() for status in left.statuses] == [0, 0]
    assert [mailbox[0].item() for mailbox in left.mailboxes] == [2, 2]
    assert bool((left.tokens == -1).all())


def test_copies_that_run_ahead_of_a_failed_block_are_taken(tmp_path: Path) -> None:
    """The other rank never comes. A copy that nobody waits for could land in the next kernel's memory: the emulator
    aborts at one.
    """
    one = specialisation(3_000, 100_000, "none")
    assert one.placement.stream_slots == STREAM_SLOTS
    assert one.placement.streamed_tiles > 2 * MULTIPLY_WARPS
    left = walk(one, 3_000, 1, 2, 10**8, tmp_path)
    assert left.statuses[0][0].item() != 0
    assert left.tokens.tolist() == [[5] * 3, [6] * 3]

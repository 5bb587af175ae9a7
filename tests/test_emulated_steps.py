"""Builds that lack a part still end, on the CPU: nobody waits for what is left out, and ranks agree on the tokens."""

from __future__ import annotations

from pathlib import Path

import kernel_variants
import pytest
import steps
import torch
from emulated import HAS_COMPILER, run_kernel
from kernel_variants import EXCHANGE, LEFT_OUT, STEPS

from tp_walk import executors, jit, kernels
from tp_walk.mailbox import MailboxLayout
from tp_walk.noise import Noise
from tp_walk.plan import WalkInputs
from tp_walk.precompile import HOPPER
from tp_walk.shard import shard_bounds
from tp_walk.status import STATUS_BYTES

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

WORLD, GRID, GAMMA = 2, 3, 3
VOCAB_SIZE = WORLD * GRID * 20 * 16  # of 20 tiles a CTA has 4 in shared memory
DEADLINE_NS = 60 * 10**9


@pytest.mark.parametrize(
    ("name", "batch", "sampled"), [*((name, 1, True) for name in LEFT_OUT), (EXCHANGE, 6, True), (STEPS, 6, False)]
)
def test_a_build_without_a_part_ends(
    name: str, batch: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = (
        one
        for one in steps.timed_specialisations(
            int8=False,
            markov_rank=256,
            rows=VOCAB_SIZE // WORLD,
            world_size=WORLD,
            max_batch=batch,
            rounding="engine",
            num_sms=GRID,
            shared_limit=HOPPER.shared_limit,
        )
        if one.sampled == sampled
    )
    assert one.placement.smem_tiles > 0
    torch.manual_seed(1)
    w1, w2 = (torch.randn(VOCAB_SIZE, 256).mul_(0.3).bfloat16() for _ in range(2))
    base, anchors = torch.randn(batch, GAMMA, VOCAB_SIZE).mul_(3.0).bfloat16(), torch.randint(VOCAB_SIZE, (batch,))
    temperatures = torch.ones(batch) if sampled else None
    noise = Noise(11, 0) if sampled else None
    shards = shard_bounds(VOCAB_SIZE, WORLD)
    fragments = [kernels.to_fragments(w2[shard.start : shard.stop].contiguous(), one.placement) for shard in shards]
    words = MailboxLayout(WORLD, batch, GRID).num_bytes // 8
    mailboxes, statuses = torch.zeros(WORLD, words + 32, dtype=torch.int64), torch.zeros(WORLD, STATUS_BYTES)
    mailboxes[:, :2] = 1  # the block to come, and the first

    drafts: list[torch.Tensor] = []
    given: list[kernels.WalkParams] = []
    for rank, shard in enumerate(shards):
        drafts.append(torch.full((batch, GAMMA), -1))
        inputs = WalkInputs(base, True, anchors, temperatures, noise, None, "none", "all", drafts[-1], None, None)
        p = kernels.WalkParams()
        p.u_rows, p.w2_fragments = w1.data_ptr(), fragments[rank].data_ptr()
        for peer in range(WORLD):
            p.mailboxes[peer] = mailboxes[peer].data_ptr()
        p.status = statuses[rank].data_ptr()
        p.startup_deadline_ns = p.steady_deadline_ns = DEADLINE_NS
        p.vocab_size = p.target_vocab_size = VOCAB_SIZE
        p.shard_start, p.shard_width, p.rank, p.shares = shard.start, shard.width, rank, 1
        executors.describe_walk(p, inputs, "tp_bf16", "engine")
        executors.point_at_base(p, base, True)
        given.append(p)

    monkeypatch.setattr(jit, "csrc_dir", jit.csrc_dir)  # put back afterwards
    kernel_variants.use(name)
    for block in range(2):
        run_kernel("walk", one.macros, given, one.placement.grid, one.placement.shared_bytes, tmp_path / "emulated")
        assert not statuses.any()
        assert mailboxes[:, 0].tolist() == [block + 2] * WORLD
        assert torch.equal(*drafts)
    kernel_variants.use("production")
    if name == STEPS:
        assert bool((drafts[0] == -1).all())
    else:
        assert bool(((drafts[0] >= 0) & (drafts[0] < VOCAB_SIZE)).all())
        assert len(drafts[0].unique()) > 1

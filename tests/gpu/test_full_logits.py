"""Full logits in every rank's memory: right when the kernel ends, and untouched while somebody still reads them.

SMALL's rows, and sharded base logits with an odd tail, don't lie on 16-byte pieces and are copied by elements; the
others of QWEN3 by bulk copies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from test_graphs import captured, node_types
from walk_lab import PLANS, QWEN3, SMALL, WORLDS, assert_same, lab, two_gpus

from tp_walk import Noise, WalkOutput, peer_logits
from tp_walk.reference import MIN_TEMPERATURE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARIES = pytest.mark.parametrize("vocab_size", [SMALL, QWEN3])


def _reports_everywhere(vocab_size: int) -> None:
    """Into the runtime's memory, the caller's, and memory that the walk makes; by all kernels and gathered."""
    here_is = lab("exact", vocab_size, 2)
    runtime, gamma = here_is.runtime, 7
    for batch, sampled in itertools.product((1, 9), (False, True)):
        right = here_is.alone.walk(batch, gamma, "reference", sampled=sampled, logits="full")
        assert right.logits is not None
        peers = runtime.logits_buffer(batch + 1, gamma)[:batch]
        memories = peers, torch.empty_like(peers), None
        for how, layout, memory in itertools.product(("peers", "collective"), ("full", "sharded"), memories):
            if memory is not None:
                memory.fill_(7.0)
            out = WalkOutput(torch.empty_like(right.tokens), memory)
            with mock.patch.object(peer_logits, "FULL_LOGITS", ((float("inf"), how),)):
                got = here_is.walk(batch, gamma, "tp_bf16", sampled=sampled, layout=layout, logits="full", out=out)
            assert_same(got.tokens, right.tokens, (batch, sampled, how, layout))
            assert_same(got.logits, right.logits, (batch, sampled, how, layout))
    runtime.check()


@two_gpus
@VOCABULARIES
def test_full_logits_are_the_definitions_on_every_rank(ranks: RankPool, vocab_size: int) -> None:
    ranks(_reports_everywhere, vocab_size)


def _nodes(vocab_size: int) -> list[Counter[str]]:
    here_is = lab("exact", vocab_size, 2)
    runtime, given, gamma = here_is.runtime, here_is.inputs, 7
    found = []
    for batch, sampled, lse in itertools.product((1, 8, 64), (False, True), (False, True)):
        out = WalkOutput(
            torch.zeros(batch, gamma, dtype=torch.int64, device=here_is.device),
            runtime.logits_buffer(batch, gamma),
            torch.zeros(batch, gamma, device=here_is.device) if lse else None,
        )
        base = here_is.columns(given.base[:batch, :gamma]).contiguous()
        temperatures, noise = (given.temperatures[:batch], Noise(5, 0)) if sampled else (None, None)
        arguments = base, given.anchors[:batch], temperatures, noise, "tp_bf16", "full"
        graph = captured(lambda a=arguments, o=out, e=lse: runtime.walk(*a, out=o, lse=e), keep_graph=True)
        found.append(node_types(graph))
    runtime.check()
    return found


@two_gpus
@VOCABULARIES
def test_a_captured_walk_with_full_logits_is_one_kernel(ranks: RankPool, vocab_size: int) -> None:
    for found in ranks(_nodes, vocab_size):
        assert found == [{"Kernel": 1}] * 12


def _reuses(vocab_size: int, batch: int, blocks: int) -> list[int]:
    """Wrong logits of each block. All are enqueued at once. On one rank in turn the consumer is late, so that its peer
    is at the next block long before; on the other it follows at once: columns must be there when the kernel ends.
    """
    here_is = lab("exact", vocab_size, 2)
    runtime, given, gamma = here_is.runtime, here_is.inputs, 4
    bases = [given.base[first : first + batch, :gamma].contiguous() for first in (0, 20, 40)]
    rights = [
        here_is.alone.runtime.walk(base, given.anchors[:batch], plan="tp_bf16", logits="full").logits for base in bases
    ]
    assert not torch.equal(rights[0], rights[1]), "what is left of the block before must be wrong"
    own = [here_is.columns(base).contiguous() for base in bases]
    out = WalkOutput(
        torch.empty(batch, gamma, dtype=torch.int64, device=here_is.device), runtime.logits_buffer(batch, gamma)
    )
    assert out.logits is not None
    wrong = torch.zeros(blocks, dtype=torch.int64, device=here_is.device)
    torch.cuda.synchronize()
    dist.barrier()
    for block in range(blocks):
        which = block % len(bases)
        runtime.walk(own[which], given.anchors[:batch], plan="tp_bf16", logits="full", out=out)
        if block % 2 == here_is.rank:
            torch.cuda._sleep(400_000)  # clocks: some 200 µs, several walks long
        wrong[block] = (out.logits != rights[which]).sum()
    torch.cuda.synchronize()
    runtime.check()
    return wrong.tolist()


@two_gpus
@pytest.mark.parametrize("batch", [1, 8])
@VOCABULARIES
def test_late_and_early_consumers_see_their_own_block(ranks: RankPool, vocab_size: int, batch: int) -> None:
    for wrong in ranks(_reuses, vocab_size, batch, 150):
        assert wrong == [0] * 150


def _greedy_walk_of_sampled_rows() -> bool:
    here_is = lab("exact", SMALL, 2)
    out = WalkOutput(
        torch.empty(3, 4, dtype=torch.int64, device=here_is.device), here_is.runtime.logits_buffer(3, 4).fill_(5.0)
    )
    here_is.walk(3, 4, "tp_bf16", logits="full", logits_rows="sampled", out=out)
    assert out.logits is not None
    return bool((out.logits == 5.0).all())


@two_gpus
def test_without_temperatures_no_row_is_sampled(ranks: RankPool) -> None:
    assert ranks(_greedy_walk_of_sampled_rows) == [True, True]


def _mixed_up_buffers() -> list[str]:
    """Each rank with another buffer: what one wrote would land in memory that the other doesn't look at."""
    here_is = lab("gauss", SMALL, 2)
    runtime = here_is.runtime
    buffers = [runtime.logits_buffer(2, 3) for _ in range(2)]
    out = WalkOutput(torch.empty(2, 3, dtype=torch.int64, device=here_is.device), buffers[here_is.rank])
    said = []
    try:
        here_is.walk(2, 3, "tp_bf16", logits="full", out=out)
        torch.cuda.synchronize()
        runtime.check()
    except Exception as error:
        said.append(str(error))
    dist.barrier()
    runtime.reset()
    here_is.walk(2, 3, "tp_bf16", logits="full", out=WalkOutput(out.tokens, buffers[0]))
    torch.cuda.synchronize()
    runtime.check()
    return said


@two_gpus
def test_ranks_with_different_buffers_find_out(ranks: RankPool) -> None:
    for said in ranks(_mixed_up_buffers):
        assert "logits_buffer" in said[0]


# ---- log-sum-exp -----------------------------------------------------------------------------------------------------


def _sums(vocab_size: int, world: int) -> list[list[float]]:
    here_is = lab("gauss", vocab_size, world)
    found = []
    for plan, batch, sampled in itertools.product(PLANS, (1, 9, 33), (False, True)):
        alone = here_is.walk(batch, 7, plan, sampled=sampled, lse=True)
        out = here_is.walk(batch, 7, plan, sampled=sampled, logits="full", lse=True)
        assert out.logits is not None
        assert out.lse is not None
        temperatures = here_is.inputs.temperatures[:batch] if sampled else torch.zeros(batch, device=here_is.device)
        divisor = torch.where(temperatures > 0, temperatures.clamp(min=MIN_TEMPERATURE), 1.0).double()
        right = (out.logits.double() / divisor[:, None, None]).logsumexp(-1)
        # A float32 of that size can be off by half of its last bit besides.
        torch.testing.assert_close(out.lse.double(), right, rtol=2.0**-24, atol=1e-5)
        assert_same(alone.lse, out.lse, (plan, batch, sampled, "with and without logits"))
        found.append(out.lse.flatten().tolist())
    here_is.runtime.check()
    return found


@VOCABULARIES
@pytest.mark.parametrize("world", WORLDS)
def test_log_sum_exps_are_those_of_the_reported_logits(ranks: RankPool, world: int, vocab_size: int) -> None:
    first, *others = ranks(_sums, vocab_size, world)
    assert all(other == first for other in others), "the same bits on every rank"


def _extremes(world: int) -> None:
    """Rows of nothing but -inf, with a +inf, with a NaN, and with all of their weight in one place."""
    here_is = lab("exact", SMALL, world)
    base = here_is.inputs.base[:4, :2].clone()
    base[0] = -torch.inf
    base[1, :, 7] = torch.inf
    base[2, :, SMALL - 1] = torch.nan
    base[3, :, 900] = 3e38
    out = here_is.runtime.walk(base, here_is.inputs.anchors[:4], plan="tp_bf16", logits="full", lse=True)
    assert out.logits is not None
    assert out.lse is not None
    torch.testing.assert_close(out.lse, out.logits.double().logsumexp(-1).float(), rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("world", WORLDS)
def test_log_sum_exps_of_extremes(ranks: RankPool, world: int) -> None:
    ranks(_extremes, world)

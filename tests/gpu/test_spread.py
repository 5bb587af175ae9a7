"""Base logits sent to those who walk their rows: shards and strides of every kind, and ranks that fail each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from walk_lab import DEADLINE, SMALL, assert_same, generator_of, head, here, lab, two_gpus

from tp_walk import Deadline, MarkovHead, Noise, WalkMismatch, WalkOutput, WalkRuntime, WalkTimeout
from tp_walk.errors import WalkError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPREADING = ("int8", "int8_split")


def _awkward_shapes(rounding: str, dtype: torch.dtype) -> None:
    """Uneven shards whose starts are multiples of 4 alone, sources on any element, batches of any size."""
    rank, _, device = here()
    vocab_size = 2381
    generator = generator_of(17)
    w1, w2 = (torch.randn(vocab_size, 256, device=device, generator=generator).bfloat16() for _ in range(2))
    base = torch.randn(9, 5, vocab_size, device=device, generator=generator).mul_(3.0).to(dtype)
    anchors = torch.randint(vocab_size, (9,), device=device, generator=generator)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 30.0, -1.0, 1e-7, 1.0, 0.0, 1.3], device=device)
    valid = torch.zeros((), dtype=torch.int32, device=device)
    with WalkRuntime(MarkovHead(w1, w2), 9, 5, rounding, device=device, plans=["reference_int8"]) as alone:
        right = {
            sampled: alone.walk(
                base, anchors, temperatures if sampled else None, Noise(3, 1) if sampled else None, "reference_int8"
            ).tokens
            for sampled in (False, True)
        }
    for split in (1188, 1192, 4):
        start, stop = [(0, split), (split, vocab_size)][rank]
        with WalkRuntime(
            MarkovHead(w1, w2),
            9,
            5,
            rounding,
            group=dist.group.WORLD,
            device=device,
            shard=(start, stop),
            plans=SPREADING,
            deadline=DEADLINE,
        ) as runtime:
            for shift in (0, 1, 2, 3, 5):
                # Rows of an odd length in a buffer that starts on any element.
                wide = torch.full((9, 5, stop - start + 13 + shift), float("nan"), dtype=dtype, device=device)
                own = wide[..., shift : shift + stop - start]
                own.copy_(base[..., start:stop])
                for plan in SPREADING:
                    for batch in range(1, 10):
                        sampled = (batch + shift) % 2 == 0
                        given = temperatures[:batch] if sampled else None
                        noise = Noise(3, 1) if sampled else None
                        live = batch if shift < 2 else min(batch, shift)
                        tokens = runtime.walk(
                            own[:batch], anchors[:batch], given, noise, plan, num_valid=valid.fill_(live)
                        ).tokens
                        what = (split, shift, plan, batch, live)
                        assert_same(tokens[:live], right[sampled][:live], what)
                        assert (tokens[live:] == 0).all(), what
            runtime.check()


@two_gpus
@pytest.mark.parametrize(
    ("rounding", "dtype"),
    [("engine", torch.bfloat16), ("none", torch.bfloat16), ("none", torch.float32)],
    ids=["bf16", "bf16 and fp32 logits", "fp32"],
)
def test_shards_strides_and_batches_of_every_kind(ranks: RankPool, rounding: str, dtype: torch.dtype) -> None:
    ranks(_awkward_shapes, rounding, dtype)


def _whole_and_sharded_in_turns() -> None:
    """int8 walks whole rows alone: ranks may be blocks apart when the next exchange begins."""
    here_is = lab("exact", SMALL, 2)
    right = {sampled: here_is.right("int8", sampled) for sampled in (False, True)}
    walked = []
    for number in range(200):
        plan = SPREADING[number % 3 == 2]
        layout = ["full", "sharded"][number % 2 if plan == "int8_split" else number % 5 == 0]
        batch, gamma, sampled = 1 + number % 9, 1 + number % 7, number % 4 == 0
        tokens = here_is.walk(batch, gamma, plan, sampled=sampled, layout=layout).tokens
        walked.append((number, plan, layout, sampled, tokens))
    torch.cuda.synchronize()
    here_is.runtime.check()
    for number, plan, layout, sampled, tokens in walked:
        batch, gamma = tokens.shape
        assert_same(tokens, right[sampled][:batch, :gamma], (number, plan, layout))


@two_gpus
def test_whole_and_sharded_rows_in_turns(ranks: RankPool) -> None:
    ranks(_whole_and_sharded_in_turns)


# ---- failures --------------------------------------------------------------------------------------------------------


def _failed(runtime: WalkRuntime, *arguments: object) -> tuple[type[WalkError] | None, str, list[list[int]]]:
    """A walk that must fail: the error's class and message, and the tokens."""
    tokens = torch.empty(5, 4, dtype=torch.int64, device=runtime.device)
    try:
        runtime.walk(*arguments, out=WalkOutput(tokens))  # type: ignore[arg-type]
        torch.cuda.synchronize()
        runtime.check()
    except WalkError as error:
        torch.cuda.synchronize()
        return type(error), str(error), tokens.tolist()
    return None, "", tokens.tolist()


def _disagree(plan: str, what: str) -> tuple[type[WalkError] | None, str]:
    rank, _, device = here()
    alone = lab("exact", SMALL, 1)
    given = alone.inputs
    base, anchors = given.base[:5, :4], given.anchors[:5].clone()
    right = alone.right(plan, False)[:5, :4]
    with WalkRuntime(
        head("exact", SMALL),
        8,
        8,
        group=dist.group.WORLD,
        device=device,
        plans=[plan],
        deadline=Deadline(startup_s=40.0, steady_s=2.0),
    ) as runtime:
        start, stop = runtime.shard.start, runtime.shard.stop
        own = base[..., start:stop].contiguous()
        assert_same(runtime.walk(own, anchors, plan=plan).tokens, right, "before")
        if what == "anchors":
            anchors[3] += rank
            kind, message, tokens = _failed(runtime, own, anchors, None, None, plan)
        elif what == "temperatures":
            temperatures = torch.full((5,), 1.0 + rank, device=device)
            kind, message, tokens = _failed(runtime, own, anchors, temperatures, Noise(1, 0), plan)
        elif what == "base_logits":
            kind, message, tokens = _failed(runtime, [own, base][rank], anchors, None, None, plan)
        else:  # a rank that comes too late
            if rank == 1:
                dist.barrier()
            kind, message, tokens = _failed(runtime, own, anchors, None, None, plan)
            if rank == 0:
                dist.barrier()
        assert tokens == [[int(anchor)] * 4 for anchor in anchors], (what, tokens)
        runtime.reset()
        assert_same(runtime.walk(own, given.anchors[:5], plan=plan).tokens, right, "after the reset")
        runtime.check()
    return kind, message


@two_gpus
@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("int8", "anchors"),
        ("int8", "temperatures"),
        ("int8_split", "anchors"),
        ("int8_split", "temperatures"),
        ("int8_split", "base_logits"),
    ],
)
def test_ranks_that_were_given_different_things_both_say_which(ranks: RankPool, plan: str, what: str) -> None:
    for kind, message in ranks(_disagree, plan, what):
        assert kind is WalkMismatch
        assert f"different {what}" in message


@two_gpus
@pytest.mark.parametrize("plan", SPREADING)
def test_a_rank_that_comes_too_late_ends_the_walk_on_both(ranks: RankPool, plan: str) -> None:
    for kind, message in ranks(_disagree, plan, "late"):
        assert kind is WalkTimeout
        assert "the header of rank 1" in message

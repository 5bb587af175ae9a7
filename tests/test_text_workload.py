"""Blocks of text over other vocabularies, other ones at each iteration, and plan certified timed on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tp_walk import crossover
from tp_walk.blind_base import BlindBase, BlindBaseFit
from tp_walk.crossover import Request, measure
from tp_walk.errors import WalkError, WalkInputError
from tp_walk.head import MarkovHead
from tp_walk.plan import WalkOutput
from tp_walk.shard import Shard
from tp_walk.text_workload import TextBlocks, TextWorkload
from tp_walk.workload import Ranks, Walk

CPU = torch.device("cpu")
VOCAB_SIZE, GAMMA, BLOCKS = 61, 3, 10


@pytest.fixture(scope="module")
def blocks() -> TextBlocks:
    """Every third id has rows of zeros and no evidence."""
    rng = np.random.default_rng(3)
    known = torch.arange(VOCAB_SIZE) % 3 > 0
    generator = torch.Generator().manual_seed(3)
    w1, w2 = (torch.randn(VOCAB_SIZE, 8, generator=generator) * known[:, None] for _ in range(2))
    counts = rng.integers(0, 5, GAMMA * VOCAB_SIZE)
    ids = np.concatenate([np.sort(rng.choice(known.nonzero().flatten().numpy(), n, replace=False)) for n in counts])
    background = torch.where(known, torch.randn(VOCAB_SIZE, generator=generator), torch.tensor(-9.0))
    fit = BlindBaseFit(
        background=background,
        starts=torch.from_numpy(np.concatenate([[0], counts.cumsum()])).int(),
        ids=torch.from_numpy(ids).int(),
        evidence=torch.rand(len(ids), generator=generator).half() * 5,
        held_out=[torch.tensor([1, 2, 4, 5, 7, 8]), torch.tensor([10, 11])],
        description="a made-up text",
    )
    anchors = torch.from_numpy(rng.choice(known.nonzero().flatten().numpy(), BLOCKS))
    return TextBlocks(MarkovHead(w1.bfloat16(), w2.bfloat16()), fit, anchors)


def all_base(blocks: TextBlocks) -> torch.Tensor:
    vocab_size = blocks.head.vocab_size
    return BlindBase(blocks.fit, Shard(0, vocab_size), CPU).logits(blocks.anchors, GAMMA)


def test_another_vocabulary_has_the_same_text(blocks: TextBlocks) -> None:
    assert blocks.over(VOCAB_SIZE) is blocks
    other = blocks.over(200)
    assert other.head.vocab_size == 200
    bias, moved_bias = (
        one.head.w1[one.anchors].float() @ one.head.w2_rows(0, one.head.vocab_size).float().T for one in (blocks, other)
    )
    # The same values in the order of the ids; ids that the head doesn't know have no bias and the least base logit.
    least = all_base(blocks).min()
    for old, new, nothing in ((all_base(blocks), all_base(other), least), (bias, moved_bias, 0.0)):
        for before, after in zip(old.flatten(0, -2), new.flatten(0, -2), strict=True):
            assert torch.equal(before[before != nothing], after[after != nothing])
    assert torch.equal(other.anchors.argsort(stable=True), blocks.anchors.argsort(stable=True))
    with pytest.raises(WalkInputError, match=r"20 ids are too few: the head knows \d+"):
        blocks.over(20)


def test_blocks_of_a_directory_begin_in_its_held_out_text(blocks: TextBlocks, tmp_path: Path) -> None:
    blocks.head.save_checkpoint(tmp_path)
    blocks.fit.write(tmp_path)
    found = TextBlocks.read(tmp_path, 40)
    assert len(found.anchors) == 40
    assert set(found.anchors.tolist()) == set(torch.cat(blocks.fit.held_out).tolist())
    assert torch.equal(found.head.w1, blocks.head.w1)
    assert found.fit.description == "a made-up text"


@pytest.mark.parametrize("sampled", [False, True])
def test_each_iteration_walks_other_blocks(blocks: TextBlocks, sampled: bool) -> None:
    base = all_base(blocks)
    with TextWorkload(blocks, ["reference"], max_batch=4, max_gamma=GAMMA, ranks=Ranks(CPU)) as workload:
        workload.prepare(Walk(4, 2, sampled, layout="full"))
        walk = workload.captured("reference")
        seen = []
        for iteration in range(-2, 3):
            workload.bring(iteration)
            walk()
            for anchor, row in zip(workload.anchors, workload.base, strict=True):
                at = [i for i in range(BLOCKS) if blocks.anchors[i] == anchor and torch.equal(base[i, :2], row)]
                seen.append(at[0])
        # 10 blocks are two batches of 4, which take turns.
        assert seen[:4] == seen[8:12]
        assert seen[:4] != seen[4:8]
        assert len(set(seen)) == 8
        workload.check("reference", "reference", 9)


@pytest.mark.parametrize("what", ["tokens", "logits"])
def test_plans_that_differ_are_noticed(what: str, blocks: TextBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    with TextWorkload(blocks, ["reference"], max_batch=2, max_gamma=GAMMA, ranks=Ranks(CPU)) as workload:
        workload.prepare(Walk(2, GAMMA, layout="full"))
        same = WalkOutput(torch.zeros(2), torch.zeros(2))
        drafts = iter([same, same, same, same._replace(**{what: torch.ones(2)})])
        monkeypatch.setattr(workload, "_draft", lambda *_: next(drafts))
        with pytest.raises(WalkError, match=rf"certified and tp_bf16 (draft|find) different {what} in batch 1"):
            workload.check("certified", "tp_bf16", 3)


def measured(blocks: TextBlocks | None, monkeypatch: pytest.MonkeyPatch) -> crossover.PlanTable:
    """With the definition in place of certified and its fallback."""
    monkeypatch.setattr(crossover, "CERTIFIED", "reference")
    monkeypatch.setattr(crossover, "ITS_FALLBACK", "reference")
    return measure(Request(VOCAB_SIZE, 8, (2,), (1, 3), ("greedy",), ("full",), 5, ()), blocks=blocks)


def test_certified_is_timed_on_text_and_its_time_is_a_mean(blocks: TextBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = []
    bring = TextWorkload.bring
    monkeypatch.setattr(TextWorkload, "bring", lambda self, i: (brought.append(i), bring(self, i))[1])
    samples = np.array([[1.0, 2.0, 9.0], [2.0, 1.0, 1.0]])
    assert crossover._sample(samples, is_mean=True).us == round(13 / 3, 2)
    assert crossover._sample(samples, is_mean=False).us == 2.0
    table = measured(blocks, monkeypatch)
    assert table.provenance["text"] == "a made-up text"
    assert all(row.plans.keys() == {"reference", "reference_int8"} and not row.refused for row in table.rows)
    assert brought[-5:] == [0, 1, 2, 3, 4]
    brought.clear()
    assert measured(None, monkeypatch).provenance["text"] is None
    assert not brought


def test_text_that_certified_gets_wrong_refuses_it(blocks: TextBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TextWorkload, plan: str, other: str, batches: int) -> None:
        raise WalkError("wrong tokens")

    monkeypatch.setattr(TextWorkload, "check", wrong)
    for row in measured(blocks, monkeypatch).rows:
        assert row.plans.keys() == {"reference_int8"}
        assert "wrong tokens" in row.refused["reference"]

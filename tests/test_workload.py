"""The rivals compute the definition's walk, and what computes another is never handed out to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from tp_walk import rivals
from tp_walk.plan import PLAN_NAMES
from tp_walk.workload import REPLICATED, SHARDED, SHARDED_LOGITS, SINGLE, Prepared, Ranks, Walk, Workload

# No multiple of 64 × world: the last shard is narrower than the others, and rivals must pad.
VOCAB_SIZE = 1000
GREEDY, SAMPLED = Walk(batch=3, gamma=4), Walk(batch=3, gamma=4, sampled=True)


def workload() -> Workload:
    return Workload(VOCAB_SIZE, 16, max_batch=4, max_gamma=4, ranks=Ranks.of_this_run())


def _prepare(walks: list[Walk]) -> list[list[str]]:
    with workload() as bed:
        prepared = [bed.prepare(walk) for walk in walks]
        for one in prepared:
            for run in one.ready.values():
                run()  # ready means ready: again, and without help
        assert bed.not_held.keys() == set(PLAN_NAMES) - {"reference", "reference_int8"}
        assert not any(one.refused for one in prepared)
    return [list(one.ready) for one in prepared]


@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rivals_over_ranks_agree_with_the_definition(
    world_size: int, layout: str, rank_pool: Callable[[int], RankPool]
) -> None:
    walks = [
        replace(walk, logits=logits, layout=layout)
        for walk in (GREEDY, SAMPLED)
        for logits in ("none", "local", "full")
    ]
    for results in rank_pool(world_size)(_prepare, walks):
        for walk, ready in zip(walks, results, strict=True):
            wanted = {"reference", "reference_int8", REPLICATED}
            wanted |= {SHARDED} if walk.logits != "full" else set()
            wanted |= {SHARDED_LOGITS} if walk.sampled or walk.logits == "full" else set()
            assert set(ready) == wanted


def test_one_gpus_rival_agrees_with_the_definition() -> None:
    for ready in _prepare([GREEDY, SAMPLED, replace(SAMPLED, logits="full")]):
        assert ready == ["reference", "reference_int8", SINGLE]


def test_a_rival_keeps_the_steps_logits() -> None:
    torch.manual_seed(3)
    w1, w2 = (torch.randint(-4, 5, (VOCAB_SIZE, 16)).bfloat16() for _ in range(2))
    base, anchors = torch.randn(2, 3, VOCAB_SIZE).bfloat16(), torch.tensor([5, 9])
    walk = rivals.SingleWalk(w1, w2, base, anchors, keep_logits=True)
    walk()
    previous = torch.cat([anchors[None], walk.tokens[:-1]])
    bias = w1[previous].float() @ w2.float().T
    assert torch.equal(walk.logits, (base.transpose(0, 1).float() + bias).bfloat16())


def test_torchs_noise_draws_from_the_softmax() -> None:
    torch.manual_seed(4)
    logits = torch.tensor([0.0, 1.0, 2.0]).bfloat16().expand(40_000, 3)
    draws = rivals.TorchSampler(torch.full((40_000,), 0.5))(logits, 0, 0).argmax(dim=1)
    shares = torch.bincount(draws, minlength=3) / len(draws)
    # Four standard deviations of a share are below 0.01.
    torch.testing.assert_close(shares, torch.softmax(logits[0].float() / 0.5, 0), atol=0.01, rtol=0)


def _prepare_with_a_wrong_rival() -> Prepared:
    class Wrong(rivals.ReplicatedWalk):
        def __call__(self) -> None:
            super().__call__()
            self.tokens[-1, -1] = (self.tokens[-1, -1] + 1) % VOCAB_SIZE

    with workload() as bed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tp_walk.workload.ReplicatedWalk", Wrong)
        prepared = bed.prepare(GREEDY)
    return Prepared(dict.fromkeys(prepared.ready, str), prepared.refused)


def test_what_walks_wrong_is_refused_and_says_where(rank_pool: Callable[[int], RankPool]) -> None:
    for prepared in rank_pool(2)(_prepare_with_a_wrong_rival):
        assert REPLICATED not in prepared.ready
        assert SHARDED in prepared.ready
        assert "1 of 12 tokens differ from the definition's, first in row 2, step 3" in prepared.refused[REPLICATED]


def _prepare_with_ranks_that_draw_apart() -> str:
    class Apart(rivals.TorchSampler):
        def __call__(self, logits: torch.Tensor, step: int, start: int) -> torch.Tensor:
            torch.manual_seed(dist.get_rank())
            return super().__call__(logits, step, start)

    with workload() as bed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tp_walk.workload.TorchSampler", Apart)
        return bed.prepare(SAMPLED).refused[SHARDED_LOGITS]


def test_ranks_that_end_with_different_tokens_are_refused(rank_pool: Callable[[int], RankPool]) -> None:
    for reason in rank_pool(2)(_prepare_with_ranks_that_draw_apart):
        assert "ranks hold different values" in reason

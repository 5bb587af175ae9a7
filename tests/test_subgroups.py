"""Smaller walk groups side by side in a larger world: each walks its share of the batch, and nobody else takes part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from agreement import head_of
from oracle import Problem, make_problem, solve
from rank_pool import RankPool, outcome

import tp_walk
from tp_walk.errors import WalkInputError

BATCH, GAMMA, VOCAB = 4, 5, 200
GROUPINGS = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((1, 2, 4),), ((4,), (0, 1, 2, 3))]


def problem() -> Problem:
    return make_problem(9, vocab=VOCAB, rank=16, batch=BATCH, gamma=GAMMA, sampled=True, specials=True)


def walk_in_groups(
    grouping: Sequence[Sequence[int]], plan: str, own_shards: bool
) -> tuple[int, list[list[int]], tuple[int, int]] | None:
    """First request and tokens of this rank's share, and its shard; None from a rank that is in no group."""
    groups = [dist.new_group(list(ranks)) for ranks in grouping]  # by every rank of the world, in the same order
    rank = dist.get_rank()
    mine = next((number for number, ranks in enumerate(grouping) if rank in ranks), None)
    if mine is None:
        return None
    whole, group, size = problem(), groups[mine], BATCH // len(grouping)
    share = slice(mine * size, (mine + 1) * size)
    shard = None
    if own_shards:  # uneven; by rank of the walk group, not of the world
        bounds = [0, *range(4, 4 * dist.get_world_size(group), 4), VOCAB]
        shard = bounds[dist.get_rank(group)], bounds[dist.get_rank(group) + 1]
    with tp_walk.WalkRuntime(
        head_of(whole), size, GAMMA, group=group, device="cpu", shard=shard, plans=[plan]
    ) as runtime:
        base = torch.tensor(whole.base).bfloat16()[share, :, runtime.shard.start : runtime.shard.stop]
        keys, offsets = torch.tensor(whole.keys)[share], torch.tensor(whole.offsets)[share]
        rows = torch.arange(BATCH)[share]  # a request draws by its slot in the whole batch
        temperatures = torch.tensor(whole.temperatures)[share]
        for _ in range(2):  # neither group keeps the other's pace
            noise = tp_walk.Noise(keys, offsets.clone(), rows)
            out = runtime.walk(base, torch.tensor(whole.anchors)[share], temperatures, noise)
        runtime.check()
        return share.start, out.tokens.tolist(), (runtime.shard.start, runtime.shard.stop)


@pytest.mark.parametrize("own_shards", [False, True], ids=["default shards", "own shards"])
@pytest.mark.parametrize("plan", ["reference", "reference_int8"])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_groups_walk_their_shares(rank_pool, grouping: Sequence[Sequence[int]], plan: str, own_shards: bool) -> None:
    right = solve(problem(), int8=plan == "reference_int8").tokens.tolist()
    walked = rank_pool(5)(walk_in_groups, grouping, plan, own_shards)
    for ranks in grouping:
        shards = []
        for rank in ranks:
            first, tokens, shard = walked[rank]
            assert tokens == right[first : first + len(tokens)]
            shards.append(shard)
        starts, stops = zip(*shards, strict=True)
        assert [0, *stops] == [*starts, VOCAB], "a group's shards tile the vocabulary"
    outside = set(range(5)) - {rank for ranks in grouping for rank in ranks}
    assert all(walked[rank] is None for rank in outside)


def one_group_fails() -> str:
    """The second pair's runtime is refused, the first pair's walks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    if rank == 4:
        return "outside"
    arguments = {"max_gamma": GAMMA if rank != 3 else 99}
    made = outcome(
        lambda: tp_walk.WalkRuntime(head_of(problem()), BATCH, group=pairs[rank // 2], device="cpu", **arguments)
    )
    if isinstance(made, Exception):
        return f"{type(made).__name__}: {made}"
    with made as runtime:
        base = torch.tensor(problem().base).bfloat16()
        runtime.walk(base, torch.tensor(problem().anchors), plan="reference")
    return "walked"


def test_a_group_that_fails_disturbs_no_other() -> None:
    pool = RankPool(5)
    try:
        first, second, third, fourth, fifth = pool(one_group_fails)
    finally:
        pool.close()
    assert (first, second, fifth) == ("walked", "walked", "outside")
    assert third == fourth
    assert third.startswith(WalkInputError.__name__)
    assert "rank 1: max_gamma is 99" in third, "ranks are those of the walk group"

"""Ranks that vote, and waits that end."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome

from tp_walk.errors import PlanUnavailableError, SetupError, WalkInputError, WalkMismatch, WalkTimeout
from tp_walk.group import WalkGroup

CPU = torch.device("cpu")


def world() -> WalkGroup:
    return WalkGroup(dist.group.WORLD, CPU)


def gathered() -> tuple[list[object], list[list[int]], list[int], list[int]]:
    group = world()
    rank = group.rank
    objects = group.all_gather_object("x" * rank * 1000)
    tensors = group.all_gather(torch.tensor([rank, -rank]), 60.0)
    largest = group.all_reduce_max(torch.tensor([rank, -rank, -(2**63)]), 60.0)
    columns = group.all_gather_columns(torch.full((1, rank), rank), range(group.world_size), 60.0)
    group.barrier()
    return [len(value) for value in objects], tensors.tolist(), largest.tolist(), columns[0].tolist()


def test_gathers_in_rank_order(rank_pool) -> None:
    right = [0, 1000, 2000], [[0, 0], [1, -1], [2, -2]], [2, 0, -(2**63)], [1, 2, 2]
    assert rank_pool(3)(gathered) == [right] * 3


def gathered_of_any_size(sizes: list[int]) -> list[list[int]]:
    group = world()
    rank = group.rank
    seen = [[len(value) for value in group.all_gather_object(b"x" * (size * (1 + rank)))] for size in sizes]
    wide = group.all_gather(torch.full((3, 1001), float(rank)).bfloat16(), 60.0)
    assert wide[:, 2, 1000].tolist() == list(range(group.world_size))
    assert group.all_gather(torch.empty(0, 4), 60.0).shape == (group.world_size, 0, 4)
    return seen


def test_messages_of_any_size_arrive(rank_pool) -> None:
    sizes = [0, 1, 1000, 1850, 2048, 70_000]
    assert rank_pool(3)(gathered_of_any_size, sizes) == [[[size, 2 * size, 3 * size] for size in sizes]] * 3


def makes_another_call(rank: int) -> tuple[object, object, list[int]]:
    group = world()
    calls = {
        True: lambda: group.vote("set-up of something long" * 20, None),
        False: lambda: group.all_gather(torch.arange(1000), 60.0),
    }
    first = outcome(calls[group.rank == rank])
    second = outcome(lambda: group.all_gather(torch.arange(2 + (group.rank == rank)), 60.0))
    return first, second, group.all_gather_object(group.rank)


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_make_different_calls_are_told_and_go_on(rank: int, rank_pool) -> None:
    for first, second, after in rank_pool(3)(makes_another_call, rank):
        assert isinstance(first, WalkMismatch)
        assert "set-up of something" in str(first)
        assert "[1000] int64" in str(first)
        assert isinstance(second, WalkMismatch)
        assert "[2] int64" in str(second)
        assert "[3] int64" in str(second)
        assert after == [0, 1, 2]


def test_a_world_of_one_needs_no_group() -> None:
    group = WalkGroup(None, CPU)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_gather_object("me") == ["me"]
    assert group.all_reduce_max(torch.tensor([3]), 1.0).tolist() == [3]
    assert group.all_gather(torch.tensor([3]), 1.0).tolist() == [[3]]
    assert group.all_gather_columns(torch.tensor([[3, 4]]), [2], 1.0).tolist() == [[3, 4]]
    group.vote("nothing", None)
    with pytest.raises(PlanUnavailableError, match=r"^no such thing$"):
        group.vote("something", PlanUnavailableError("no such thing"))
    with pytest.raises(SetupError, match="something failed on rank 0: OSError: full"):
        group.vote("something", OSError("full"))


def votes(errors: list[Exception | None]) -> Exception | None:
    group = world()
    return outcome(lambda: group.vote("the stage", errors[group.rank]))


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        ([None, OSError("disk full")], SetupError, "the stage failed on rank 1: OSError: disk full"),
        ([WalkInputError("bad"), None], WalkInputError, "the stage failed on rank 0: bad"),
        (
            [PlanUnavailableError("a"), PlanUnavailableError("b")],
            PlanUnavailableError,
            "failed on rank 0: a; rank 1: b",
        ),
        ([PlanUnavailableError("a"), WalkInputError("b")], SetupError, "failed on rank 0: a; rank 1: b"),
    ],
)
def test_all_ranks_raise_the_same_error(errors, kind: type[Exception], message: str, rank_pool) -> None:
    raised = rank_pool(2)(votes, errors)
    assert [type(error) for error in raised] == [kind] * 2
    assert str(raised[0]) == str(raised[1])
    assert message in str(raised[0])


def test_a_vote_without_failures_lets_all_go_on(rank_pool) -> None:
    assert rank_pool(2)(votes, [None, None]) == [None, None]


def stages() -> tuple[object, object]:
    group = world()
    fails_on_one = outcome(lambda: group.stage("a stage", lambda: 1 // group.rank))
    return group.stage("another", lambda: group.rank * 10), fails_on_one


def test_a_stage_returns_its_result_or_raises_on_all_ranks(rank_pool) -> None:
    (first, error0), (second, error1) = rank_pool(2)(stages)
    assert (first, second) == (0, 10)
    assert (
        str(error0) == str(error1) == "a stage failed on rank 0: ZeroDivisionError: integer division or modulo by zero"
    )


def waits_alone() -> tuple[Exception, float] | None:
    group = WalkGroup(dist.group.WORLD, CPU, timeout_s=0.5)
    if group.rank == 1:
        return None  # never comes
    began = time.monotonic()
    error = outcome(group.barrier)
    return error, time.monotonic() - began


def test_a_rank_that_never_comes_is_reported() -> None:
    pool = RankPool(2)
    try:
        (error, waited), _ = pool(waits_alone)
    finally:
        pool.close()
    assert isinstance(error, WalkTimeout)
    assert "rank 0 waited 0.5 s at most for rank 1" in str(error)
    assert waited >= 0.5


def not_a_member() -> object:
    alone = dist.new_group([0])
    return outcome(lambda: WalkGroup(alone, CPU).rank)


def test_outsiders_are_told(rank_pool) -> None:
    inside, outside = rank_pool(2)(not_a_member)
    assert inside == 0
    assert isinstance(outside, WalkInputError)
    assert "not a member" in str(outside)


def fails_around_a_call(within: str) -> tuple[object, list[int]]:
    group = world()

    def build() -> None:
        if group.rank == 1:
            raise OSError("injected")
        if within == "stage":
            group.stage("a stage within", lambda: None)
        else:
            group.all_gather_object(None, "a call within")

    return outcome(lambda: group.stage("the stage", build)), group.all_gather_object(group.rank)


@pytest.mark.parametrize(
    ("within", "kind", "message"),
    [
        ("stage", SetupError, "^the stage failed on rank 1: OSError: injected$"),
        ("call", WalkMismatch, "'(vote: the stage|a call within)'.*'(vote: the stage|a call within)'"),
    ],
)
def test_a_rank_that_fails_while_others_are_within_its_stage_leaves_them_in_step(
    within: str, kind: type[Exception], message: str, rank_pool
) -> None:
    for raised, after in rank_pool(3)(fails_around_a_call, within):
        assert type(raised) is kind
        assert re.search(message, str(raised))
        assert after == [0, 1, 2]

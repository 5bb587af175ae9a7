"""The exchange with real processes: right tokens on every rank, and an error on every rank that can't have them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

import pytest
from cpu_exchange import Fault, Launch, Outcome, Reset, Walker, anchors_of, right_tokens, run
from faults import LoseResult, SendWrongKey, Sleep, kill, stop

from tp_walk.mailbox import MailboxLayout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops and resumes processes as Linux does")

TOKENS_PER_CTA = 3
# Long enough for a rank that shares two cores with three others, short enough to wait for in each test.
STEADY_S = 0.8


def vocab_size(layout: MailboxLayout) -> int:
    return layout.world_size * layout.num_ctas * TOKENS_PER_CTA


def random_launches(layout: MailboxLayout, count: int, seed: int) -> list[Launch]:
    """Gamma, batch and valid rows change from block to block; some blocks have no valid row."""
    rng = random.Random(seed)
    launches = []
    for _ in range(count):
        batch = rng.randint(1, layout.max_batch)
        anchors = tuple(rng.randrange(vocab_size(layout)) for _ in range(batch))
        valid = rng.choice([None, None, 0, rng.randint(0, batch)])
        launches.append(Launch(rng.randint(1, 4), anchors, valid))
    return launches


def assert_right(layout: MailboxLayout, launches: Sequence[Launch], outcomes: Sequence[Outcome]) -> None:
    for launch, outcome in zip(launches, outcomes, strict=True):
        assert outcome.error is None
        assert outcome.tokens == right_tokens(vocab_size(layout), launch)


# ---- no faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "num_ctas", "max_batch", "count"),
    [(1, 3, 4, 12), (1, 3, 1, 12), (2, 3, 4, 12), (2, 3, 1, 16), (3, 2, 3, 8), (4, 2, 3, 6), (8, 2, 2, 3)],
)
def test_every_rank_walks_to_the_right_tokens(world_size: int, num_ctas: int, max_batch: int, count: int) -> None:
    layout = MailboxLayout(world_size, max_batch, num_ctas)
    launches = random_launches(layout, count, seed=world_size)
    for outcomes in run(layout, [launches] * world_size, steady_s=30.0, tokens_per_cta=TOKENS_PER_CTA):
        assert outcomes is not None
        assert_right(layout, launches, outcomes)


@pytest.mark.parametrize("first_block", [(1 << 40) - 2, (1 << 64) - 2])
def test_block_numbers_wrap_around(first_block: int) -> None:
    layout = MailboxLayout(2, 2, 2)
    launches = random_launches(layout, 5, seed=3)
    for outcomes in run(layout, [launches] * 2, steady_s=30.0, first_block=first_block):
        assert outcomes is not None
        assert_right(layout, launches, outcomes)


def test_a_slow_start_is_waited_for() -> None:
    layout = MailboxLayout(2, 2, 2)
    launches = random_launches(layout, 3, seed=4)
    late = Fault(1, 0, "launch", Sleep(3 * STEADY_S))
    for outcomes in run(layout, [launches] * 2, [late], steady_s=STEADY_S, startup_s=60.0):
        assert outcomes is not None
        assert_right(layout, launches, outcomes)


def test_the_same_delay_later_is_not() -> None:
    layout = MailboxLayout(2, 2, 2)
    launches = [Launch(2, (1, 2))] * 3
    late = Fault(1, 1, "launch", Sleep(3 * STEADY_S))
    punctual, delayed = run(layout, [launches] * 2, [late], steady_s=STEADY_S, startup_s=60.0)
    assert punctual is not None
    assert delayed is not None
    assert [outcome.kind for outcome in punctual] == [None, "WalkTimeout", "WalkTimeout"]
    assert "header of rank 1" in str(punctual[1].error)
    assert [outcome.kind for outcome in delayed] == [None, "WalkTimeout", "WalkTimeout"]
    assert "rank 1 was told by a peer: rank 0 waited" in str(delayed[1].error)


def test_a_missing_rank_is_named_though_most_ctas_wait_for_results() -> None:
    """The aggregators alone wait for headers; the results that the others wait for, of all ranks, tell less."""
    layout = MailboxLayout(2, 2, 6)
    launches = [Launch(2, (1, 3)), Launch(2, (2, 3))]
    punctual, _ = run(layout, [launches] * 2, [Fault(1, 1, "launch", Sleep(3 * STEADY_S))], steady_s=STEADY_S)
    assert punctual is not None
    assert "rank 0 waited past its deadline for the header of rank 1" in str(punctual[1].error)


# ---- lost ranks ------------------------------------------------------------------------------------------------------

GAMMA = 3
LOST = 1
PLACES = [
    ("launch", 0),
    ("slot", 0),
    ("slot", 1),
    ("publish", 1),
    ("slot", GAMMA - 1),
    ("publish", GAMMA - 1),
    ("end", 0),
]


def assert_told(outcomes: Sequence[Outcome], launches: Sequence[Launch], layout: MailboxLayout) -> None:
    """Right tokens up to some block, and from there on the error and anchors."""
    failed = [outcome.error is not None for outcome in outcomes]
    assert failed == sorted(failed), "poison is sticky"
    for launch, outcome in zip(launches, outcomes, strict=True):
        if outcome.error is None:
            assert outcome.tokens == right_tokens(vocab_size(layout), launch)
        else:
            assert outcome.kind == "WalkTimeout"
            assert outcome.tokens == anchors_of(launch)
            assert f"of rank {LOST}" in outcome.error


@pytest.mark.parametrize("action", [kill, stop])
@pytest.mark.parametrize(
    ("world_size", "rows", "place", "step"),
    [(2, 2, *place) for place in PLACES]
    + [(4, 2, "slot", 1), (4, 2, "publish", GAMMA - 1)]
    + [(2, 1, "slot", 0), (2, 1, "publish", 1), (2, 1, "publish", GAMMA - 1), (2, 1, "end", 0)],
)
def test_survivors_of_a_lost_rank_are_told(
    world_size: int, rows: int, place: str, step: int, action: Callable[[Walker], None]
) -> None:
    layout = MailboxLayout(world_size, 2, 2)
    launches = [Launch(GAMMA, anchors[:rows]) for anchors in ((1, 2), (3, 4), (5, 0), (2, 2))]
    fault = Fault(LOST, 1, place, action, step)
    results = run(layout, [launches] * world_size, [fault], steady_s=STEADY_S)
    for rank, outcomes in enumerate(results):
        if rank == LOST and action is kill:
            assert outcomes is None
            continue
        assert outcomes is not None
        assert_told(outcomes, launches, layout)
        assert outcomes[0].error is None
        assert outcomes[-1].error is not None


# ---- launches that differ --------------------------------------------------------------------------------------------

SAME = Launch(3, (1, 2, 3), 2, temperatures=(0.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("batch", Launch(3, (1, 2), 2, temperatures=(0.0, 1.0, 1.0))),
        ("num_valid", Launch(3, (1, 2, 3), 3, temperatures=(0.0, 1.0, 1.0))),
        ("num_valid", Launch(3, (1, 2, 3), 0, temperatures=(0.0, 1.0, 1.0))),
        ("gamma", Launch(4, (1, 2, 3), 2, temperatures=(0.0, 1.0, 1.0))),
        ("plan", Launch(3, (1, 2, 3), 2, plan=2, temperatures=(0.0, 1.0, 1.0))),
        ("rounding", Launch(3, (1, 2, 3), 2, rounding=1, temperatures=(0.0, 1.0, 1.0))),
        ("sampled", Launch(3, (1, 2, 3), 2)),
        ("anchors", Launch(3, (1, 4, 3), 2, temperatures=(0.0, 1.0, 1.0))),
        ("temperatures", Launch(3, (1, 2, 3), 2, temperatures=(0.0, 1.0, 0.5))),
        ("offset", Launch(3, (1, 2, 3), 2, temperatures=(0.0, 1.0, 1.0), offset=1)),
    ],
)
def test_launches_that_differ_are_a_mismatch_that_names_the_field(field: str, other: Launch) -> None:
    layout = MailboxLayout(2, 3, 2)
    first, second = run(layout, [[SAME, SAME], [SAME, other]], steady_s=30.0)
    for outcomes, launch in ((first, SAME), (second, other)):
        assert outcomes is not None
        assert outcomes[0].error is None
        assert outcomes[1].kind == "WalkMismatch"
        assert f"different {field}" in str(outcomes[1].error)
        assert outcomes[1].tokens == anchors_of(launch)


def test_rows_that_arent_valid_may_differ() -> None:
    layout = MailboxLayout(2, 3, 2)
    other = Launch(3, (1, 2, 9), 2, temperatures=(0.0, 1.0, 1.0))
    for outcomes, launch in zip(run(layout, [[SAME], [other]], steady_s=30.0), (SAME, other), strict=True):
        assert outcomes is not None
        assert_right(layout, [launch], outcomes)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_rank_that_launches_once_more_is_told_who_doesnt(gamma: int) -> None:
    layout = MailboxLayout(3, 2, 2)
    launch = Launch(gamma, (1, 2))
    first, second, third = run(layout, [[launch] * 3, [launch] * 2, [launch] * 3], steady_s=STEADY_S)
    assert second is not None
    assert_right(layout, [launch] * 2, second)
    for outcomes in (first, third):
        assert outcomes is not None
        assert_right(layout, [launch] * 2, outcomes[:2])
        assert outcomes[2].kind == "WalkTimeout"
        assert "header of rank 1" in str(outcomes[2].error)
        assert outcomes[2].tokens == anchors_of(launch)


# ---- corrupted words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3], ids=["a post", "a result"])
def test_ranks_that_took_different_tokens_find_out_at_the_next_step(world_size: int) -> None:
    """A word that rank 0 alone gets wrong, with the right tag: without the chain in the tags nobody would know."""
    layout = MailboxLayout(world_size, 1, 2)
    launch = Launch(3, (1,))
    wrong = Fault(1, 0, "publish", SendWrongKey(destination=0, token=17), step=1)
    for outcomes in run(layout, [[launch, launch]] * world_size, [wrong], steady_s=30.0):
        assert outcomes is not None
        assert [outcome.kind for outcome in outcomes] == ["WalkMismatch"] * 2
        assert "different tokens before that step" in str(outcomes[0].error)
        assert "step 2" in str(outcomes[0].error)
        assert outcomes[0].tokens == anchors_of(launch)


@pytest.mark.parametrize("anchors", [(1,), (1, 2)], ids=["posts", "aggregators"])
def test_after_the_last_step_the_next_header_tells(anchors: tuple[int, ...]) -> None:
    layout = MailboxLayout(2, 2, 2)
    launch = Launch(2, anchors)
    wrong = Fault(1, 0, "publish", SendWrongKey(destination=0, token=11), step=1)
    for outcomes in run(layout, [[launch, launch]] * 2, [wrong], steady_s=30.0):
        assert outcomes is not None
        assert [outcome.kind for outcome in outcomes] == [None, "WalkMismatch"]
        assert "different last_tokens" in str(outcomes[1].error)


@pytest.mark.parametrize("anchors", [(1,), (1, 2)], ids=["posts", "aggregators"])
def test_a_word_that_is_lost_ends_in_a_timeout_that_shows_what_is_there(anchors: tuple[int, ...]) -> None:
    layout = MailboxLayout(2, 2, 2)
    launch = Launch(3, anchors)
    lost = Fault(1, 1, "slot", LoseResult(source=0, step=1), step=1)
    # Both ranks end up waiting; the one that started first reaches its deadline first.
    later = Fault(0, 1, "launch", Sleep(STEADY_S / 2))
    first, second = run(layout, [[launch] * 2] * 2, [lost, later], steady_s=STEADY_S)
    assert first is not None
    assert second is not None
    assert [outcome.kind for outcome in first] == [outcome.kind for outcome in second] == [None, "WalkTimeout"]
    assert "rank 1 waited past its deadline for the result of rank 0 at step 1, row 0" in str(second[1].error)
    assert "last saw 0xbeef00" in str(second[1].error)
    assert "rank 0 was told by a peer: rank 1 waited" in str(first[1].error)


# ---- reset -----------------------------------------------------------------------------------------------------------


def test_a_poisoned_rank_walks_no_more_until_all_reset() -> None:
    layout = MailboxLayout(2, 2, 2)
    bad, good = Launch(2, (1, 2)), Launch(3, (4, 5))
    other = Launch(2, (1, 3))
    sequences = [[good, bad, good, good, Reset(), good, good], [good, other, good, good, Reset(), good, good]]
    for outcomes in run(layout, sequences, steady_s=30.0):
        assert outcomes is not None
        assert [outcome.kind for outcome in outcomes] == [None] + ["WalkMismatch"] * 3 + [None] * 2
        assert outcomes[2].tokens == outcomes[3].tokens == anchors_of(good)
        assert outcomes[4].tokens == outcomes[5].tokens == right_tokens(vocab_size(layout), good)


@pytest.mark.parametrize("anchors", [(1,), (1, 2)], ids=["posts", "aggregators"])
def test_reset_agrees_on_a_block_after_one_rank_alone_finished_the_last(anchors: tuple[int, ...]) -> None:
    layout = MailboxLayout(2, 2, 2)
    launch = Launch(2, anchors)
    lost = Fault(1, 1, "slot", LoseResult(source=0, step=1), step=1)
    first, second = run(layout, [[launch, launch, Reset(), launch]] * 2, [lost], steady_s=STEADY_S)
    assert first is not None
    assert second is not None
    assert [outcome.kind for outcome in first] == [None, None, None]
    assert [outcome.kind for outcome in second] == [None, "WalkTimeout", None]
    assert first[-1].tokens == second[-1].tokens == right_tokens(vocab_size(layout), launch)

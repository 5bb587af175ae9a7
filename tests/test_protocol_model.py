"""Every interleaving of a small case of the exchange: no key is lost or stale, and nobody waits for ever.

The model has 2 or 3 ranks of 2 CTAs, each with 1 or 2 service warps as in csrc/walk.cu, and 3 blocks of up to 3 steps,
with gamma and the number of valid rows changing between blocks, so that a block has no group of requests, one or
several. A store becomes visible at any time after it is issued, in any order but that of the stores to the same word:
what PTX promises of relaxed accesses. Waits are blocking reads. The multiply warps can't be seen from outside: a pass
is multiplied once every service warp of the CTA has brought its u, and then all of them may go on with it.
`Variant` takes a rule of the protocol away; the search must then find what the rule is there for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import pytest
from exhaustive import ProtocolError, visit

from tp_walk.mailbox import HEADER_PHASE


@dataclass(frozen=True)
class Variant:
    """The protocol, or what is left of it.

    header_parity, result_parity: words of successive blocks lie apart. step_parity: results of successive steps do.
    block_in_tag, phase_in_tag: what a reader compares; with neither it takes whatever has been written.
    publishers_wait: for every rank's header before they store into peers' mailboxes, aggregators or all CTAs that post
    (CTA 0 waits in a block without a valid row anyhow).
    multiplied: a pass's keys exist once all warps have brought its u. same_warp: the warp that reads a row's results
    stores the row's next slot. lead: how many passes u is ahead of the results; None is as the kernel has it.
    keeps_logits: the service warps also meet after each pass, as in the kernels that keep logits.
    post_copies: a block with one valid row is walked by posts, in so many copies (0: by its aggregator). warps_meet:
    the service warps, each of which has read its share of the posts, before one of them posts the next key.
    """

    header_parity: bool = True
    result_parity: bool = True
    step_parity: bool = True
    block_in_tag: bool = True
    phase_in_tag: bool = True
    publishers_wait: bool = True
    multiplied: bool = True
    same_warp: bool = True
    lead: int | None = None
    keeps_logits: bool = False
    post_copies: int = 0
    warps_meet: bool = True

    def accepts(self, seen: tuple[int, int], expected: tuple[int, int]) -> bool:
        return (not self.block_in_tag or seen[0] == expected[0]) and (not self.phase_in_tag or seen[1] == expected[1])


@dataclass(frozen=True)
class Block:
    gamma: int
    valid_rows: int


@dataclass(frozen=True)
class Size:
    """warps: service warps of a CTA. requests: rows of a pass; request q is looked after by warp q % warps."""

    warps: int
    requests: int
    ranks: int = 2
    ctas: int = 2


Place: TypeAlias = tuple[Hashable, ...]
Tag: TypeAlias = tuple[int, int]  # block, phase


# What a warp does next. All that it awaits must be there at once.
@dataclass(frozen=True)
class Store:
    words: tuple[tuple[Place, Tag], ...]


@dataclass(frozen=True)
class Await:
    words: tuple[tuple[Place, Tag], ...]


@dataclass(frozen=True)
class Read(Await):
    """Takes what is there, waiting for nothing."""


@dataclass(frozen=True)
class Fence:
    """No store of the warp after it becomes visible before those ahead of it."""


@dataclass(frozen=True)
class Arrive:
    """This warp's arrival at a barrier with a name of its own, of the CTA's warps or (launch) of the rank's."""

    name: tuple
    launch: bool = False


@dataclass(frozen=True)
class Join:
    """Waits until every warp of the barrier has arrived."""

    name: tuple
    launch: bool = False


Operation = Store | Await | Fence | Arrive | Join


Rows: TypeAlias = Callable[[int, int], list[int]]
Result: TypeAlias = Callable[[int, int, int, int], tuple[Place, Tag]]
Post: TypeAlias = Callable[[int, int, int, int, int], tuple[Place, Tag]]


def program(
    variant: Variant, size: Size, blocks: tuple[Block, ...], rank: int, cta: int, warp: int
) -> Iterator[Operation]:
    """One service warp's life, as Service::run has it. Row r is aggregated by CTA r % ctas; the last warp of a CTA sees
    to the headers.
    """
    for number, block in enumerate(blocks, start=1):

        def header(destination: int, source: int, number: int = number) -> tuple:
            parity = number % 2 if variant.header_parity else 0
            return ("header", destination, parity, source), (number, HEADER_PHASE)

        def result(destination: int, row: int, source: int, step: int, number: int = number) -> tuple:
            parities = number % 2 if variant.result_parity else 0, step % 2 if variant.step_parity else 0
            return ("result", destination, parities, row, source), (number, step + 1)

        def slot(row: int, of_cta: int, step: int, number: int = number) -> tuple:
            return ("slot", rank, row, of_cta), (number, step + 1)

        def post(destination: int, copy: int, source: int, of_cta: int, step: int, number: int = number) -> tuple:
            parities = number % 2 if variant.result_parity else 0, step % 2 if variant.step_parity else 0
            return ("post", destination, parities, copy, source, of_cta), (number, step + 1)

        posts = variant.post_copies > 0 and block.valid_rows == 1
        groups = -(-block.valid_rows // size.requests)
        count = groups * block.gamma
        lead = variant.lead or (1 if groups == 1 else 2)

        def rows(index: int, of_warp: int, block: Block = block, groups: int = groups) -> list[int]:
            first = index % groups * size.requests
            of_pass = range(first, min(first + size.requests, block.valid_rows))
            return [row for row in of_pass if (row - first) % size.warps == of_warp]

        def collect(index: int, number: int = number, post: Post = post) -> list[Operation]:
            shared = list(product(range(size.ranks), range(size.ctas)))[warp :: size.warps]
            words = tuple(post(rank, cta % variant.post_copies, *writer, index) for writer in shared)
            meeting = [Arrive((number, "posts", index)), Join((number, "posts", index))]
            return [Await(words), *(meeting if variant.warps_meet else [])]

        def receive(index: int, groups: int = groups, rows: Rows = rows, result: Result = result) -> list[Operation]:
            reader = warp if variant.same_warp else (warp + 1) % size.warps
            pairs = product(rows(index, reader), range(size.ranks))
            words = tuple(result(rank, row, peer, index // groups) for row, peer in pairs)
            return [Await(words)] if words else []

        if warp == size.warps - 1:
            if cta == 0:
                yield Store(tuple(header(peer, rank) for peer in range(size.ranks)))
            publishes = posts or cta < block.valid_rows
            if (publishes and variant.publishers_wait) or (cta == 0 and not block.valid_rows):
                yield Await(tuple(header(rank, peer) for peer in range(size.ranks)))
        for index in range(min(lead, count)):
            yield Arrive((number, "u", index))
        for index in range(count):
            if variant.multiplied:
                yield Join((number, "u", index))
            step, own = index // groups, rows(index, warp)
            if own and posts:
                copies = product(range(size.ranks), range(variant.post_copies))
                yield Store(tuple(post(peer, copy, rank, cta, step) for peer, copy in copies))
            elif own:
                yield Store(tuple(slot(row, cta, step) for row in own))
            for row in own:
                if row % size.ctas == cta and not posts:
                    yield Await(tuple(slot(row, other, step) for other in range(size.ctas)))
                    yield Store(tuple(result(peer, row, rank, step) for peer in range(size.ranks)))
            if variant.keeps_logits:
                yield Arrive((number, "read", index))
                yield Join((number, "read", index))
            if index + lead < count:
                if index + lead >= groups:
                    yield from (collect if posts else receive)(index + lead - groups)
                yield Arrive((number, "u", index + lead))
        if cta == 0:
            for index in range(count - groups, count):
                yield from (collect if posts else receive)(index)
        # The end of one kernel and the start of the next.
        yield Arrive((number,), launch=True)
        yield Join((number,), launch=True)


@dataclass(frozen=True)
class Stored:
    """A word of a place, in the order of their issue: the (warp, position) of its store, and of all who must see it.

    followers: stores of the same warp that a fence holds back until this one is visible.
    """

    tag: Tag
    issue: tuple[int, int]
    readers: list[tuple[int, int]] = field(default_factory=list)
    followers: list[Stored] = field(default_factory=list)

    def is_seen(self, positions: Sequence[int]) -> bool:
        own = any(all_passed(positions, [reader]) for reader in self.readers)
        return own or any(follower.is_seen(positions) for follower in self.followers)


class Model:
    """A state is the position of each warp, and that is enough.

    Which stores are issued follows from the positions; which of them someone has seen, too. What isn't seen yet may
    become visible at any time or much later, so a reader may find in a place the last word that anyone has seen there,
    or any issued since. A store is an error as soon as it is issued where a reader of the word before isn't through.
    """

    def __init__(
        self,
        variant: Any,
        size: Size,
        blocks: tuple[Block, ...],
        program: Callable[..., Iterator[Operation]] = program,
    ) -> None:
        self.variant = variant
        self.owners = list(product(range(size.ranks), range(size.ctas), range(size.warps)))
        self.programs = [list(program(variant, size, blocks, *owner)) for owner in self.owners]
        self.stores: dict[Place, list[Stored]] = {}
        for index, operations in enumerate(self.programs):
            ahead: list[Stored] = []  # of the warp's last fence
            behind: list[Stored] = []
            for position, operation in enumerate(operations):
                if isinstance(operation, Fence):
                    ahead, behind = ahead + behind, []
                for place, tag in operation.words if isinstance(operation, Store) else ():
                    store = Stored(tag, (index, position))
                    self.stores.setdefault(place, []).append(store)
                    behind.append(store)
                    for before in ahead:
                        before.followers.append(store)
        for index, operations in enumerate(self.programs):
            for position, operation in enumerate(operations):
                for place, tag in operation.words if isinstance(operation, Await) else ():
                    self.stored(place, tag).readers.append((index, position))
        # Of each Join, by the warp and its position: the (warp, position) of all arrivals that it waits for.
        self.arrivals = {
            (index, position): self.arrivals_of(index, operation)
            for index, operations in enumerate(self.programs)
            for position, operation in enumerate(operations)
            if isinstance(operation, Join)
        }

    def stored(self, place: Place, tag: Tag) -> Stored:
        return next(store for store in self.stores[place] if store.tag == tag)

    def arrivals_of(self, index: int, join: Join) -> list[tuple[int, int]]:
        scope, awaited = 1 if join.launch else 2, Arrive(join.name, join.launch)
        together = [i for i, owner in enumerate(self.owners) if owner[:scope] == self.owners[index][:scope]]
        return [(other, self.programs[other].index(awaited)) for other in together]

    def advance(self, positions: list[int]) -> None:
        """What nobody can observe happens at once: stores are issued, barriers are passed. Raises ProtocolError."""
        moved = True
        while moved:
            moved = False
            for index, operations in enumerate(self.programs):
                while positions[index] < len(operations):
                    operation = operations[positions[index]]
                    if isinstance(operation, Await) or (
                        isinstance(operation, Join)
                        and not all_passed(positions, self.arrivals[index, positions[index]])
                    ):
                        break
                    positions[index] += 1
                    moved = True
                    for place, tag in operation.words if isinstance(operation, Store) else ():
                        self.check_not_lost(positions, place, tag)

    def check_not_lost(self, positions: list[int], place: Place, tag: Tag) -> None:
        for before in itertools.takewhile(lambda store: store.tag != tag, self.stores[place]):
            for reader in before.readers:
                if not all_passed(positions, [reader]):
                    raise ProtocolError(f"lost: {before.tag} is overwritten before {self.owners[reader[0]]} saw it")

    def visible(self, positions: Sequence[int], place: Place) -> list[Tag]:
        """What a reader may find in a place; nothing, where that may also be the memory as it was zeroed."""
        issued = [store for store in self.stores[place] if all_passed(positions, [store.issue])]
        first = max((number for number, store in enumerate(issued) if store.is_seen(positions)), default=0)
        return [store.tag for store in issued[first:]]

    def check_read(self, positions: Sequence[int], index: int, read: Read) -> None:
        for place, expected in read.words:
            found = self.visible(positions, place)
            if found != [expected] or not self.stored(place, expected).is_seen(positions):
                raise ProtocolError(f"stale: {self.owners[index]} may read {found} for {expected} in {place}")

    def successors(self, positions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for index, position in enumerate(positions):
            operation = self.programs[index][position] if position < len(self.programs[index]) else None
            if not isinstance(operation, Await):
                continue
            if isinstance(operation, Read):
                self.check_read(positions, index, operation)
            accepted = [
                [seen for seen in self.visible(positions, place) if self.variant.accepts(seen, expected)]
                for place, expected in operation.words
            ]
            if not all(accepted):
                continue
            for tags, (place, expected) in zip(accepted, operation.words, strict=True):
                if tags != [expected]:
                    raise ProtocolError(f"stale: {self.owners[index]} may take {tags} for {expected} in {place}")
            moved = list(positions)
            moved[index] += 1
            self.advance(moved)
            yield tuple(moved)

    def check(self) -> int:
        """Visits every reachable state and returns how many there are. Raises ProtocolError."""
        positions = [0] * len(self.programs)
        self.advance(positions)

        def ended(state: tuple[int, ...]) -> bool:
            return all(position == len(p) for position, p in zip(state, self.programs, strict=True))

        return visit(tuple(positions), self.successors, ended)


def all_passed(positions: Sequence[int], places: Sequence[tuple[int, int]]) -> bool:
    """Every (warp, position) of `places` lies behind its warp."""
    return all(positions[warp] > position for warp, position in places)


ONE_WARP = Size(warps=1, requests=1)  # more than one row is more than one group
TWO_WARPS = Size(warps=2, requests=2)
ONE_ROW = (Block(1, 1),) * 3
THREE_RANKS = Size(warps=1, requests=1, ranks=3)
POSTS = Variant(post_copies=2)

SAFE = [
    # One group of requests.
    (TWO_WARPS, (Block(3, 2),) * 3),
    (TWO_WARPS, (Block(3, 1), Block(1, 0), Block(2, 2))),
    (TWO_WARPS, (Block(1, 2), Block(2, 1), Block(3, 2))),
    (TWO_WARPS, (Block(1, 0),) * 3),
    # Several, so that u is two passes ahead; and both kinds of blocks in turns.
    (ONE_WARP, (Block(3, 2),) * 3),
    (ONE_WARP, (Block(2, 3), Block(1, 2), Block(2, 3))),
    (ONE_WARP, (Block(3, 1), Block(2, 2), Block(1, 3))),
    (TWO_WARPS, (Block(2, 3), Block(1, 0), Block(2, 3))),
    (TWO_WARPS, (Block(2, 3), Block(3, 1), Block(1, 4))),
    (THREE_RANKS, (Block(2, 2), Block(1, 0), Block(2, 1))),
]


@pytest.mark.parametrize("keeps_logits", [False, True], ids=["", "keeps logits"])
@pytest.mark.parametrize(("size", "blocks"), SAFE, ids=str)
def test_the_protocol_holds_in_every_interleaving(size: Size, blocks: tuple[Block, ...], keeps_logits: bool) -> None:
    assert Model(Variant(keeps_logits=keeps_logits), size, blocks).check() > 5


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [ONE_WARP, TWO_WARPS], ids=str)
@pytest.mark.parametrize(
    "blocks",
    [(Block(3, 1),) * 2, ONE_ROW, (Block(2, 1), Block(1, 0), Block(2, 1)), (Block(2, 1), Block(2, 2), Block(1, 1))],
    ids=str,
)
def test_posts_hold_in_every_interleaving(size: Size, blocks: tuple[Block, ...], copies: int) -> None:
    """Alone, and in turns with blocks that have aggregators or nothing to do."""
    assert Model(Variant(post_copies=copies), size, blocks).check() > 5


# Which rule is there for what: taken away, the search finds it; the words are its own.
BROKEN = {
    "no block parity of headers: a rank two blocks on overwrites what an idle CTA 0 hasn't seen": (
        Variant(header_parity=False),
        TWO_WARPS,
        (Block(3, 1), Block(1, 0), Block(3, 1)),
        "lost",
    ),
    "no block parity of results, nor a wait for headers before publishing": (
        Variant(result_parity=False, publishers_wait=False),
        ONE_WARP,
        ONE_ROW,
        "lost",
    ),
    "no step parity: a peer's next result overwrites one that a slow CTA hasn't seen": (
        Variant(step_parity=False),
        ONE_WARP,
        (Block(3, 1),) * 3,
        "lost",
    ),
    "no step parity, with several groups": (Variant(step_parity=False), ONE_WARP, (Block(3, 2),) * 3, "lost"),
    "no block in the tag: words of two blocks ago are taken for new": (
        Variant(block_in_tag=False),
        ONE_WARP,
        ONE_ROW,
        "stale",
    ),
    "no step in the tag: the slot of the step before is taken for this one's": (
        Variant(phase_in_tag=False),
        ONE_WARP,
        (Block(3, 1),) * 3,
        "stale",
    ),
    "no step in the tag, with several groups": (Variant(phase_in_tag=False), ONE_WARP, (Block(3, 2),) * 3, "stale"),
    "no tag at all": (Variant(block_in_tag=False, phase_in_tag=False), ONE_WARP, ONE_ROW, "stale"),
    "u two passes ahead of the only group: it waits for results of keys that it has yet to bring about": (
        Variant(lead=2),
        ONE_WARP,
        (Block(3, 1),),
        "deadlock",
    ),
    "posts without step parity: the next one overwrites what a slow CTA hasn't seen": (
        replace(POSTS, step_parity=False),
        ONE_WARP,
        (Block(3, 1),),
        "lost",
    ),
    "posts without block parity, nor a wait for headers": (
        replace(POSTS, result_parity=False, publishers_wait=False),
        ONE_WARP,
        ONE_ROW,
        "lost",
    ),
    "posts without a block in the tag": (replace(POSTS, block_in_tag=False), ONE_WARP, ONE_ROW, "stale"),
    "posts without a step in the tag: those of two steps ago pass for new": (
        replace(POSTS, phase_in_tag=False),
        ONE_WARP,
        (Block(3, 1),),
        "stale",
    ),
    "a CTA's warps don't meet: the next key is posted while one of them still reads": (
        replace(POSTS, warps_meet=False, multiplied=False),
        TWO_WARPS,
        (Block(3, 1),),
        "lost",
    ),
    "a row's slot is stored by a warp that hasn't read the results before, nor waits for those that have": (
        Variant(multiplied=False, same_warp=False),
        TWO_WARPS,
        (Block(3, 2),),
        "lost",
    ),
}


@pytest.mark.parametrize(("variant", "size", "blocks", "failure"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_each_rule_is_for(
    variant: Variant, size: Size, blocks: tuple[Block, ...], failure: str
) -> None:
    with pytest.raises(ProtocolError, match=failure):
        Model(variant, size, blocks).check()


@pytest.mark.parametrize("variant", [Variant(result_parity=False), Variant(publishers_wait=False)], ids=str)
@pytest.mark.parametrize("post_copies", [0, 2])
def test_results_and_posts_are_protected_twice(variant: Variant, post_copies: int) -> None:
    """By block parity, and by their writers' wait for headers: one of them would do."""
    assert Model(replace(variant, post_copies=post_copies), ONE_WARP, ONE_ROW).check() > 5


@pytest.mark.parametrize("variant", [replace(POSTS, multiplied=False), replace(POSTS, warps_meet=False)], ids=str)
def test_the_posts_of_a_step_are_protected_twice(variant: Variant) -> None:
    """By the meeting of the warps that read them, and by the multiplication before the next key: either would do."""
    assert Model(variant, TWO_WARPS, (Block(3, 1),) * 2).check() > 5


@pytest.mark.parametrize("variant", [Variant(multiplied=False), Variant(same_warp=False)], ids=str)
def test_slots_are_protected_twice(variant: Variant) -> None:
    """By the warp that reads results and stores the next slot, and by the multiplication between: either would do."""
    assert Model(variant, TWO_WARPS, (Block(2, 2),) * 2).check() > 5

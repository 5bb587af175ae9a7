"""Every interleaving of a small case of csrc/spread.cu and the walks that follow: rows are whole when they are read,
aren't overwritten before, and nobody waits for ever.

The model has 2 ranks of 2 CTAs and up to 3 blocks. Unlike the words of test_protocol_model.py, base logits carry no
tag: a walk takes what it finds. A store becomes visible at any time after it is issued, but in the order of the stores
to its place, and if it is released after all that its CTA has stored before. Headers lie in one place here, whatever
the block: stricter than the mailboxes. `Variant` takes a rule away; the search must then find what it is there for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import pytest
from exhaustive import ProtocolError, visit

RANKS = CTAS = 2

# Of a block. "spread": sharded base logits; "headers": whole ones of int8_split; "alone": whole ones of int8.
Kind = Literal["spread", "headers", "alone"]
Place = tuple[object, ...]


@dataclass(frozen=True)
class Variant:
    """The protocol, or what is left of it.

    releases: arrivals are. all_wait: every CTA waits for the headers before it stores, not CTA 0 alone; none_waits: nor
    that. all_arrive: a CTA waits for the arrivals of all ranks, not for its own. header_first: whole base logits of
    int8_split have a launch that compares headers, too.
    """

    releases: bool = True
    all_wait: bool = True
    none_waits: bool = False
    all_arrive: bool = True
    header_first: bool = True


# What a CTA does next. The words of a Store become visible one by one; each of an Await has a thread of its own.
@dataclass(frozen=True)
class Store:
    places: tuple[Place, ...]
    block: int
    releases: bool = False


@dataclass(frozen=True)
class Await:
    places: tuple[Place, ...]
    block: int


@dataclass(frozen=True)
class Read:
    """Whatever is there: it must be the block's."""

    places: tuple[Place, ...]
    block: int


@dataclass(frozen=True)
class LaunchEnd:
    """All CTAs of the rank are done; the next kernel starts."""


Operation = Store | Await | Read | LaunchEnd


def program(variant: Variant, kinds: tuple[Kind, ...], splits: bool, rank: int, cta: int) -> Iterator[Operation]:
    """One CTA's life."""
    peer = 1 - rank
    for block, kind in enumerate(kinds, start=1):
        launched = kind == "spread" or (kind == "headers" and variant.header_first)
        if launched and (kind == "spread" or cta == 0):  # one CTA will do to compare headers
            if cta == 0:
                yield Store(tuple(("header", to, rank) for to in range(RANKS)), block)
            if not variant.none_waits and (variant.all_wait or cta == 0):
                yield Await(tuple(("header", rank, source) for source in range(RANKS)), block)
            if kind == "spread":
                yield Store((("columns", peer, cta),), block)
            yield Store(tuple(("arrival", to, rank, cta) for to in range(RANKS)), block, variant.releases)
            sources = range(RANKS) if variant.all_arrive else (rank,)
            yield Await(tuple(("arrival", rank, source, cta) for source in sources), block)
        if launched:
            yield LaunchEnd()
        if kind == "spread":
            yield Read(tuple(("columns", rank, part) for part in range(CTAS)), block)
        if splits and cta == 0 and kind != "alone":
            yield Store((("token", peer),), block)
            yield Await((("token", rank),), block)
        yield LaunchEnd()


@dataclass(frozen=True)
class Issued:
    """A store on its way. after: stores that must be visible before."""

    place: Place
    block: int
    number: int
    after: frozenset[int]


@dataclass(frozen=True)
class State:
    """positions: of each CTA. seen: words that it has seen of the Await it is at."""

    positions: tuple[int, ...]
    seen: tuple[frozenset[Place], ...]
    memory: frozenset[tuple[Place, int]]
    pending: frozenset[Issued]


class Model:
    """The search through all states."""

    def __init__(self, variant: Variant, kinds: tuple[Kind, ...], splits: bool) -> None:
        owners = list(product(range(RANKS), range(CTAS)))
        self.programs = [list(program(variant, kinds, splits, *owner)) for owner in owners]
        self.numbers = [  # of each CTA's stores, by position and place
            {
                (position, place): (cta << 20) + position * 64 + i
                for position, operation in enumerate(operations)
                if isinstance(operation, Store)
                for i, place in enumerate(operation.places)
            }
            for cta, operations in enumerate(self.programs)
        ]

    def advance(self, state: State) -> State:
        """What nobody can observe happens at once: stores are issued, launches end."""
        positions, seen, pending = list(state.positions), list(state.seen), set(state.pending)
        moved = True
        while moved:
            moved = False
            for cta, operations in enumerate(self.programs):
                while positions[cta] < len(operations):
                    at, operation = positions[cta], operations[positions[cta]]
                    if isinstance(operation, Store):
                        mine = frozenset(store.number for store in pending if store.number >> 20 == cta)
                        for place in operation.places:
                            after = mine if operation.releases else frozenset()
                            pending.add(Issued(place, operation.block, self.numbers[cta][at, place], after))
                        positions[cta] += 1
                    elif isinstance(operation, LaunchEnd) and self.launch_ends(positions, cta):
                        for other in self.of_rank(cta):
                            positions[other] += 1
                            seen[other] = frozenset()
                    else:
                        break
                    moved = True
        return State(tuple(positions), tuple(seen), state.memory, frozenset(pending))

    def of_rank(self, cta: int) -> range:
        return range(cta // CTAS * CTAS, cta // CTAS * CTAS + CTAS)

    def launch_ends(self, positions: list[int], cta: int) -> bool:
        return all(
            positions[other] < len(self.programs[other])
            and isinstance(self.programs[other][positions[other]], LaunchEnd)
            for other in self.of_rank(cta)
        )

    def successors(self, state: State) -> Iterator[State]:
        memory = dict(state.memory)
        on_their_way = {store.number for store in state.pending}
        for store in state.pending:
            behind = any(other.place == store.place and other.number < store.number for other in state.pending)
            if behind or store.after & on_their_way:
                continue
            landed = frozenset((memory | {store.place: store.block}).items())
            yield State(state.positions, state.seen, landed, state.pending - {store})
        for cta, position in enumerate(state.positions):
            operation = self.programs[cta][position] if position < len(self.programs[cta]) else None
            if not isinstance(operation, Await | Read):
                continue
            for place in operation.places:
                if place in state.seen[cta]:
                    continue
                found = memory.get(place, 0)
                if found != operation.block:
                    if isinstance(operation, Await):
                        continue
                    raise ProtocolError(f"block {operation.block} reads {place} of block {found}")
                seen = state.seen[cta] | {place}
                done = len(seen) == len(operation.places)
                positions, all_seen = list(state.positions), list(state.seen)
                positions[cta] += done
                all_seen[cta] = frozenset() if done else seen
                yield self.advance(State(tuple(positions), tuple(all_seen), state.memory, state.pending))

    def check(self) -> int:
        """Visits every reachable state and returns how many there are. Raises ProtocolError."""
        ctas = len(self.programs)
        start = self.advance(State((0,) * ctas, (frozenset(),) * ctas, frozenset(), frozenset()))

        def ended(state: State) -> bool:
            return all(at == len(p) for at, p in zip(state.positions, self.programs, strict=True))

        return visit(start, self.successors, ended)


SAFE: list[tuple[tuple[Kind, ...], bool]] = [
    (("spread", "alone", "spread"), False),
    (("spread", "spread"), True),
    (("headers", "spread", "headers"), True),
]


@pytest.mark.parametrize(("kinds", "splits"), SAFE, ids=str)
def test_rows_are_whole_in_every_interleaving(kinds: tuple[Kind, ...], splits: bool) -> None:
    assert Model(Variant(), kinds, splits).check() > 100


BROKEN: dict[str, tuple[Variant, tuple[Kind, ...], bool, str]] = {
    "arrivals aren't released: a walk reads columns that are still on their way": (
        Variant(releases=False),
        ("spread",),
        False,
        "reads",
    ),
    "a CTA waits for no header: it overwrites columns that the peer's walk hasn't read": (
        Variant(none_waits=True),
        ("spread", "spread"),
        False,
        "reads",
    ),
    "CTA 0 alone waits for headers": (Variant(all_wait=False), ("spread", "spread"), False, "reads"),
    "nobody waits for the peer's arrivals": (Variant(all_arrive=False), ("spread",), False, "reads"),
    "tokens without headers: one overwrites that of the block before": (
        Variant(header_first=False),
        ("headers", "headers"),
        True,
        "everybody waits",
    ),
}


@pytest.mark.parametrize(("variant", "kinds", "splits", "failure"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_each_rule_is_for(
    variant: Variant, kinds: tuple[Kind, ...], splits: bool, failure: str
) -> None:
    with pytest.raises(ProtocolError, match=failure):
        Model(variant, kinds, splits).check()

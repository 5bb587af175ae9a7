"""Every interleaving of a small case of the exchange: no key is lost or stale, and nobody waits for ever.

The model has 2 ranks of 2 CTAs, up to 2 rows (a warp each, as in csrc/walk.cu) and 3 blocks of up to 3 steps, with
gamma and the number of valid rows changing between blocks. A store becomes visible at any time after it is issued, in
any order but that of the stores to the same word: what PTX promises of relaxed accesses. Waits are blocking reads.
`Variant` takes a rule of the protocol away; the search must then find what the rule is there for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tp_walk.mailbox import HEADER_PHASE

RANKS = CTAS = 2


@dataclass(frozen=True)
class Variant:
    """The protocol, or what is left of it.

    header_parity, result_parity: words of successive blocks lie apart. step_parity: results of successive steps do.
    block_in_tag, phase_in_tag: what a reader compares; with neither it takes whatever has been written.
    aggregators_wait: for every rank's header before they publish (CTA 0 waits in a block without a valid row anyhow).
    """

    header_parity: bool = True
    result_parity: bool = True
    step_parity: bool = True
    block_in_tag: bool = True
    phase_in_tag: bool = True
    aggregators_wait: bool = True

    def accepts(self, seen: tuple[int, int], expected: tuple[int, int]) -> bool:
        return (not self.block_in_tag or seen[0] == expected[0]) and (not self.phase_in_tag or seen[1] == expected[1])


@dataclass(frozen=True)
class Block:
    gamma: int
    valid_rows: int


# What a warp does next. Words are (place, (block, phase)); all that a warp awaits must be there at once.
@dataclass(frozen=True)
class Store:
    words: tuple[tuple[tuple, tuple[int, int]], ...]


@dataclass(frozen=True)
class Await:
    words: tuple[tuple[tuple, tuple[int, int]], ...]


@dataclass(frozen=True)
class Read(Await):
    """Takes what is there, waiting for nothing."""


@dataclass(frozen=True)
class Fence:
    """No store of the warp after it becomes visible before those ahead of it."""


@dataclass(frozen=True)
class Barrier:
    """Of the CTA, or (launch) of all the rank's CTAs: the end of one kernel and the start of the next."""

    launch: bool


Operation = Store | Await | Fence | Barrier


def program(variant: Variant, blocks: tuple[Block, ...], rank: int, cta: int, warp: int) -> Iterator[Operation]:
    """One warp's life. Row r is warp r's, aggregated by CTA r % CTAS; warp 0 also sees to the headers."""
    row = warp
    for number, block in enumerate(blocks, start=1):

        def header(destination: int, source: int, number: int = number) -> tuple:
            parity = number % 2 if variant.header_parity else 0
            return ("header", destination, parity, source), (number, HEADER_PHASE)

        def result(destination: int, source: int, step: int, number: int = number) -> tuple:
            parities = number % 2 if variant.result_parity else 0, step % 2 if variant.step_parity else 0
            return ("result", destination, parities, row, source), (number, step + 1)

        def slot(of_cta: int, step: int, number: int = number) -> tuple:
            return ("slot", rank, row, of_cta), (number, step + 1)

        aggregates = row < block.valid_rows and row % CTAS == cta
        if warp == 0:
            if cta == 0:
                yield Store(tuple(header(peer, rank) for peer in range(RANKS)))
            publishes = any(r % CTAS == cta for r in range(block.valid_rows))
            if (publishes and variant.aggregators_wait) or (cta == 0 and not block.valid_rows):
                yield Await(tuple(header(rank, peer) for peer in range(RANKS)))
        for step in range(block.gamma):
            if row < block.valid_rows and step:
                yield Await(tuple(result(rank, peer, step - 1) for peer in range(RANKS)))
            yield Barrier(launch=False)
            if row < block.valid_rows:
                yield Store((slot(cta, step),))
            if aggregates:
                yield Await(tuple(slot(other, step) for other in range(CTAS)))
                yield Store(tuple(result(peer, rank, step) for peer in range(RANKS)))
        if row < block.valid_rows and (aggregates or cta == 0):
            yield Await(tuple(result(rank, peer, block.gamma - 1) for peer in range(RANKS)))
        yield Barrier(launch=True)


class ProtocolError(Exception):
    """The protocol doesn't hold: a key is lost or stale, or everybody waits."""


class Model:
    """States are (position of each warp, word in each place, stores not yet visible), all as numbers."""

    def __init__(
        self, variant: Any, blocks: tuple[Block, ...], program: Callable[..., Iterator[Operation]] = program
    ) -> None:
        self.variant = variant
        warps = max(1, *(block.valid_rows for block in blocks))
        self.owners = list(product(range(RANKS), range(CTAS), range(warps)))
        self.programs = [list(program(variant, blocks, *owner)) for owner in self.owners]
        # Every store has a number of its own: 0 is the memory as it was zeroed.
        self.tags: list[tuple[int, int] | None] = [None]
        self.place_of: list[int] = [-1]
        places: dict[tuple, int] = {}
        numbers: dict[tuple, int] = {}
        self.fenced: list[set[int]] = [set()]  # what must be visible before each store
        for operations in self.programs:
            ahead: list[int] = []
            behind_fence: set[int] = set()
            for operation in operations:
                if isinstance(operation, Fence):
                    behind_fence = set(ahead)
                for place, tag in operation.words if isinstance(operation, Store) else ():
                    numbers[place, tag] = len(self.tags)
                    self.fenced.append(behind_fence)
                    ahead.append(len(self.tags))
                    self.tags.append(tag)
                    self.place_of.append(places.setdefault(place, len(places)))
        self.num_places = len(places)
        self.words: list[list[list[tuple[int, int]]]] = []  # (place, number) of each operation's words
        self.readers: list[list[tuple[int, int]]] = [[] for _ in self.tags]  # who must see a word: (warp, position)
        for index, operations in enumerate(self.programs):
            self.words.append([])
            for position, operation in enumerate(operations):
                of_operation = operation.words if isinstance(operation, (Store, Await)) else []
                self.words[-1].append([(places[place], numbers[place, tag]) for place, tag in of_operation])
                if isinstance(operation, Await):
                    for word in of_operation:
                        self.readers[numbers[word]].append((index, position))
        self.joined = [
            {
                launch: [
                    i
                    for i, other in enumerate(self.owners)
                    if other[: 1 if launch else 2] == owner[: 1 if launch else 2]
                ]
                for launch in (False, True)
            }
            for owner in self.owners
        ]

    def advance(self, positions: list[int], pending: set[int]) -> None:
        """What nobody can observe happens at once: stores are issued, barriers are passed."""
        moved = True
        while moved:
            moved = False
            for index, operations in enumerate(self.programs):
                while positions[index] < len(operations):
                    operation = operations[positions[index]]
                    if isinstance(operation, Store):
                        pending.update(number for _, number in self.words[index][positions[index]])
                        positions[index] += 1
                    elif isinstance(operation, Fence):
                        positions[index] += 1
                    elif isinstance(operation, Barrier) and self.all_at(positions, index, operation):
                        for other in self.joined[index][operation.launch]:
                            positions[other] += 1
                    else:
                        break
                    moved = True

    def all_at(self, positions: list[int], index: int, barrier: Barrier) -> bool:
        others = self.joined[index][barrier.launch]
        return all(
            positions[other] < len(self.programs[other]) and self.programs[other][positions[other]] == barrier
            for other in others
        )

    def successors(self, state: tuple) -> Iterator[tuple]:
        positions, memory, pending = state
        first: dict[int, int] = {}
        for number in sorted(pending, reverse=True):  # stores of one place are numbered in the order of their issue
            first[self.place_of[number]] = number
        for place, number in first.items():
            if self.fenced[number] & pending:
                continue
            for reader, position in self.readers[memory[place]]:
                if positions[reader] <= position:
                    raise ProtocolError(
                        f"lost: {self.tags[memory[place]]} is overwritten before {self.owners[reader]} saw it"
                    )
            yield positions, (*memory[:place], number, *memory[place + 1 :]), pending - {number}
        for index, position in enumerate(positions):
            if position == len(self.programs[index]) or not isinstance(self.programs[index][position], Await):
                continue
            words = self.words[index][position]
            seen = [(self.tags[memory[place]], self.tags[number]) for place, number in words]
            waits = not isinstance(self.programs[index][position], Read)
            if waits and any(found is None or not self.variant.accepts(found, expected) for found, expected in seen):
                continue
            if any(memory[place] != number for place, number in words):
                raise ProtocolError(f"stale: {self.owners[index]} takes {seen}")
            moved, issued = list(positions), set(pending)
            moved[index] += 1
            self.advance(moved, issued)
            yield tuple(moved), memory, frozenset(issued)

    def check(self) -> int:
        """Visits every reachable state and returns how many there are. Raises ProtocolError."""
        positions, pending = [0] * len(self.programs), set()
        self.advance(positions, pending)
        start = (tuple(positions), (0,) * self.num_places, frozenset(pending))
        visited, frontier = {start}, [start]
        while frontier:
            state = frontier.pop()
            stuck = True
            for after in self.successors(state):
                stuck = False
                if after not in visited:
                    visited.add(after)
                    frontier.append(after)
            if stuck and any(position < len(p) for position, p in zip(state[0], self.programs, strict=True)):
                raise ProtocolError(f"deadlock at {state[0]}")
        return len(visited)


SAFE = [
    (Block(3, 2),) * 3,
    (Block(3, 1), Block(1, 0), Block(2, 2)),
    (Block(1, 2), Block(2, 1), Block(3, 2)),
    (Block(1, 1),) * 3,
    (Block(1, 0),) * 3,
]


@pytest.mark.parametrize("blocks", SAFE, ids=str)
def test_the_protocol_holds_in_every_interleaving(blocks: tuple[Block, ...]) -> None:
    assert Model(Variant(), blocks).check() > 100


# Which rule is there for what: taken away, the search finds it; the words are its own.
BROKEN = {
    "no block parity of headers: a rank two blocks on overwrites what an idle CTA 0 hasn't seen": (
        Variant(header_parity=False),
        (Block(3, 1), Block(1, 0), Block(3, 1)),
        "lost",
    ),
    "no block parity of results, nor a wait for headers before publishing": (
        Variant(result_parity=False, aggregators_wait=False),
        (Block(1, 1),) * 3,
        "lost",
    ),
    "no step parity: a peer's next result overwrites one that a slow CTA hasn't seen": (
        Variant(step_parity=False),
        (Block(3, 1),) * 3,
        "lost",
    ),
    "no block in the tag: words of two blocks ago are taken for new": (
        Variant(block_in_tag=False),
        (Block(1, 1),) * 3,
        "stale",
    ),
    "no step in the tag: the slot of the step before is taken for this one's": (
        Variant(phase_in_tag=False),
        (Block(3, 1),) * 3,
        "stale",
    ),
    "no tag at all": (Variant(block_in_tag=False, phase_in_tag=False), (Block(1, 1),) * 3, "stale"),
}


@pytest.mark.parametrize(("variant", "blocks", "failure"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_each_rule_is_for(variant: Variant, blocks: tuple[Block, ...], failure: str) -> None:
    with pytest.raises(ProtocolError, match=failure):
        Model(variant, blocks).check()


@pytest.mark.parametrize("variant", [Variant(result_parity=False), Variant(aggregators_wait=False)], ids=str)
def test_results_are_protected_twice(variant: Variant) -> None:
    """By block parity, and by the aggregators' wait for headers: one of them would do."""
    assert Model(variant, (Block(1, 1),) * 3).check() > 100

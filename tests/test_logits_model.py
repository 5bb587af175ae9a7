"""Every interleaving of what a walk reports: logits in peers' memory, and log-sum-exps.

The model of test_protocol_model.py, with a row and a warp a CTA. Memory that no word's tag protects is read without
waiting, by a consumer that follows each walk in its rank's stream and takes its time; stores are in order only around a
fence. (Loads are in program order here; that the kernels have the fences for that, test_ptx.py sees to.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import pytest
from test_protocol_model import (
    ONE_WARP,
    Arrive,
    Await,
    Block,
    Fence,
    Join,
    Model,
    Operation,
    ProtocolError,
    Read,
    Size,
    Store,
    Variant,
)

from tp_walk.mailbox import HEADER_PHASE, LOGITS_PHASE

Word: TypeAlias = Callable[..., tuple]


@dataclass(frozen=True)
class Reports(Variant):
    """What is reported, and the rules for it.

    logits, partials, sums: what there is, each searched for itself. every_cta_waits: for the headers, before it writes
    logits. fence: between them and the columns words. columns_wait: of CTA 0, for the columns words of all ranks.
    posts: rows are agreed on by posts, in place of aggregators, who still see to log-sum-exps.
    partial_parity: partials of successive steps lie apart. combine_first: an aggregator takes a step's partials before
    it publishes the next step's result.
    """

    logits: bool = False
    partials: bool = False
    posts: bool = False
    sums: bool = False
    every_cta_waits: bool = True
    fence: bool = True
    columns_wait: bool = True
    partial_parity: bool = True
    combine_first: bool = True


def end_of_kernel(name: tuple) -> Iterator[Operation]:
    """And the start of what follows in the rank's stream."""
    yield Arrive(name, launch=True)
    yield Join(name, launch=True)


def program(
    variant: Reports, size: Size, blocks: tuple[Block, ...], rank: int, cta: int, warp: int
) -> Iterator[Operation]:
    """The life of a CTA's one warp. Row 0 is aggregated by CTA 0; CTA 1 has nothing to publish."""
    peers = [peer for peer in range(size.ranks) if peer != rank]
    aggregates = cta == 0
    for number, block in enumerate(blocks, start=1):

        def header(destination: int, source: int, number: int = number) -> tuple:
            return ("header", destination, number % 2, source), (number, HEADER_PHASE)

        def result(destination: int, source: int, step: int, number: int = number) -> tuple:
            return ("result", destination, number % 2, step % 2, source), (number, step + 1)

        def slot(of_cta: int, step: int, number: int = number) -> tuple:
            return ("slot", rank, of_cta), (number, step + 1)

        def post(destination: int, source: int, of_cta: int, step: int, number: int = number) -> tuple:
            return ("post", destination, number % 2, step % 2, source, of_cta), (number, step + 1)

        def partial(of_cta: int, step: int, number: int = number) -> tuple:
            return ("partial", rank, step % 2 if variant.partial_parity else 0, of_cta), (number, step + 1)

        def sums(destination: int, source: int, step: int, number: int = number) -> tuple:
            return ("sum", destination, step, source), (number, step + 1)

        def logits(destination: int, source: int, of_cta: int, step: int, number: int = number) -> tuple:
            return ("logits", destination, source, of_cta, step), (number, step + 1)

        def columns(destination: int, source: int, of_cta: int, number: int = number) -> tuple:
            return ("columns", destination, source, of_cta), (number, LOGITS_PHASE)

        def agreed(step: int, result: Word = result, post: Word = post) -> Await:
            if variant.posts:
                return Await(
                    tuple(post(rank, *writer, step) for writer in product(range(size.ranks), range(size.ctas)))
                )
            return Await(tuple(result(rank, peer, step) for peer in range(size.ranks)))

        def combine(step: int) -> Iterator[Operation]:
            if variant.partials and aggregates:
                yield Await(tuple(partial(of_cta, step) for of_cta in range(size.ctas)))
            if variant.sums and aggregates:
                yield Store(tuple(sums(peer, rank, step) for peer in range(size.ranks)))

        if cta == 0:
            yield Store(tuple(header(peer, rank) for peer in range(size.ranks)))
        publishes = aggregates or variant.posts
        if (publishes and variant.publishers_wait) or (variant.logits and variant.every_cta_waits):
            yield Await(tuple(header(rank, peer) for peer in range(size.ranks)))
        for step in range(block.gamma):
            if step:
                yield agreed(step - 1)
                if variant.combine_first:
                    yield from combine(step - 1)
            if variant.posts:
                yield Store(tuple(post(peer, rank, cta, step) for peer in range(size.ranks)))
            else:
                yield Store((slot(cta, step),))
            if aggregates and not variant.posts:
                yield Await(tuple(slot(other, step) for other in range(size.ctas)))
                yield Store(tuple(result(peer, rank, step) for peer in range(size.ranks)))
            if step and not variant.combine_first:
                yield from combine(step - 1)
            if variant.logits:
                yield Store(tuple(logits(peer, rank, cta, step) for peer in peers))
            if variant.partials:
                yield Store((partial(cta, step),))
        yield from combine(block.gamma - 1)
        if variant.logits:
            if variant.fence:
                yield Fence()
            yield Store(tuple(columns(peer, rank, cta) for peer in peers))
        if cta == 0:
            yield agreed(block.gamma - 1)
            if variant.sums:
                for step in range(block.gamma):
                    yield Await(tuple(sums(rank, peer, step) for peer in range(size.ranks)))
            if variant.logits and variant.columns_wait:
                yield Await(tuple(columns(rank, peer, of_cta) for peer in peers for of_cta in range(size.ctas)))
        yield from end_of_kernel((number, "walk"))
        if variant.logits:
            if cta == 0:
                for peer in peers:
                    for of_cta in range(size.ctas):
                        yield Read(tuple(logits(rank, peer, of_cta, step) for step in range(block.gamma)))
            yield from end_of_kernel((number, "consumer"))


LOGITS = Reports(logits=True), (Block(1, 1), Block(1, 1))
PARTIALS = Reports(partials=True), (Block(3, 1), Block(1, 1))
SUMS = Reports(sums=True), (Block(1, 1), Block(1, 1))
CASES = {"logits": LOGITS, "partials": PARTIALS, "sums": SUMS}
CASES |= {f"{name}, posts": (replace(variant, posts=True), blocks) for name, (variant, blocks) in CASES.items()}


@pytest.mark.parametrize(("variant", "blocks"), CASES.values(), ids=CASES)
def test_reports_hold_in_every_interleaving(variant: Reports, blocks: tuple[Block, ...]) -> None:
    assert Model(variant, ONE_WARP, blocks, program).check() > 5


BROKEN = {
    "an idle CTA writes what the peer's consumer of the block before still reads": (
        LOGITS,
        {"every_cta_waits": False},
        "lost",
    ),
    "columns words overtake the columns": (LOGITS, {"fence": False}, "stale"),
    "a kernel ends before the peers' columns are in": (LOGITS, {"columns_wait": False}, "stale"),
    "partials of the next step overwrite those that the aggregator hasn't seen": (
        PARTIALS,
        {"partial_parity": False},
        "lost",
    ),
    "an aggregator goes on to the next step without the partials": (PARTIALS, {"combine_first": False}, "lost"),
    "and its CTA posts without them": (CASES["partials, posts"], {"combine_first": False}, "lost"),
    "sums of the next block come before CTA 0 has read this one's": (SUMS, {"publishers_wait": False}, "lost"),
}


@pytest.mark.parametrize(("right", "without", "failure"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_each_rule_is_for(
    right: tuple[Reports, tuple[Block, ...]], without: dict[str, bool], failure: str
) -> None:
    variant, blocks = right
    with pytest.raises(ProtocolError, match=failure):
        Model(replace(variant, **without), ONE_WARP, blocks, program).check()

"""The exchange of csrc/exchange.cuh on the CPU: ranks are processes, their mailboxes one shared segment.

Layout, tags, headers, deadlines, poison and status are the package's own. As on the GPU, a single row on up to
POST_WORLD_SIZE ranks is agreed on by posts, others by their aggregators. A rank's CTAs are generators that its process
advances in random order, one poll at a time. What they exchange comes from a made-up score, so that tests can compute
the right tokens without any exchange. Faults are injected at named places.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_segment import Segment

from tp_walk.mailbox import (
    BLOCK_SHIFT,
    CHAIN_BITS,
    HEADER_WORDS,
    PHASE_BITS,
    POST_COPIES,
    POST_WORLD_SIZE,
    MailboxLayout,
    header_tag,
    key_token,
    make_key,
    pack_header,
    step_tag,
)
from tp_walk.peers import FIRST_BLOCK, RESET_SKIP
from tp_walk.status import Wait, WalkCode, WalkStatus

POLLS_PER_LOOK = 8
GRACE_S = 0.1  # as GRACE_NS of csrc/watch.cuh, for processes that share cores
OUTER_LIMIT_S = 60.0  # far above every deadline of these tests: a rank that reaches it hangs

_CHAIN_MASK = ((1 << CHAIN_BITS) - 1) << PHASE_BITS

# fork: the children share the mapping, and need no import of their own.
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Launch:
    """What one rank is given for one block. num_valid: rows from there on are inert; None is all."""

    gamma: int
    anchors: tuple[int, ...]
    num_valid: int | None = None
    plan: int = 1
    rounding: int = 0
    temperatures: tuple[float, ...] | None = None
    offset: int = 0

    @property
    def valid(self) -> int:
        return len(self.anchors) if self.num_valid is None else self.num_valid

    def header(self, last_tokens: int) -> tuple[int, ...]:
        temperatures = self.temperatures or ()
        return pack_header(
            {
                "batch": len(self.anchors),
                "num_valid": self.valid,
                "gamma": self.gamma,
                "plan": self.plan,
                "rounding": self.rounding,
                "sampled": int(self.temperatures is not None),
                "anchors": zlib.crc32(struct.pack(f"{self.valid}Q", *self.anchors[: self.valid])),
                "temperatures": zlib.crc32(struct.pack(f"{len(temperatures)}d", *temperatures)),
                "offset": self.offset & 0xFFFF,
                "last_tokens": last_tokens,
            }
        )


@dataclass(frozen=True)
class Reset:
    """In place of a launch: the collective reset."""


@dataclass(frozen=True)
class Fault:
    """Rank `rank` does `action` at `place` of its `launch`-th launch (from 0), in step `step` where a step has one.

    place: "launch", "slot" (CTA 0 is about to store its first), "publish" (a result, or CTA 0's post, is about to be
    stored), "end".
    """

    rank: int
    launch: int
    place: str
    action: Callable[[Walker], None]
    step: int = 0


@dataclass
class Outcome:
    """One launch on one rank: `[batch][gamma]` tokens as that rank's memory holds them, and what its host is told."""

    tokens: list[list[int]]
    error: str | None
    kind: str | None


Steps = Generator[None, None, Any]


def score(step: int, row: int, previous: int, token: int) -> float:
    """Few values, so that ties are common."""
    return float(zlib.crc32(struct.pack("4Q", step, row, previous, token)) % 7)


def right_tokens(vocab_size: int, launch: Launch) -> list[list[int]]:
    """The walk without an exchange; rows that aren't valid hold -1."""
    tokens = []
    for row, anchor in enumerate(launch.anchors):
        walked, previous = [], anchor
        for step in range(launch.gamma):
            previous = max(range(vocab_size), key=lambda token: (score(step, row, previous, token), -token))
            walked.append(previous)
        tokens.append(walked if row < launch.valid else [-1] * launch.gamma)
    return tokens


def anchors_of(launch: Launch) -> list[list[int]]:
    """What a failed block leaves in memory."""
    return [[anchor if row < launch.valid else -1] * launch.gamma for row, anchor in enumerate(launch.anchors)]


@dataclass
class Walker:
    """One rank's GPU: runs launches, one after the other."""

    rank: int
    segment: Segment
    steady_s: float
    startup_s: float
    tokens_per_cta: int
    rng: random.Random
    faults: list[Fault] = field(default_factory=list)
    block: int = 0
    expiry: float = 0.0
    launches: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    posts: bool = False  # this launch
    skewed: tuple[int, int] | None = None  # (destination, key): what a corrupted publication sends there

    @property
    def layout(self) -> MailboxLayout:
        return self.segment.layout

    def walk(self, launch: Launch) -> Outcome:
        """One launch: all CTAs to their end."""
        self._inject("launch")
        self.block = self.segment.load(self.rank, self.layout.block_offset)
        first = self.block == self.segment.load(self.rank, self.layout.first_block_offset)
        self.expiry = time.monotonic() + (self.startup_s if first else self.steady_s)
        self.posts = launch.valid == 1 and self.layout.world_size <= POST_WORLD_SIZE
        running = [self._cta(cta, launch) for cta in range(self.layout.num_ctas)]
        while running:
            self.rng.shuffle(running)
            for cta in list(running):
                try:
                    next(cta)
                except StopIteration:
                    running.remove(cta)
            time.sleep(0)  # other ranks may share this core
        self._inject("end")
        self.launches += 1
        error = self.segment.status(self.rank).error(self.rank)
        return Outcome(self.tokens, error and str(error), error and type(error).__name__)

    def _inject(self, place: str, step: int = 0) -> None:
        for fault in self.faults:
            if (fault.launch, fault.place, fault.step) == (self.launches, place, step):
                self.faults.remove(fault)
                fault.action(self)
                return

    # ---- a CTA -------------------------------------------------------------------------------------------------------

    def _cta(self, cta: int, launch: Launch) -> Steps:
        walked = yield from self._walk_cta(cta, launch)
        # CTA 0 alone writes tokens: a rank's block is whole, or it is all anchors.
        if cta == 0:
            self.tokens = anchors_of(launch) if walked is None else walked

    def _walk_cta(self, cta: int, launch: Launch) -> Steps:
        """The tokens as far as this CTA has seen them, or None when the walk has failed."""
        rows = range(launch.valid)
        tokens = [[-1] * launch.gamma for _ in launch.anchors]
        previous = list(launch.anchors)
        if self._poisoned() or not (yield from self._headers(cta, launch)):
            return None
        for step in range(launch.gamma):
            tags = [step_tag(self.block, step, previous[row]) for row in rows]
            for row in rows:
                if cta == 0 and row == 0:
                    self._inject("slot", step)
                key = self._best(cta, step, row, previous[row])
                if self.posts:
                    yield from self._post(cta, step, key, tags[row])
                else:
                    self.segment.store_word(self.rank, self.layout.slot_word(row, cta), key, tags[row])
                    yield
            for row in () if self.posts else rows:
                if self.layout.aggregator(row) == cta and not (yield from self._aggregate(step, row, tags[row])):
                    return None
            if cta and step + 1 == launch.gamma:
                break  # CTA 0 alone waits for the last results
            for row in rows:
                key = yield from (
                    self._collect(cta, step, tags[row]) if self.posts else self._receive(step, row, tags[row])
                )
                if key is None:
                    return None
                tokens[row][step] = previous[row] = key_token(key)
        if cta == 0:
            last = zlib.crc32(struct.pack(f"{len(rows)}Q", *previous[: len(rows)]))
            self.segment.store(self.rank, self.layout.last_tokens_offset, last)
            self.segment.store(self.rank, self.layout.block_offset, self.block + 1)
        return tokens

    def _best(self, cta: int, step: int, row: int, previous: int) -> int:
        start = (self.rank * self.layout.num_ctas + cta) * self.tokens_per_cta
        ids = range(start, start + self.tokens_per_cta)
        return max((make_key(score(step, row, previous, token), token) for token in ids), default=0)

    def _headers(self, cta: int, launch: Launch) -> Steps:
        if self.layout.world_size == 1:
            return True
        tag = header_tag(self.block)
        own = launch.header(self.segment.load(self.rank, self.layout.last_tokens_offset) & 0xFFFF)
        if cta == 0:
            for destination in range(self.layout.world_size):
                for word in range(HEADER_WORDS):
                    place = self.layout.header_word(self.block, self.rank, word)
                    self.segment.store_word(destination, place, own[word], tag)
                yield
        if cta and cta >= launch.valid and not self.posts:
            return True
        for source in range(self.layout.world_size):
            for word in range(HEADER_WORDS):
                site = WalkStatus(wait=Wait.HEADER, source=source)
                theirs = yield from self._await(self.layout.header_word(self.block, source, word), tag, site)
                if theirs is None:
                    return False
                if difference := theirs ^ own[word]:
                    position = word * 64 + (difference & -difference).bit_length() - 1
                    self._fail(WalkCode.MISMATCH, site, own[word], theirs, position)
                    return False
        return True

    def _aggregate(self, step: int, row: int, tag: int) -> Steps:
        best = 0
        for cta in range(self.layout.num_ctas):
            site = WalkStatus(wait=Wait.SLOT, source=cta, step=step, row=row)
            key = yield from self._await(self.layout.slot_word(row, cta), tag, site)
            if key is None:
                return False
            best = max(best, key)
        self._inject("publish", step)
        for destination in range(self.layout.world_size):
            place = self.layout.result_word(self.block, step, row, self.rank)
            self.segment.store_word(destination, place, self._skewed(destination, best), tag)
            yield
        self.skewed = None
        return True

    def _skewed(self, destination: int, key: int) -> int:
        return key if self.skewed is None or self.skewed[0] != destination else self.skewed[1]

    def _post(self, cta: int, step: int, key: int, tag: int) -> Steps:
        """Of row 0, to all ranks."""
        if cta == 0:
            self._inject("publish", step)
        for destination in range(self.layout.world_size):
            for copy in range(POST_COPIES):
                place = self.layout.post_word(self.block, step, copy, self.rank, cta)
                sent = self._skewed(destination, key) if cta == 0 else key
                self.segment.store_word(destination, place, sent, tag)
            yield
        if cta == 0:
            self.skewed = None

    def _collect(self, cta: int, step: int, tag: int) -> Steps:
        """The best of all CTAs of all ranks, from this CTA's copy of their posts."""
        best = 0
        for source in range(self.layout.world_size):
            site = WalkStatus(wait=Wait.RESULT, source=source, step=step)
            for writer in range(self.layout.num_ctas):
                place = self.layout.post_word(self.block, step, cta % POST_COPIES, source, writer)
                key = yield from self._await(place, tag, site)
                if key is None:
                    return None
                best = max(best, key)
        return best

    def _receive(self, step: int, row: int, tag: int) -> Steps:
        best = 0
        for source in range(self.layout.world_size):
            site = WalkStatus(wait=Wait.RESULT, source=source, step=step, row=row)
            key = yield from self._await(self.layout.result_word(self.block, step, row, source), tag, site)
            if key is None:
                return None
            best = max(best, key)
        return best

    # ---- waits and failures ------------------------------------------------------------------------------------------

    def _await(self, offset: int, tag: int, site: WalkStatus) -> Steps:
        """The key, or None when the walk has failed."""
        polls = 0
        while True:
            key, seen = self.segment.load_word(self.rank, offset)
            if seen == tag:
                return key
            polls += 1
            if polls % POLLS_PER_LOOK == 0 and self._hopeless(site, tag, seen):
                return None
            yield

    def _hopeless(self, site: WalkStatus, tag: int, seen: int) -> bool:
        if self._poisoned():
            return True
        if (seen ^ tag) & ~_CHAIN_MASK == 0:
            self._fail(WalkCode.MISMATCH, site, tag, seen)
            return True
        patience_s = {Wait.HEADER: 0.0, Wait.RESULT: GRACE_S, Wait.SLOT: 2 * GRACE_S}[Wait(site.wait)]
        if time.monotonic() >= self.expiry + patience_s:
            self._fail(WalkCode.TIMEOUT, site, tag, seen)
            return True
        return False

    def _poisoned(self) -> bool:
        for origin in range(self.layout.world_size):
            key, tag = self.segment.load_word(self.rank, self.layout.poison_word(origin))
            if tag:
                if self._claim():
                    self.segment.write_status(self.rank, WalkStatus.from_poison(origin, key, tag >> BLOCK_SHIFT))
                return True
        return False

    def _claim(self) -> bool:
        claimed = self.segment.load(self.rank, self.layout.claim_offset)
        self.segment.store(self.rank, self.layout.claim_offset, 1)
        return not claimed

    def _fail(self, code: WalkCode, site: WalkStatus, expected: int, seen: int, position: int = 0) -> None:
        if not self._claim():
            return
        status = WalkStatus(
            code=code,
            origin=self.rank,
            wait=site.wait,
            source=site.source,
            step=site.step,
            row=site.row,
            field=position,
            expected=expected,
            seen=seen,
            block=self.block,
        )
        self.segment.write_status(self.rank, status)
        for destination in range(self.layout.world_size):
            word = self.layout.poison_word(self.rank)
            self.segment.store_word(destination, word, status.poison_key(), header_tag(self.block))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run(
    layout: MailboxLayout,
    launches: Sequence[Sequence[Launch | Reset]],
    faults: Sequence[Fault] = (),
    *,
    steady_s: float = 0.5,
    startup_s: float = 30.0,
    tokens_per_cta: int = 3,
    first_block: int = FIRST_BLOCK,
    seed: int = 0,
) -> list[list[Outcome] | None]:
    """Runs each rank's launches in its own process.

    A rank that was killed gives None. One that stopped itself is resumed once all others have given their outcomes.
    Raises AssertionError when a rank gives no outcome within OUTER_LIMIT_S.
    """
    segment = Segment(layout, first_block)
    barrier = _fork.Barrier(layout.world_size)
    ranks = []
    for rank in range(layout.world_size):
        mine = [fault for fault in faults if fault.rank == rank]
        walker = Walker(rank, segment, steady_s, startup_s, tokens_per_cta, random.Random(seed * 64 + rank), mine)
        ours, theirs = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_rank, args=(walker, launches[rank], barrier, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks)
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()


def _collect(ranks: list[tuple[Any, Any]]) -> list[list[Outcome] | None]:
    outcomes: list[list[Outcome] | None] = [None] * len(ranks)
    waiting = dict(enumerate(ranks))
    limit = time.monotonic() + OUTER_LIMIT_S
    while waiting:
        assert time.monotonic() < limit, f"ranks {sorted(waiting)} gave no outcome within {OUTER_LIMIT_S} s"
        for rank, (_, pipe) in list(waiting.items()):
            if pipe.poll(0.01):
                del waiting[rank]
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:  # killed
                    continue
                if isinstance(outcomes[rank], Exception):
                    raise outcomes[rank]
        if all(_is_stopped(process.pid) for process, _ in waiting.values()):
            for process, _ in waiting.values():
                os.kill(process.pid, signal.SIGCONT)
    return outcomes


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def _rank(walker: Walker, launches: Sequence[Launch | Reset], barrier: Any, pipe: Any) -> None:
    try:
        outcomes = []
        for launch in launches:
            if isinstance(launch, Reset):
                _reset(walker, barrier)
            else:
                outcomes.append(walker.walk(launch))
        pipe.send(outcomes)
    except Exception as error:
        pipe.send(error)


def _reset(walker: Walker, barrier: Any) -> None:
    """As PeerMailboxes.reset: nobody clears before all have stopped walking, nor walks before all have cleared."""
    segment, layout = walker.segment, walker.layout
    barrier.wait(OUTER_LIMIT_S)
    block = max(segment.load(rank, layout.block_offset) for rank in range(layout.world_size)) + RESET_SKIP
    barrier.wait(OUTER_LIMIT_S)
    segment.clear(walker.rank, block)
    barrier.wait(OUTER_LIMIT_S)

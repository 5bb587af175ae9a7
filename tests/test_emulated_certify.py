"""Both launches of plan certified, and its bounds, on the emulator: the definition's tokens, on all ranks."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from emulated import HAS_COMPILER, run_kernel, translated
from test_certify import SPOILERS, TEMPERATURES, Spoiler, as_they_come, masked, one_bad_request, rounded_up, ties

import tp_walk
from tp_walk import certified, executors, jit, kernels
from tp_walk.certify import bias_bound
from tp_walk.config import Rounding
from tp_walk.mailbox import WORD_BYTES, MailboxLayout
from tp_walk.noise import Noise
from tp_walk.plan import WalkInputs
from tp_walk.precompile import HOPPER
from tp_walk.reference import ordered
from tp_walk.shard import shard_bounds
from tp_walk.status import STATUS_BYTES

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

GRID, BATCH, GAMMA = 3, 6, 4
DEADLINE_NS = 60 * 10**9
FIRST_OFFSET = 3
NO_ORDER = -(2**15)  # the upper half of that of no candidate


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs of few threads, and a first tier that isn't all that is scored."""
    monkeypatch.setattr(certified, "WARPS", 4)
    monkeypatch.setattr(certified, "TIERS", (64,))


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 8 + 32, dtype=torch.int64)


@dataclass
class Rank:
    """One rank's memory."""

    mailbox: torch.Tensor
    walk_mailbox: torch.Tensor
    lists: torch.Tensor
    status: torch.Tensor = field(default_factory=lambda: zeros(STATUS_BYTES))
    left: torch.Tensor = field(default_factory=lambda: torch.zeros(2 + BATCH + 32, dtype=torch.int32))
    offsets: torch.Tensor = field(default_factory=lambda: torch.zeros(BATCH, dtype=torch.int64))
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(len(certified.COUNTS), dtype=torch.int64))
    offset: torch.Tensor = field(default_factory=lambda: torch.tensor([FIRST_OFFSET]))


class World:
    """Ranks that share this process's memory, and do what CertifiedExecutor does."""

    def __init__(
        self,
        head: tp_walk.MarkovHead,
        world: int,
        rounding: Rounding,
        sampled: bool,
        folder: Path,
        batch: int = BATCH,
        grid: int = GRID,
        teams: Sequence[int] = (
            2,
            1,
        ),  # in turn alone, and with another CTA; and all requests on all ranks, and dealt out
        helpers: int = 0,
    ) -> None:
        self.shards = shard_bounds(head.vocab_size, world)
        self._rounding, self._folder, self._d2t = rounding, folder, head.d2t
        self._teams, self._team, self._helpers = itertools.cycle(teams), 1, helpers
        self._w1, self._w2 = head.w1.contiguous(), head.w2_rows(0, head.vocab_size).contiguous()
        self._bounds = bias_bound(self._w1.float() @ self._w2.float().T)
        widths = [shard.width for shard in self.shards]
        shape = {"markov_rank": head.markov_rank, "max_batch": batch, "rounding": rounding}
        limits = {"shared_limit": HOPPER.shared_limit}
        base_fp32 = rounding == "none" and sampled
        self._certify = next(
            one
            for one in certified.certify_specialisations(widths=widths, num_sms=grid, **shape, **limits)
            if (one.base_fp32, one.sampled) == (base_fp32, sampled)
        )
        self._walk = next(
            one
            for one in kernels.specialisations(
                int8=False, rows=max(widths), world_size=world, num_sms=grid, **shape, **limits
            )
            if (one.base_fp32, one.sampled, one.logits) == (base_fp32, sampled, "none") and one.serves >= batch
        )
        self._list_words = batch * GAMMA * world * self._certify.units * self._certify.unit_words
        num_bytes = MailboxLayout(world, batch, grid).num_bytes
        list_bytes = (2 * self._list_words + batch * GAMMA * certified.STEP_WORDS) * WORD_BYTES
        self.ranks = [Rank(zeros(num_bytes), zeros(num_bytes), zeros(list_bytes)) for _ in range(world)]
        for rank in self.ranks:
            rank.mailbox[:2] = rank.walk_mailbox[:2] = 1  # the block to come, and the first
        self._fragments = [
            kernels.to_fragments(self._w2[shard.start : shard.stop].contiguous(), self._walk.placement)
            for shard in self.shards
        ]

    def draft(
        self, base: torch.Tensor, anchors: torch.Tensor, temperatures: torch.Tensor | None, num_valid: torch.Tensor
    ) -> list[torch.Tensor]:
        """One block; each rank's tokens, -1 where none was written."""
        given = self.certify(base, anchors, temperatures, num_valid)
        second = [self._walk_params(rank, inputs) for rank, inputs in enumerate(given)]
        placement = self._walk.placement
        run_kernel("walk", self._walk.macros, second, placement.grid, placement.shared_bytes, self._folder)
        assert not any(rank.status[0] for rank in self.ranks)
        return [inputs.tokens for inputs in given]

    def certify(
        self, base: torch.Tensor, anchors: torch.Tensor, temperatures: torch.Tensor | None, num_valid: torch.Tensor
    ) -> list[WalkInputs]:
        """The first launch alone; what each rank was given."""
        base = base.float() if self._rounding == "none" and temperatures is not None else base
        given = []
        for rank in self.ranks:
            tokens = torch.full(base.shape[:2], -1)
            noise = None if temperatures is None else Noise(11, rank.offset)
            given.append(
                WalkInputs(base, True, anchors, temperatures, noise, num_valid, "none", "all", tokens, None, None)
            )
        self._team = next(self._teams)
        params = [self._certify_params(rank, inputs) for rank, inputs in enumerate(given)]
        run_kernel(
            "certify", self._certify.macros, params, self._certify.grid, self._certify.shared_bytes, self._folder
        )
        return given

    def _common(self, rank: int, inputs: WalkInputs, plan: str) -> kernels.WalkParams:
        p = kernels.WalkParams()
        p.u_rows, p.d2t = self._w1.data_ptr(), None if self._d2t is None else self._d2t.data_ptr()
        for peer, memory in enumerate(self.ranks):
            mailbox = memory.mailbox if plan == "certified" else memory.walk_mailbox
            p.mailboxes[peer] = mailbox.data_ptr()
        p.status = self.ranks[rank].status.data_ptr()
        p.startup_deadline_ns = p.steady_deadline_ns = DEADLINE_NS
        p.vocab_size, p.target_vocab_size = self._w2.shape[0], self._w1.shape[0]
        p.shard_start, p.shard_width, p.rank = self.shards[rank].start, self.shards[rank].width, rank
        p.shares = 1
        executors.describe_walk(p, inputs, plan, self._rounding)
        executors.point_at_base(p, inputs.base_logits, inputs.base_is_full)
        return p

    def _certify_params(self, rank: int, inputs: WalkInputs) -> certified.CertifyParams:
        p, mine = certified.CertifyParams(), self.ranks[rank]
        p.walk = self._common(rank, inputs, "certified")
        p.w2, p.bounds = self._w2.data_ptr(), self._bounds.data_ptr()
        for peer, memory in enumerate(self.ranks):
            p.lists[peer], p.shard_starts[peer] = memory.lists.data_ptr(), self.shards[peer].start
        p.steps_offset = 2 * self._list_words * WORD_BYTES
        p.fallback, p.offsets, p.counts = mine.left.data_ptr(), mine.offsets.data_ptr(), mine.counts.data_ptr()
        p.units, p.list_words = self._certify.units, self._list_words
        p.team, p.helpers = self._team, self._helpers
        # As by `shares`: where CTAs are left over, each rank takes all requests.
        p.owners = len(self.ranks) if self._team > 1 and self._helpers == 0 else 1
        return p

    def _walk_params(self, rank: int, inputs: WalkInputs) -> kernels.WalkParams:
        mine = self.ranks[rank]
        noise = None if inputs.noise is None else Noise(inputs.noise.key, mine.offsets)
        p = self._common(rank, inputs._replace(num_valid=mine.left[0], noise=noise), "tp_bf16")
        p.w2_fragments = self._fragments[rank].data_ptr()
        p.first_step, p.batch_rows = mine.left[1:].data_ptr(), mine.left[2:].data_ptr()
        return p


def check(
    spoil: Spoiler,
    world: int,
    sampled: bool,
    folder: Path,
    vocab_size: int = 700,
    rounding: Rounding = "engine",
    draft: bool = False,
    valid: int = BATCH,
    batch: int = BATCH,
    **how: Any,
) -> dict[str, int]:
    """Three blocks against the definition, all ranks. The counts of rank 0."""
    torch.manual_seed(1)
    w1, w2 = (torch.randint(-4, 5, (vocab_size, 256)).float() / 32 for _ in range(2))
    base = torch.randn(batch, GAMMA, vocab_size) * 8
    spoil(base, w1, w2)
    head = tp_walk.MarkovHead(w1.bfloat16(), w2.bfloat16(), torch.randperm(vocab_size) if draft else None)
    temperatures = TEMPERATURES[:batch] if sampled else None
    ranks = World(head, world, rounding, sampled, folder, batch, **how)
    anchors, num_valid = torch.randint(vocab_size, (batch,)), torch.tensor(valid, dtype=torch.int32)
    with tp_walk.WalkRuntime(head, batch, GAMMA, rounding, device="cpu", plans=["reference"]) as runtime:
        for block in range(3):
            noise = Noise(11, FIRST_OFFSET + block) if sampled else None
            right = runtime.walk(base.bfloat16(), anchors, temperatures, noise).tokens
            for tokens in ranks.draft(base.bfloat16(), anchors, temperatures, num_valid):
                assert torch.equal(tokens[:valid], right[:valid])
                assert bool((tokens[valid:] == -1).all())
    counts = [dict(zip(certified.COUNTS, rank.counts.tolist(), strict=True)) for rank in ranks.ranks]
    assert all(one == counts[0] for one in counts)
    assert all(rank.offset.item() == FIRST_OFFSET + 3 * sampled for rank in ranks.ranks)
    return counts[0]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_nothing_fools_the_kernels(spoil: Spoiler, folder: Path) -> None:
    for world, sampled in itertools.product((1, 2), (False, True)):
        check(spoil, world, sampled, folder)


@pytest.mark.parametrize("rounding", ["once", "none"])
def test_every_rounding_and_drafted_ids(rounding: Rounding, folder: Path) -> None:
    for sampled in (False, True):
        check(one_bad_request, 2, sampled, folder, rounding=rounding, draft=True)


@pytest.mark.parametrize("rounding", ["engine", "none"])
@pytest.mark.parametrize("allowed", [7, 20])
def test_fewer_ids_above_a_mask_than_a_list_has_room_for(allowed: int, rounding: Rounding, folder: Path) -> None:
    """No threshold leaves as many as a list should have: with fp32 base logits that is known after some 60 tries."""

    def few(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
        others = torch.rand(base.shape).argsort(dim=-1)[..., allowed:]
        base.scatter_(-1, others, -1e9)

    check(few, 1, True, folder, rounding=rounding)


def test_steps_are_certified_and_requests_fall_back(folder: Path) -> None:
    counts = check(masked, 2, True, folder)
    assert counts["certified_blocks"] == counts["blocks"] == 3 * BATCH
    counts = check(one_bad_request, 2, False, folder)
    assert counts["fallbacks"] == 3
    assert counts["certified_blocks"] == 3 * (BATCH - 1)


@pytest.mark.parametrize("sampled", [False, True])
def test_more_equal_candidates_than_a_tier_has_room_for_are_left_to_the_walk(sampled: bool, folder: Path) -> None:
    def crowd(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
        base.fill_(-1e9)  # below the others whatever the noise
        for shard in shard_bounds(base.shape[-1], 4):
            base[..., shard.start : shard.start + 20] = 1.0  # fewer than a unit keeps, more than a tier of 64 in all

    counts = check(crowd, 4, sampled, folder)
    assert sampled or counts["certified_steps"] == 0


def lists_of(ranks: World, rank: int, step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A greedy request's step as `rank` sent it to the request's owner, laid out by csrc/candidates.cuh.

    Each unit's candidates `[units, list, 2]`: the upper half of a score's order, NO_ORDER where there is none, and its
    column. And what no other score of the unit exceeds `[units]`.
    """
    kernel, world = ranks._certify, len(ranks.ranks)
    first = ranks._list_words + ((step * BATCH + row) * world + rank) * kernel.units * kernel.unit_words  # of block 1
    words = ranks.ranks[row % world].lists.view(torch.int32)[4 * first :][: 4 * kernel.units * kernel.unit_words]
    parts = words.reshape(kernel.units, kernel.unit_words, 4)[..., :3].flatten(1)
    place, unit = parts & 0xFFFF, torch.arange(kernel.units)[:, None]
    column = (place // 16 * kernel.units + unit) * 16 + place % 16
    orders, length = parts >> 16, int(kernel.macros["TPW_LIST"])
    return torch.stack([orders, column], dim=-1)[:, :length], orders[:, length]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("spoil", [as_they_come, ties, masked, one_bad_request])
@pytest.mark.parametrize("vocab_size", [700, 3000])
def test_units_keep_their_best(spoil: Spoiler, vocab_size: int, world: int, folder: Path) -> None:
    torch.manual_seed(4)
    w1, w2 = (torch.randint(-4, 5, (vocab_size, 256)).float() / 32 for _ in range(2))
    base = torch.randn(BATCH, GAMMA, vocab_size) * 8
    spoil(base, w1, w2)
    ranks = World(tp_walk.MarkovHead(w1.bfloat16(), w2.bfloat16()), world, "engine", False, folder)
    ranks.certify(base.bfloat16(), torch.zeros(BATCH, dtype=torch.int64), None, torch.tensor(BATCH, dtype=torch.int32))
    length = int(ranks._certify.macros["TPW_LIST"])
    for rank, step, row in itertools.product(range(world), range(GAMMA), range(BATCH)):
        shard = ranks.shards[rank]
        scores = ordered(base.bfloat16()[row, step, shard.start : shard.stop].float()) >> 16
        unit_of = torch.arange(shard.width) // 16 % ranks._certify.units
        for unit, (listed, bound) in enumerate(zip(*lists_of(ranks, rank, step, row), strict=True)):
            orders, columns = listed[listed[:, 0] != NO_ORDER].T
            assert torch.equal(orders, scores[columns])
            assert len(columns.unique()) == len(columns)
            assert bool((unit_of[columns] == unit).all())
            left_out = scores[(unit_of == unit) & ~torch.isin(torch.arange(shard.width), columns)]
            assert bool((left_out <= bound).all())
            if spoil is as_they_come:
                assert len(columns) >= min(length // 2, len(left_out))


@pytest.mark.parametrize("valid", [0, 4])
def test_rows_that_are_not_valid_are_left_alone(valid: int, folder: Path) -> None:
    check(one_bad_request, 2, True, folder, valid=valid)


def test_a_launch_after_a_failure_leaves_candidates_alone(folder: Path) -> None:
    """A peer may still be in the middle of the block that failed here, by the same block number."""
    torch.manual_seed(3)
    head = tp_walk.MarkovHead(*(torch.randint(-4, 5, (700, 256)).div(32.0).bfloat16() for _ in range(2)))
    base, anchors = torch.randn(BATCH, GAMMA, 700).bfloat16(), torch.randint(700, (BATCH,))
    valid = torch.tensor(BATCH, dtype=torch.int32)
    ranks = World(head, 2, "engine", False, folder)
    ranks.certify(base, anchors, None, valid)
    before = [rank.lists.clone() for rank in ranks.ranks]
    layout = MailboxLayout(2, BATCH, GRID)
    for rank in ranks.ranks:
        rank.mailbox[:2] = 1  # the same block once more
        rank.mailbox[layout.claim_offset // 8] = 1
        rank.mailbox[layout.poison_word(0) // 8 + 1] = 1  # the tag
    for inputs in ranks.certify(-base, anchors, None, valid):
        assert torch.equal(inputs.tokens, anchors[:, None].expand(BATCH, GAMMA))
    assert all(torch.equal(rank.lists, lists) for rank, lists in zip(ranks.ranks, before, strict=True))


ONE_REQUEST = {"vocab_size": 3000, "valid": 1, "batch": 1, "grid": 3 * GAMMA}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_second_tier_is_another_ctas(sampled: bool, world: int, folder: Path) -> None:
    """Where each CTA has one step; the same is scored and certified as by a single CTA a step."""

    def doubtful(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
        base.div_(8)
        w1.mul_(16 if sampled else 8)

    one, helped = (
        check(doubtful, world, sampled, folder, **ONE_REQUEST, teams=(team,), helpers=helpers)
        for team, helpers in ((1, 0), (2, 1))
    )
    assert helped == one
    assert helped["certified_steps"] > 0
    assert helped["fallbacks"] > 0, "no step takes all tiers"


def test_a_helper_ends_where_there_is_no_tier(folder: Path) -> None:
    """All scores of a step are equal, so that nothing is above what was left out: neither of them has rows to score."""

    def equal(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
        base.fill_(1.0)

    counts = check(equal, 1, False, folder, **ONE_REQUEST, teams=(2,), helpers=1)
    assert counts["candidates_scored"] == counts["certified_steps"] == 0


def test_a_late_helper_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CTA has nothing to choose and comes when all else is done. Behind the block's end it would find the number of
    the next one, and wait for that one's candidates.
    """
    place = "    if (warp == kCertifyWarps - 1) begin("
    late = (
        "    const bool is_helper = (gridDim.x - 1 - blockIdx.x) % 3 == 2 && int(blockIdx.x) >= walk.gamma * p.units;\n"
        "    for (int i = 0; is_helper && i < 20000; ++i) let_others_run();\n"
    )
    assert place in (jit.csrc_dir() / "certify.cu").read_text()
    monkeypatch.setattr(emulated, "translated", lambda source: translated(source.replace(place, late + place)))
    few = ONE_REQUEST | {"vocab_size": 700}
    counts = check(as_they_come, 1, False, tmp_path, **few, teams=(2,), helpers=1)
    assert counts["certified_steps"] > 0


def test_a_vocabulary_that_the_lists_hold(folder: Path) -> None:
    counts = check(as_they_come, 2, True, folder, vocab_size=7)
    assert counts["certified_steps"] == counts["steps"]


def sure_at_first(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """Nothing is known of what follows a token that is: the next step has transitions from it alone."""
    base.div_(64)[:, 0, 3] = 40.0


@pytest.mark.parametrize(
    ("spoil", "sampled", "rule", "broken"),
    [
        (ties, False, "key_value(key) > limit; }", "key_value(key) >= limit; }"),
        (sure_at_first, False, "scoring.limit(threshold, bound)", "kNothing"),
        (rounded_up, True, "1.0f - 0x1p-8f : 1.0f + 0x1p-8f", "1.0f : 1.0f"),
    ],
    ids=["ties", "transitions that nothing bounds", "no slack"],
)
def test_a_broken_rule_is_noticed(
    spoil: Spoiler, sampled: bool, rule: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(rule in file.read_text() for file in jit.csrc_dir().iterdir()) == 1
    monkeypatch.setattr(emulated, "translated", lambda source: translated(source.replace(rule, broken)))
    with pytest.raises(AssertionError, match="where False"):
        check(spoil, 1, sampled, tmp_path)


class BoundsParams(ctypes.Structure):
    """Field for field `BoundsParams` of emulator/certify_bounds.cpp."""

    _fields_ = [
        ("fragments", ctypes.c_void_p),
        ("w1", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("tiles", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
    ]


@pytest.mark.parametrize("rank", [256, 512])
def test_bounds_are_the_largest_dots(rank: int, folder: Path) -> None:
    torch.manual_seed(2)
    w1, w2 = ((torch.randint(-4, 5, (rows, rank)).float() / 8).bfloat16() for rows in (130, 203))
    w2[:, :] = w2.abs()
    w1[5], w1[9], w1[10], w1[11] = float("inf"), 3e38, 0.0, -1.0  # the last has only negative dots
    w1[77, 3] = float("nan")
    fragments, bounds = certified.bound_fragments(w2), torch.full((130,), 99.0)
    params = BoundsParams(fragments.data_ptr(), w1.data_ptr(), bounds.data_ptr(), len(fragments), 130)
    shared_bytes = certified.BOUND_TOKENS * (2 * rank + 32)
    run_kernel("certify_bounds", certified.bound_macros(rank), [params], 3, shared_bytes, folder)
    assert torch.equal(bounds, bias_bound(w1.float() @ w2.float().T))
    assert bounds[11] < 0

"""The kernels' plans on the emulator: the oracle's walks on all ranks, from host code to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from agreement import assert_log_sum_exp, assert_same, head_of, noise_of
from emulated import HAS_COMPILER
from emulated_ranks import Gpu, HostDevice, Ranks, ThreadGroup, emulate_gpus
from oracle import Problem, make_problem, solve

from tp_walk.certified import CertifiedExecutor
from tp_walk.config import Deadline, LogitsMode, LogitsRows, WalkShape
from tp_walk.executors import TpBf16Executor
from tp_walk.inputs import InputChecker
from tp_walk.int8_executors import Int8Executor, Int8SplitExecutor
from tp_walk.peer_logits import PeerLogits
from tp_walk.placement import STREAM_SLOT_BYTES, STREAM_SLOTS
from tp_walk.plan import ExecutorContext, WalkOutput
from tp_walk.precompile import HOPPER
from tp_walk.shard import Shard, shard_bounds

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

EXECUTORS = {one.name: one for one in (TpBf16Executor, Int8Executor, Int8SplitExecutor, CertifiedExecutor)}
UNTOUCHED = 77
SLOTS = STREAM_SLOTS * STREAM_SLOT_BYTES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpus(monkeypatch)


@dataclass(frozen=True)
class Walk:
    """How a problem is walked.

    base: "full", "sharded" (with five NaN columns behind each shard), or "aligned" (full, rows on 16 bytes). valid: of
    the batch's rows, or None for all, without num_valid. streams: shared memory is too small for all of W2, and the
    rest comes through slots, or is loaded.
    """

    plan: str
    world: int
    gpu: Gpu = field(default_factory=lambda: Gpu(3, HOPPER.shared_limit))
    base: str = "full"
    logits: LogitsMode = "full"
    logits_rows: LogitsRows = "all"
    lse: bool = True
    valid: int | None = None
    shards: Sequence[Shard] | None = None
    max_batch: int | None = None
    streams: Literal["", "slots", "loads"] = ""


def base_of(problem: Problem, layout: str, shard: Shard) -> torch.Tensor:
    base = torch.tensor(problem.base, dtype=torch.float32 if problem.rounding == "none" else torch.bfloat16)
    if layout == "full":
        return base
    columns = base[..., shard.start : shard.stop] if layout == "sharded" else base
    width = columns.shape[-1]
    padded = columns.new_full((*base.shape[:2], width + 5 if layout == "sharded" else -(-width // 8) * 8), math.nan)
    padded[..., :width] = columns
    return padded if layout == "sharded" else padded[..., :width]


def check(problem: Problem, how: Walk, folder: Path) -> None:
    """Two blocks on all ranks against the oracle: tokens, logits and offsets to the bit, log-sum-exps as promised, and
    nothing written that isn't to be.
    """
    batch, gamma, vocab = problem.base.shape
    shards = shard_bounds(vocab, how.world) if how.shards is None else list(how.shards)
    head, ranks = head_of(problem), Ranks(how.world, how.gpu, folder)
    valid = batch if how.valid is None else how.valid
    sampled = problem.temperatures is not None
    blocks = [
        solve(replace(problem, offsets=problem.offsets + block * sampled), int8="int8" in how.plan)
        for block in range(2)
    ]

    def walk(rank: int) -> None:
        group, shard, max_batch = ThreadGroup(), shards[rank], how.max_batch or batch
        buffers = PeerLogits(group, torch.device("cpu"))
        context = ExecutorContext(
            head=head,
            w1=head.w1.contiguous(),
            d2t=head.d2t,
            shape=WalkShape(vocab, head.markov_rank, how.world),
            shards=tuple(shards),
            shard=shard,
            group=group,
            device=HostDevice("cpu"),  # type: ignore[arg-type]
            max_batch=max_batch,
            max_gamma=gamma,
            rounding=problem.rounding,  # type: ignore[arg-type]
            deadline=Deadline(600.0, 600.0),
            peer_logits=buffers,
        )
        executor = EXECUTORS[how.plan](context)
        placed = getattr(executor, "_fallback", executor)._placement
        assert (placed.streamed_tiles > 0, placed.stream_slots > 0) == (how.streams != "", how.streams == "slots")
        checker = InputChecker(
            vocab, head.target_vocab_size, shard, max_batch, gamma, context.rounding, torch.device("cpu")
        )
        base, anchors = base_of(problem, how.base, shard), torch.tensor(problem.anchors)
        temperatures = torch.tensor(problem.temperatures) if sampled else None
        noise = noise_of(problem)
        num_valid = None if how.valid is None else torch.tensor(how.valid, dtype=torch.int32)
        columns = slice(None) if how.logits == "full" else slice(shard.start, shard.stop)
        stored = np.arange(batch) < valid
        if how.logits_rows == "sampled":
            stored &= sampled and problem.temperatures > 0
        logits = None
        if how.logits != "none":
            shape, dtype = (batch, gamma, checker.logits_width(how.logits)), checker.logits_dtype
            logits = buffers.make(shape, dtype) if how.logits == "full" else torch.empty(shape, dtype=dtype)
        for right in blocks:
            tokens, lse = torch.full((batch, gamma), UNTOUCHED), torch.full((batch, gamma), float(UNTOUCHED))
            if logits is not None:
                logits.fill_(UNTOUCHED)
            out = WalkOutput(tokens, logits, lse if how.lse else None)
            executor.walk(
                checker(base, anchors, temperatures, noise, how.logits, how.logits_rows, num_valid, out, how.lse)
            )
            assert_same(tokens[:valid], right.tokens[:valid])
            assert bool((tokens[valid:] == UNTOUCHED).all())
            if logits is not None:
                assert_same(logits[stored], right.logits[stored][..., columns])
                assert bool((logits[~stored] == UNTOUCHED).all())
            if how.lse:
                assert_log_sum_exp(lse[:valid], right.lse[:valid])
            assert bool((lse[valid if how.lse else 0 :] == UNTOUCHED).all())
        assert isinstance(noise.offset, torch.Tensor)
        # One offset serves the whole batch, and is advanced whatever is valid.
        advances = batch == 1 or np.arange(batch) < valid
        assert_same(noise.offset, problem.offsets + 2 * sampled * advances)

    ranks.each(walk)


@dataclass(frozen=True)
class Case:
    """A problem of the oracle's and how it is walked. equals: thousands of contests instead, see `among_equals`."""

    how: Walk
    vocab: int
    batch: int
    gamma: int = 3
    rounding: str = "engine"
    rank: int = 256
    draft: bool = False
    sampled: bool = True
    equals: bool = False

    def problem(self, seed: int) -> Problem:
        made = make_problem(
            seed,
            vocab=self.vocab,
            rank=self.rank,
            batch=self.batch,
            gamma=self.gamma,
            rounding=self.rounding,
            draft=self.draft,
            sampled=self.sampled,
            specials=not self.equals,
        )
        return among_equals(made, seed) if self.equals else made


def among_equals(problem: Problem, seed: int) -> Problem:
    """No bias and two base logits a step, divided by temperatures at most of which scores have few bits behind the
    point, and a product with 1 / T isn't the quotient: rounding, ids and the noise's last bits decide.
    """
    rng, shape = np.random.default_rng(seed), problem.base.shape
    kinds = np.array([3e-5, 7e-4, 0.02, 1e-7, 3e-3, np.inf, 30.0, 0.0], np.float32)
    base = rng.choice([3.0, 11.0, 77.0, 506.0], (*shape[:2], 1)) * rng.choice([1.0, 0.5], shape)
    return replace(
        problem,
        w2=np.zeros_like(problem.w2),
        base=base.astype(np.float32),
        temperatures=np.resize(np.roll(kinds, -seed), shape[0]),
    )


def tp(world: int, sms: int, shared_limit: int = HOPPER.shared_limit, **how: object) -> Walk:
    return Walk("tp_bf16", world, Gpu(sms, shared_limit), **how)  # type: ignore[arg-type]


def certified(world: int, sms: int, **how: object) -> Walk:
    return Walk("certified", world, Gpu(sms, HOPPER.shared_limit), **{"lse": False} | how)  # type: ignore[arg-type]


def int8(world: int, sms: int, shared_limit: int = HOPPER.shared_limit, plan: str = "int8", **how: object) -> Walk:
    return Walk(plan, world, Gpu(sms, shared_limit), **how)  # type: ignore[arg-type]


# Neighbours share libraries: what is compiled in is columns by batch, tiles in registers (by vocabulary, SMs and r),
# rounding, r, world, kind of logits, and whether temperatures are given.
CASES = {
    # One request posts, but on four ranks; up to four are narrow.
    "posts": Case(tp(2, 3), 595, 1, gamma=5),
    "posts-equals": Case(tp(2, 3), 595, 1, gamma=8, equals=True),
    "posts-none-valid": Case(tp(2, 3, valid=0), 595, 1),
    "posts-unaligned": Case(tp(2, 3, base="sharded", logits="local", max_batch=64), 599, 1),
    "single-of-four-ranks": Case(tp(4, 2), 595, 1, gamma=4),
    "narrow": Case(tp(2, 3, base="aligned"), 640, 3, draft=True),
    "narrow-equals": Case(tp(2, 3, base="sharded"), 701, 4, gamma=4, equals=True),
    "narrow-empty-shard": Case(tp(2, 3, shards=(Shard(0, 0), Shard(0, 331))), 331, 2),
    "narrow-uneven-shards": Case(tp(2, 3, shards=(Shard(0, 404), Shard(404, 417)), base="sharded"), 417, 4),
    "narrow-one-id": Case(tp(2, 3), 1, 2),
    "narrow-none-valid": Case(tp(2, 3, valid=0), 200, 4),
    # Up to eight.
    "wide": Case(tp(2, 2), 1003, 5, draft=True),
    "wide-equals": Case(tp(2, 2, base="aligned"), 1024, 8, gamma=12, equals=True),
    "wide-sampled-rows": Case(tp(2, 2, logits_rows="sampled", valid=6), 1003, 8),
    # Two groups of columns, and groups of requests.
    "two-groups": Case(tp(2, 2), 595, 16, rounding="once", draft=True),
    "two-groups-equals": Case(tp(2, 3), 701, 11, rounding="once", equals=True),
    "three-passes": Case(tp(2, 3, max_batch=64, valid=35, logits_rows="sampled"), 203, 37, rounding="once"),
    "four-passes": Case(tp(2, 2, max_batch=64), 203, 50, rounding="once", gamma=2),
    # Sampled, pairs of tiles and groups take turns, and each of half of the warps has a tile without a partner.
    "turns": Case(tp(2, 1, base="aligned"), 1140, 19),
    "turns-equals": Case(tp(2, 1), 1140, 11, equals=True),
    # No pair in shared memory; a pair in that of all warps but one; two pairs.
    "turns-few-tiles": Case(tp(1, 1, logits="local"), 282, 9),
    "turns-uneven": Case(tp(1, 1, logits="none", lse=False), 490, 12),
    "turns-many-tiles": Case(tp(1, 1, 420_000, logits="local"), 832, 16, gamma=2),
    # Tiles that are streamed behind tiles without a partner, and that are such a tile's partner.
    "turns-loaded": Case(tp(1, 1, 195_000, streams="loads", logits="local"), 640, 10),
    "turns-streamed": Case(tp(1, 1, 150_000, streams="slots", logits="none", lse=False), 640, 9),
    "turns-streamed-equals": Case(tp(1, 1, streams="slots", logits="local"), 940, 16, equals=True),
    # CTAs with few rows, or none; fp32 logits.
    "turns-uneven-shards": Case(
        tp(2, 2, shards=(Shard(0, 1100), Shard(1100, 1117)), base="sharded"), 1117, 12, gamma=2
    ),
    "turns-empty-shard": Case(tp(2, 2, shards=(Shard(0, 0), Shard(0, 1100))), 1100, 17, gamma=2, equals=True),
    "turns-fp32": Case(tp(1, 1, logits="local"), 490, 12, rounding="none", gamma=2),
    # fp32 logits: keys are exact.
    "fp32": Case(tp(1, 2, logits="local"), 595, 3, rounding="none", draft=True),
    "fp32-equals": Case(tp(1, 2, logits="local"), 595, 4, gamma=16, rounding="none", equals=True),
    "fp32-greedy-narrow": Case(
        tp(1, 1, 70_000, streams="loads", logits="local", max_batch=8), 1003, 7, rounding="none", sampled=False
    ),
    "fp32-greedy": Case(tp(2, 2, logits="none", lse=False), 1100, 2, rounding="none", sampled=False),
    # Tokens alone.
    "greedy": Case(tp(1, 2, logits="none", lse=False), 1003, 9, sampled=False),
    "greedy-passes": Case(tp(1, 2, logits="none", lse=False, base="aligned"), 1024, 40, gamma=2, sampled=False),
    "greedy-four-passes": Case(tp(2, 2, logits="none", lse=False), 1003, 64, sampled=False),
    "tokens-streamed": Case(tp(1, 1, 52_000 + SLOTS, streams="slots", logits="none", lse=False), 1003, 3),
    "tokens-loaded": Case(tp(1, 1, 52_000, streams="loads", logits="none", lse=False), 1003, 3),
    # More CTAs than a warp has lanes.
    "many-ctas": Case(tp(1, 33, logits="none"), 520, 3, gamma=2, rounding="once", equals=True),
    # Half as many tiles in registers.
    "r512": Case(tp(2, 2, logits="local"), 700, 3, rank=512, rounding="once", sampled=False),
    "r512-streamed": Case(tp(1, 1, 150_000 + SLOTS, streams="slots", logits="local"), 500, 12, rank=512, gamma=2),
    # int8: one request, whose pairs of tiles are shared out over the columns (a tile alone, three pairs and one, four,
    # five and streamed ones), four requests, eight in two groups of columns.
    "int8-tile": Case(int8(1, 2, logits="local"), 150, 1, equals=True),
    "int8-one": Case(int8(1, 1, logits="local", base="aligned"), 910, 1, gamma=4, draft=True),
    "int8-one-equals": Case(int8(1, 1, logits="local"), 1003, 1, gamma=16, equals=True),
    "int8-one-tokens": Case(int8(1, 1, logits="none", lse=False), 1280, 1, sampled=False),
    "int8-one-streamed": Case(int8(1, 1, 75_000 + SLOTS, streams="slots", logits="local"), 1403, 1, rounding="once"),
    "int8-one-streamed-greedy": Case(
        int8(1, 1, 75_000 + SLOTS, streams="slots", logits="local"), 1403, 1, gamma=6, rounding="once", sampled=False
    ),
    "int8-one-loaded": Case(int8(1, 1, 75_000, streams="loads", logits="local"), 1403, 1, gamma=2),
    "int8-one-fp32": Case(int8(1, 1, logits="local"), 1003, 1, rounding="none"),
    "int8": Case(int8(1, 1, logits="local"), 1003, 4, draft=True),
    "int8-equals": Case(int8(1, 1, logits="local"), 1003, 4, gamma=16, equals=True),
    "int8-two-groups": Case(int8(1, 3, logits="local", base="aligned"), 640, 8, rounding="once"),
    "int8-passes": Case(int8(1, 3, logits="local", valid=19), 601, 21, rounding="once", gamma=2),
    # Greedy, by warpgroups: with a tile without a partner, and with more passes than buffers.
    "int8-greedy": Case(int8(1, 1, logits="local", base="aligned"), 1140, 7, sampled=False),
    "int8-greedy-passes": Case(int8(1, 1, logits="none", lse=False, valid=30), 1003, 33, draft=True, sampled=False),
    "int8-greedy-streamed": Case(
        int8(1, 1, 83_000 + SLOTS, streams="slots", logits="none", lse=False), 1403, 8, gamma=2, sampled=False
    ),
    "greedy-streamed": Case(
        tp(1, 1, 72_000 + SLOTS, streams="slots", logits="none", lse=False), 1003, 16, sampled=False
    ),
    "int8-spread": Case(int8(2, 2, base="sharded"), 417, 3, draft=True),
    "int8-whole-rows": Case(int8(2, 2, logits="local", logits_rows="sampled"), 417, 4),
    "split": Case(int8(2, 2, plan="int8_split", base="sharded"), 417, 7),
    "split-whole-rows": Case(int8(2, 2, plan="int8_split", logits="none", valid=3), 417, 5),
    "split-one-request": Case(int8(2, 2, plan="int8_split", logits="local"), 417, 1),
    # Tokens by two launches; with logits, the dense walk.
    "certified": Case(certified(2, 3, logits="none"), 595, 3),
    "certified-once": Case(certified(2, 2, base="aligned", logits="none"), 1024, 1, gamma=11, rounding="once"),
    "certified-fp32": Case(certified(2, 2, logits="none"), 331, 2, gamma=4, rounding="none"),
    "certified-r512": Case(certified(1, 3, logits="none"), 700, 2, rank=512),
    "certified-empty-shard": Case(certified(2, 3, logits="none", shards=(Shard(0, 0), Shard(0, 331))), 331, 2, gamma=2),
    "certified-logits": Case(certified(2, 3, base="sharded", logits="local"), 599, 2, gamma=5, draft=True),
    "certified-lse": Case(certified(2, 3, logits="local", lse=True), 203, 2),
    "int8-r512": Case(int8(1, 2, 31_000, streams="loads", logits="none", lse=False), 600, 2, rank=512),
}


@pytest.mark.parametrize("name", CASES)
def test_walks_are_the_oracles(name: str, folder: Path) -> None:
    """Whether each row has a key and an offset of its own, or all the same, or all one key."""
    case = CASES[name]
    for seed in range(2 if case.batch <= 8 else 3):
        problem = case.problem(seed)
        if seed > 0:
            keys, offsets = np.full_like(problem.keys, problem.keys[0]), np.full_like(problem.offsets, 1 << 33)
            problem = replace(problem, keys=keys, offsets=offsets if seed == 1 else problem.offsets)
        check(problem, case.how, folder)

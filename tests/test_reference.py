"""The reference plans against a second opinion, at several world sizes, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from agreement import check_problem, head_of, noise_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_problem, solve

import tp_walk
from tp_walk.reference import add_bias, key_id, walk_key
from tp_walk.shard import shard_bounds

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 90),
    rank=st.integers(1, 24),
    batch=st.integers(1, 4),
    gamma=st.integers(1, 4),
    rounding=st.sampled_from(["engine", "once", "none"]),
    draft=st.booleans(),
    sampled=st.booleans(),
    specials=st.booleans(),
    int8=st.booleans(),
)
def test_agrees_with_the_float64_oracle(
    seed: int,
    vocab: int,
    rank: int,
    batch: int,
    gamma: int,
    rounding: str,
    draft: bool,
    sampled: bool,
    specials: bool,
    int8: bool,
) -> None:
    problem = make_problem(
        seed,
        vocab=vocab,
        rank=rank,
        batch=batch,
        gamma=gamma,
        rounding=rounding,
        draft=draft,
        sampled=sampled,
        specials=specials,
    )
    check_problem(problem, "reference_int8" if int8 else "reference")


def check_seeds(seeds: range, layout: str) -> int:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        problem = make_problem(
            seed,
            # Up to five shards' worth of 64 ids; small ones leave ranks without any.
            vocab=int(rng.integers(1, 330)),
            rank=int(rng.integers(1, 24)),
            batch=int(rng.integers(1, 4)),
            gamma=int(rng.integers(1, 4)),
            rounding=str(rng.choice(["engine", "once", "none"])),
            draft=bool(rng.integers(2)),
            sampled=bool(rng.integers(2)),
            specials=bool(rng.integers(2)),
        )
        check_problem(problem, str(rng.choice(["reference", "reference_int8"])), layout=layout)
    return len(seeds)


@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_agrees_with_the_oracle(world: int, layout: str, rank_pool) -> None:
    assert rank_pool(world)(check_seeds, range(12), layout) == [12] * world


class RecordingHead(tp_walk.MarkovHead):
    """Remembers which rows of W2 were asked for."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__(*weights)
        self.asked: set[int] = set()

    def w2_rows(self, start: int, stop: int) -> torch.Tensor:
        self.asked.update(range(start, stop))
        return super().w2_rows(start, stop)


def rows_asked_for(plan: str) -> tuple[set[int], range]:
    head = RecordingHead(torch.ones(200, 8).bfloat16(), torch.ones(200, 8).bfloat16())
    with tp_walk.WalkRuntime(head, group=dist.group.WORLD, device=CPU, plans=[plan]) as runtime:
        base = torch.zeros(2, 3, 200).bfloat16()
        runtime.walk(base, torch.tensor([0, 1]), plan=plan, logits="full", lse=True)
        return head.asked, range(runtime.shard.start, runtime.shard.stop)


@pytest.mark.parametrize("plan", ["reference", "reference_int8"])
def test_a_rank_touches_no_row_outside_its_slice(plan: str, rank_pool) -> None:
    slices = rank_pool(3)(rows_asked_for, plan)
    for asked, owned in slices:
        assert asked == set(owned)
    assert [len(asked) for asked, _ in slices] == [shard.width for shard in shard_bounds(200, 3)]


def walk_on_own_shards() -> list[list[int]]:
    problem = make_problem(5, vocab=150, rank=16, batch=2, gamma=4, sampled=True, specials=True)
    shard = [(0, 148), (148, 148), (148, 150)][dist.get_rank()]
    with tp_walk.WalkRuntime(head_of(problem), group=dist.group.WORLD, device=CPU, shard=shard) as runtime:
        assert (runtime.shard.start, runtime.shard.stop) == shard
        base = torch.tensor(problem.base).bfloat16()[..., shard[0] : shard[1]].contiguous()
        out = runtime.walk(base, torch.tensor(problem.anchors), torch.tensor(problem.temperatures), noise_of(problem))
        return out.tokens.tolist()


def test_an_engines_uneven_and_empty_shards(rank_pool) -> None:
    problem = make_problem(5, vocab=150, rank=16, batch=2, gamma=4, sampled=True, specials=True)
    assert rank_pool(3)(walk_on_own_shards) == [solve(problem).tokens.tolist()] * 3


def walk_without_a_valid_row() -> tuple[list[list[int]], int]:
    problem = make_problem(5, vocab=150, rank=16, batch=2, gamma=4, sampled=True)
    with tp_walk.WalkRuntime(head_of(problem), group=dist.group.WORLD, device=CPU) as runtime:
        base, anchors = torch.tensor(problem.base).bfloat16(), torch.tensor(problem.anchors)
        counter = torch.tensor([40])
        temperatures, noise = torch.tensor(problem.temperatures), tp_walk.Noise(1, counter)
        none = torch.tensor(0, dtype=torch.int32)
        return runtime.walk(base, anchors, temperatures, noise, num_valid=none).tokens.tolist(), int(counter)


def test_no_valid_row_on_several_ranks(rank_pool) -> None:
    assert rank_pool(3)(walk_without_a_valid_row) == [([[0] * 4] * 2, 41)] * 3


class TestOneRank:
    """What a walk writes, and what it leaves alone."""

    problem = make_problem(11, vocab=70, rank=8, batch=4, gamma=3, sampled=True)
    mixed = torch.tensor([0.0, 100.0, float("nan"), 200.0])  # flat enough that other noise gives other tokens

    def walk(self, **arguments) -> tp_walk.WalkOutput:
        with tp_walk.WalkRuntime(head_of(self.problem), device=CPU) as runtime:
            base, anchors = torch.tensor(self.problem.base).bfloat16(), torch.tensor(self.problem.anchors)
            arguments = {"temperatures": self.mixed, "noise": noise_of(self.problem), **arguments}
            return runtime.walk(base, anchors, **arguments)

    def test_rows_from_num_valid_on_are_inert(self) -> None:
        whole = self.walk(logits="full", lse=True)
        out = tp_walk.WalkOutput(
            torch.full((4, 3), -7), torch.full((4, 3, 70), 5.0).bfloat16(), torch.full((4, 3), 5.0)
        )
        noise = noise_of(self.problem)
        self.walk(noise=noise, logits="full", lse=True, num_valid=torch.tensor(2, dtype=torch.int32), out=out)
        for got, right in zip(out[:3], whole[:3], strict=True):
            assert torch.equal(got[:2], right[:2])
            assert (got[2:] == (-7 if got is out.tokens else 5.0)).all()
        assert (noise.offset - torch.tensor(self.problem.offsets)).tolist() == [1, 1, 0, 0]

    def test_no_valid_row_at_all(self) -> None:
        counter = torch.tensor([40])
        noise = tp_walk.Noise(1, counter)
        out = self.walk(noise=noise, num_valid=torch.tensor([0], dtype=torch.int32), logits="full", lse=True)
        assert out.tokens.eq(0).all()  # buffers that the walk made hold ids even in rows that it leaves alone
        assert counter.item() == 41

    def test_an_inert_row_may_hold_anything(self) -> None:
        anchors = torch.tensor([1, 2, -5, 10**9])
        with tp_walk.WalkRuntime(head_of(self.problem), device=CPU) as runtime:
            base = torch.tensor(self.problem.base).bfloat16()
            valid = torch.tensor(2, dtype=torch.int32)
            out = runtime.walk(base, anchors, num_valid=valid)
            assert torch.equal(out.tokens[:2], runtime.walk(base[:2], anchors[:2]).tokens)

    def test_logits_of_sampled_rows_only(self) -> None:
        whole = self.walk(logits="full")
        out = tp_walk.WalkOutput(torch.empty(4, 3, dtype=torch.int64), torch.full((4, 3, 70), 5.0).bfloat16())
        self.walk(logits="full", logits_rows="sampled", out=out)
        assert torch.equal(out.tokens, whole.tokens)
        assert torch.equal(out.logits[[1, 3]], whole.logits[[1, 3]])
        assert (out.logits[[0, 2]] == 5.0).all()
        out.logits.fill_(5.0)
        self.walk(temperatures=None, logits="full", logits_rows="sampled", out=out)
        assert (out.logits == 5.0).all()

    def test_a_draw_depends_on_neither_slot_nor_neighbours(self) -> None:
        rows = torch.tensor([90, 91, 92, 93])
        whole = self.walk(noise=tp_walk.Noise(3, 8, rows)).tokens
        order = torch.tensor([3, 1])
        with tp_walk.WalkRuntime(head_of(self.problem), device=CPU) as runtime:
            base, anchors = torch.tensor(self.problem.base).bfloat16(), torch.tensor(self.problem.anchors)
            noise = tp_walk.Noise(3, 8, rows[order])
            part = runtime.walk(base[order], anchors[order], self.mixed[order], noise).tokens
        assert torch.equal(part, whole[order])

    def test_offsets_count_modulo_2_to_the_32(self) -> None:
        low, high = (self.walk(noise=tp_walk.Noise(3, offset)).tokens for offset in (9, 9 + 2**32))
        other = self.walk(noise=tp_walk.Noise(3, 10)).tokens
        assert torch.equal(low, high)
        assert not torch.equal(low, other)

    def test_keys_use_all_64_bits(self) -> None:
        key = 0xFEDCBA9876543210
        as_int = self.walk(noise=tp_walk.Noise(key, 1)).tokens
        as_tensor = self.walk(noise=tp_walk.Noise(torch.tensor([key - 2**64]), torch.tensor([1]))).tokens
        other = self.walk(noise=tp_walk.Noise(key & 0xFFFFFFFF, 1)).tokens
        assert torch.equal(as_int, as_tensor)
        assert not torch.equal(as_int, other)

    def test_an_int_offset_is_literal_and_a_tensor_advances(self) -> None:
        counter = torch.tensor([5])
        noise = tp_walk.Noise(2, counter)
        drawn = [self.walk(noise=noise).tokens for _ in range(3)]
        assert counter.item() == 8
        for offset, tokens in enumerate(drawn, start=5):
            assert torch.equal(tokens, self.walk(noise=tp_walk.Noise(2, offset)).tokens)
        self.walk(noise=noise, temperatures=torch.zeros(4))
        assert counter.item() == 9
        self.walk(noise=noise, temperatures=None)
        assert counter.item() == 9


def test_keys_order_scores_and_break_ties_by_the_smallest_id() -> None:
    inf, nan = float("inf"), float("nan")
    falling = [nan, inf, 3.0e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -3.0e38, -inf]
    keys = walk_key(torch.tensor(falling), torch.zeros(len(falling), dtype=torch.int64))
    assert keys.tolist() == sorted(keys.tolist(), reverse=True)
    assert len(set(keys.tolist())) == len(falling)
    ids = torch.tensor([0, 1, 262143, 2**32 - 1])
    same = walk_key(torch.full((4,), -2.5), ids)
    assert same.tolist() == sorted(same.tolist(), reverse=True)
    assert torch.equal(key_id(same), ids)
    bits = torch.tensor([0x7FC00000, -0x00400000, 0, -0x80000000], dtype=torch.int32).view(torch.float32)
    plus_nan, minus_nan, plus_zero, minus_zero = walk_key(bits, torch.zeros(4, dtype=torch.int64)).tolist()
    assert plus_nan == minus_nan
    assert plus_zero == minus_zero


def test_roundings_differ_where_they_should() -> None:
    base, bias = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-8 + 2.0**-17])
    assert add_bias(base, bias, "once").item() == 1.0 + 2.0**-7  # above the tie between 1 and 1 + 2^-7
    assert add_bias(base, bias, "engine").item() == 1.0  # the bias lost its last bit, and the tie went to even
    none = add_bias(base, bias, "none")
    assert none.dtype == torch.float32
    assert none.item() == 1.0 + 2.0**-8


def test_int8_refuses_weights_that_are_not_finite() -> None:
    bad = torch.ones(64, 4).bfloat16()
    bad[5, 1] = float("inf")
    good = torch.ones(64, 4).bfloat16()
    for name, head in (("W1", tp_walk.MarkovHead(bad, good)), ("W2", tp_walk.MarkovHead(good, bad))):
        with pytest.raises(tp_walk.PlanUnavailableError, match=f"{name} has infinities"):
            tp_walk.WalkRuntime(head, device=CPU, plans=["reference_int8"])


def test_int8_refuses_a_rank_whose_sums_may_overflow() -> None:
    weights = torch.ones(8, 513).bfloat16()
    with pytest.raises(tp_walk.PlanUnavailableError, match=r"markov_rank <= 512.*513"):
        tp_walk.WalkRuntime(tp_walk.MarkovHead(weights, weights), device=CPU, plans=["reference_int8"])

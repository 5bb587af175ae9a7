"""WalkRuntime's life, its choice of plan, and what it refuses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, outcome

import tp_walk
from tp_walk import Deadline, MarkovHead, Noise, Plan, WalkOutput, WalkRuntime
from tp_walk.plan import EXECUTORS, PLAN_NAMES

V, R, BATCH, GAMMA = 100, 8, 3, 4


def make_head(seed: int = 0, vocab: int = V) -> MarkovHead:
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(vocab, R, generator=generator).bfloat16() for _ in range(2))
    return MarkovHead(w1, w2)


def make_base(batch: int = BATCH, gamma: int = GAMMA, width: int = V) -> torch.Tensor:
    return torch.randn(batch, gamma, width, generator=torch.Generator().manual_seed(1)).bfloat16()


ANCHORS = torch.tensor([5, 6, 7])


@pytest.fixture
def runtime():
    with WalkRuntime(make_head(), max_batch=4, max_gamma=6, device="cpu") as made:
        yield made


class TestArguments:
    """Every bad argument is a WalkInputError that names it and its value."""

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ({"base_logits": make_base(5)}, "the batch is 5; .*max_batch=4"),
            ({"base_logits": make_base(gamma=7)}, r"gamma is 7; it must be in 1\.\.6"),
            ({"base_logits": make_base(gamma=0)}, r"gamma is 0; it must be in 1\.\.6"),
            ({"base_logits": make_base(width=99)}, "99 columns; this rank's shard has 100, the vocabulary 100"),
            (
                {"base_logits": make_base()[0]},
                r"base_logits is a tensor \[4, 100\] bfloat16 on cpu; it must be a tensor",
            ),
            ({"base_logits": make_base().float()}, "base_logits is .* float32 .*; it must be bfloat16 with this"),
            ({"base_logits": make_base().to("meta")}, "base_logits is .* on meta; it must be on cpu"),
            ({"base_logits": make_base(width=200)[..., ::2]}, r"strides \(800, 200, 2\); the last must be 1"),
            ({"base_logits": None}, "base_logits is None"),
            (
                {"anchors": ANCHORS[:2]},
                r"anchors is a tensor \[2\] int64 on cpu; it must be a tensor \[3\] int64 or int32",
            ),
            ({"anchors": ANCHORS.float()}, r"anchors is a tensor \[3\] float32"),
            ({"anchors": ANCHORS.to("meta")}, "anchors is .* on meta; it must be .* on cpu"),
            ({"anchors": torch.tensor([5, 100, 7])}, r"an anchor is 100; ids lie in \[0, 100\)"),
            ({"anchors": torch.tensor([5, 6, -1])}, "an anchor is -1"),
            ({"anchors": [5, 6, 7]}, r"anchors is \[5, 6, 7\]"),
            ({"temperatures": torch.ones(2)}, r"temperatures is a tensor \[2\] float32 on cpu"),
            ({"temperatures": torch.ones(3).double()}, r"temperatures is a tensor \[3\] float64"),
            ({"temperatures": torch.ones(6)[::2]}, r"temperatures is .* with strides \(2,\); it must be a contiguous"),
            ({"temperatures": 1.0}, r"temperatures is 1\.0; it must be a contiguous tensor \[3\] float32"),
            (
                {"temperatures": torch.ones(3), "noise": None},
                "noise is None; it must be tp_walk.Noise.*temperatures are given",
            ),
            ({"noise": Noise("key", 0)}, "noise.key is 'key'; it must be an int or an int64 tensor"),
            ({"noise": Noise(2**64, 0)}, "noise.key is 18446744073709551616; it must fit in 64 bits"),
            ({"noise": Noise(0, -(2**63) - 1)}, "noise.offset is -9223372036854775809"),
            ({"noise": Noise(0, torch.tensor([1, 2]))}, r"noise.offset is a tensor \[2\] int64"),
            ({"noise": Noise(0, torch.tensor([1], dtype=torch.int32))}, r"noise.offset is a tensor \[1\] int32"),
            ({"noise": Noise(0, 0, torch.tensor([1, 2]))}, r"noise.rows is a tensor \[2\] int64 .* \[3\] int64"),
            ({"num_valid": 2}, "num_valid is 2; it must be a contiguous tensor"),
            ({"num_valid": torch.tensor(2)}, r"num_valid is a tensor \[\] int64"),
            ({"num_valid": torch.tensor(4, dtype=torch.int32)}, r"num_valid is 4; it must be in 0\.\.3"),
            ({"num_valid": torch.tensor(-1, dtype=torch.int32)}, "num_valid is -1"),
            ({"logits": "some"}, "logits is 'some'; it must be one of none, local, full"),
            ({"logits_rows": "few"}, "logits_rows is 'few'; it must be one of all, sampled"),
            ({"plan": "fastest"}, "plan is 'fastest'; it must be a Plan, None or one of tp_bf16, "),
            ({"out": WalkOutput(torch.zeros(3, 4))}, r"out.tokens is a tensor \[3, 4\] float32"),
            ({"out": WalkOutput(torch.zeros(4, 3, dtype=torch.int64).T)}, "out.tokens is .* with strides"),
            (
                {"out": WalkOutput(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(1))},
                'out.logits .* None with logits="none"',
            ),
            (
                {"out": WalkOutput(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, V)), "logits": "full"},
                r"out.logits is a tensor \[3, 4, 100\] float32 on cpu; it must be .* bfloat16",
            ),
            (
                {"out": WalkOutput(torch.zeros(3, 4, dtype=torch.int64), lse=torch.zeros(3, 4))},
                "out.lse .* without lse=True",
            ),
        ],
    )
    def test_refused(self, runtime: WalkRuntime, arguments: dict[str, Any], why: str) -> None:
        given = {"base_logits": make_base(), "anchors": ANCHORS, **arguments}
        if "noise" in given and given["noise"] is not None:
            given["temperatures"] = torch.ones(3)
        with pytest.raises(tp_walk.WalkInputError, match=why):
            runtime.walk(**given)
        assert runtime.stats()["walks"] == {}

    def test_float32_base_logits_with_rounding_none(self) -> None:
        with WalkRuntime(make_head(), rounding="none", device="cpu") as runtime:
            for base in (make_base(), make_base().float()):
                out = runtime.walk(base, ANCHORS, logits="full")
                assert out.logits.dtype == torch.float32

    def test_an_empty_batch_is_a_walk_of_nobody(self, runtime: WalkRuntime) -> None:
        out = runtime.walk(make_base(0), ANCHORS[:0], torch.ones(0), Noise(0, 0), logits="full", lse=True)
        assert out.tokens.shape == (0, GAMMA)
        assert out.logits.shape == (0, GAMMA, V)
        assert out.lse.shape == (0, GAMMA)

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ({"max_batch": 0}, "max_batch is 0"),
            ({"max_gamma": 65}, r"max_gamma is 65; it must be in 1\.\.64"),
            ({"rounding": "up"}, "rounding is 'up'; it must be one of engine, once, none"),
            ({"plans": ["fast"]}, "plans names 'fast'"),
            ({"shard": (0, 96)}, "the shards end at 96"),
            ({"device": "meta"}, "device is meta; it must be a CUDA device or the CPU"),
        ],
    )
    def test_a_runtime_that_cannot_be(self, arguments: dict[str, Any], why: str) -> None:
        with pytest.raises(tp_walk.WalkInputError, match=why):
            WalkRuntime(make_head(), **{"device": "cpu", **arguments})

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_deadlines_are_positive(self, seconds: float) -> None:
        with pytest.raises(tp_walk.WalkInputError, match="deadline steady_s is"):
            Deadline(steady_s=seconds)


class TestOutputs:
    def test_the_callers_buffers_are_written(self, runtime: WalkRuntime) -> None:
        fresh = runtime.walk(make_base(), ANCHORS, logits="local", lse=True)
        out = WalkOutput(
            torch.empty(BATCH, GAMMA, dtype=torch.int64),
            runtime.logits_buffer(BATCH, GAMMA, "local"),
            torch.empty(BATCH, GAMMA),
        )
        written = runtime.walk(make_base(), ANCHORS, logits="local", lse=True, out=out)
        for name in ("tokens", "logits", "lse"):
            assert getattr(written, name) is getattr(out, name)
            assert torch.equal(getattr(out, name), getattr(fresh, name))

    def test_buffers_that_are_missing_are_made(self, runtime: WalkRuntime) -> None:
        tokens = torch.empty(BATCH, GAMMA, dtype=torch.int64)
        out = runtime.walk(make_base(), ANCHORS, logits="full", out=WalkOutput(tokens))
        assert out.tokens is tokens
        assert out.logits.shape == (BATCH, GAMMA, V)
        assert out.lse is None

    def test_logits_buffers_have_the_modes_width(self) -> None:
        with WalkRuntime(make_head(), max_batch=4, max_gamma=6, rounding="none", device="cpu") as runtime:
            assert runtime.logits_buffer().shape == (4, 6, V)
            assert runtime.logits_buffer(2, 3, "local").dtype == torch.float32
            with pytest.raises(tp_walk.WalkInputError, match="logits is 'none'"):
                runtime.logits_buffer(logits="none")


class TestPlans:
    def test_without_a_gpu_the_reference_serves(self, runtime: WalkRuntime) -> None:
        plan = runtime.auto_select(3, gamma=4, sampled=True)
        assert plan.name == "reference"
        assert "nothing measured" in plan.provenance
        assert runtime.walk(make_base(), ANCHORS).plan == plan
        with pytest.raises(tp_walk.WalkInputError, match="the batch is 5"):
            runtime.auto_select(5)
        with pytest.raises(tp_walk.WalkInputError, match="gamma is 7"):
            runtime.auto_select(1, gamma=7)

    def test_a_plan_by_name_or_as_a_plan(self, runtime: WalkRuntime) -> None:
        assert runtime.walk(make_base(), ANCHORS, plan="reference_int8").plan.name == "reference_int8"
        chosen = Plan("reference", 12.0, "reference_int8", 1.5, "measured somewhere")
        assert runtime.walk(make_base(), ANCHORS, plan=chosen).plan is chosen
        assert runtime.stats()["walks"] == {"reference_int8": 1, "reference": 1}

    def test_every_plan_has_an_executor(self) -> None:
        assert set(EXECUTORS) == set(PLAN_NAMES)

    def test_a_plan_that_is_not_held_says_why(self) -> None:
        why = "plan int8_split isn't held: not among this runtime's plans="
        with (
            WalkRuntime(make_head(), device="cpu", plans=["reference"]) as runtime,
            pytest.raises(tp_walk.PlanUnavailableError, match=why),
        ):
            runtime.walk(make_base(), ANCHORS, plan="int8_split")

    def test_memory_is_taken_by_plans_held(self) -> None:
        with WalkRuntime(make_head(), device="cpu", plans=["reference_int8"]) as runtime:
            assert runtime.memory_bytes("reference") == 0
            assert runtime.memory_bytes(Plan("reference_int8")) == V * R * 4 + V * 4
            assert runtime.auto_select(1).name == "reference_int8"
            runtime.walk(make_base(), ANCHORS, plan="reference")
            assert runtime.memory_bytes("reference") == V * R * 4
            assert runtime.auto_select(1).name == "reference_int8"
            assert runtime.stats()["memory_bytes"].keys() == {"reference", "reference_int8"}
            with pytest.raises(tp_walk.WalkInputError, match="plan is 'best'"):
                runtime.memory_bytes("best")

    def test_the_environment_forces_a_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TP_WALK_PLAN", "reference_int8")
        with WalkRuntime(make_head(), device="cpu", plans=["reference"]) as runtime:
            assert runtime.walk(make_base(), ANCHORS, plan="reference").plan.name == "reference_int8"
            assert runtime.auto_select(1) == Plan("reference_int8", provenance="forced by TP_WALK_PLAN")
        monkeypatch.setenv("TP_WALK_PLAN", "warp")
        with pytest.raises(tp_walk.WalkInputError, match="TP_WALK_PLAN names 'warp'"):
            WalkRuntime(make_head(), device="cpu")

    def test_a_kill_switch_does_not_need_what_it_switches_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TP_WALK_PLAN", "reference")
        monkeypatch.setitem(EXECUTORS, "tp_bf16", lambda context: 1 / 0)
        for plans in (None, ["tp_bf16"]):
            with WalkRuntime(make_head(), device="cpu", plans=plans) as runtime:
                assert runtime.walk(make_base(), ANCHORS, plan="tp_bf16").plan.name == "reference"

    def test_explain_accounts_for_every_plan(self, runtime: WalkRuntime) -> None:
        lines = runtime.explain(2).splitlines()
        assert lines[0].startswith("batch 2: reference (nothing measured")
        told = {line.split(":")[0].strip(): line for line in lines[1:]}
        assert told.keys() == set(tp_walk.plan.PLAN_NAMES)
        assert "held" in told["reference"]
        assert "takes its memory at its first walk" in told["reference_int8"]

    def test_a_factory_that_fails_is_told_and_the_others_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(context: object) -> None:
            raise tp_walk.PlanUnavailableError("the link is down")

        def fail(context: object) -> None:
            raise OSError("no such device")

        monkeypatch.setitem(EXECUTORS, "tp_bf16", refuse)
        with WalkRuntime(make_head(), device="cpu") as runtime:
            assert runtime.auto_select(1).name == "reference"
            assert "tp_bf16: the link is down" in runtime.explain(1)
        with pytest.raises(tp_walk.PlanUnavailableError, match="the link is down"):
            WalkRuntime(make_head(), device="cpu", plans=["reference", "tp_bf16"])
        monkeypatch.setitem(EXECUTORS, "tp_bf16", fail)
        with pytest.raises(
            tp_walk.SetupError, match="set-up of plan tp_bf16 failed on rank 0: OSError: no such device"
        ):
            WalkRuntime(make_head(), device="cpu")

    def test_the_modules_auto_select_asks_the_one_open_runtime(self) -> None:
        gc.collect()
        with pytest.raises(tp_walk.PlanUnavailableError, match="no WalkRuntime is open"):
            tp_walk.auto_select(1)
        with WalkRuntime(make_head(), device="cpu") as first:
            assert tp_walk.auto_select(2, gamma=3) == first.auto_select(2, gamma=3)
            with (
                WalkRuntime(make_head(), device="cpu"),
                pytest.raises(tp_walk.PlanUnavailableError, match="2 runtimes are open"),
            ):
                tp_walk.auto_select(1)
        with pytest.raises(tp_walk.PlanUnavailableError, match="no WalkRuntime is open"):
            tp_walk.auto_select(1)


class TestLife:
    def test_a_closed_runtime_refuses_everything(self) -> None:
        runtime = WalkRuntime(make_head(), device="cpu")
        runtime.close()
        runtime.close()
        calls = [
            lambda: runtime.walk(make_base(), ANCHORS),
            runtime.check,
            runtime.reset,
            lambda: runtime.reload(make_head()),
        ]
        for call in calls:
            with pytest.raises(tp_walk.RuntimeClosedError):
                call()

    def test_close_frees_each_executor_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[str] = []

        class Executor:
            def memory_bytes(self) -> int:
                return 0

            def close(self) -> None:
                closed.append("tp_bf16")

        monkeypatch.setitem(EXECUTORS, "tp_bf16", lambda context: Executor())
        runtime = WalkRuntime(make_head(), device="cpu")
        runtime.close()
        runtime.close()
        assert closed == ["tp_bf16"]
        dropped = WalkRuntime(make_head(), device="cpu")
        del dropped
        gc.collect()
        assert closed == ["tp_bf16"]  # a runtime that is merely dropped calls no peer
        monkeypatch.setitem(EXECUTORS, "int8", lambda context: 1 / 0)
        with pytest.raises(tp_walk.SetupError, match="ZeroDivisionError"):
            WalkRuntime(make_head(), device="cpu")
        assert closed == ["tp_bf16"] * 2  # what was taken before the failure is freed

    @pytest.mark.parametrize("plan", ["reference", "reference_int8"])
    def test_reload_takes_another_heads_weights(self, plan: str) -> None:
        old, new = make_head(), make_head(9)
        with WalkRuntime(old, device="cpu") as runtime, WalkRuntime(new, device="cpu") as other:
            before = runtime.walk(make_base(), ANCHORS, plan=plan, logits="full").logits
            runtime.reload(new)
            after = runtime.walk(make_base(), ANCHORS, plan=plan, logits="full").logits
            assert torch.equal(after, other.walk(make_base(), ANCHORS, plan=plan, logits="full").logits)
            assert not torch.equal(after, before)
        assert torch.equal(old.w1, make_head().w1)  # the caller's tensors are the caller's

    def test_reload_refuses_other_shapes(self, runtime: WalkRuntime) -> None:
        with pytest.raises(tp_walk.WalkInputError, match="new head's vocab_size is 104, the old one's 100"):
            runtime.reload(make_head(vocab=104))
        mapped = MarkovHead(make_head().w1, make_head().w2_rows(0, V), torch.arange(V))
        with pytest.raises(tp_walk.WalkInputError, match="one head has a d2t"):
            runtime.reload(mapped)

    def test_a_plan_that_cannot_take_the_new_weights_is_dropped(self, runtime: WalkRuntime) -> None:
        runtime.walk(make_base(), ANCHORS, plan="reference_int8")
        w2 = make_head(3).w2_rows(0, V).clone()
        w2[4, 4] = float("nan")
        head = MarkovHead(make_head(3).w1, w2)
        with pytest.raises(tp_walk.PlanUnavailableError, match="W2 has infinities or NaNs"):
            runtime.reload(head)
        assert "W2 has infinities" in runtime.explain(1)
        with pytest.raises(tp_walk.PlanUnavailableError, match=r"isn't held: .*W2 has infinities"):
            runtime.walk(make_base(), ANCHORS, plan="reference_int8")
        assert (runtime.walk(make_base(), ANCHORS).tokens[:, 0] == 4).all()  # the reference has them: NaN wins


def make_world_runtime(**arguments: Any) -> WalkRuntime:
    return WalkRuntime(make_head(), max_batch=4, max_gamma=6, group=dist.group.WORLD, device="cpu", **arguments)


def made_differently(per_rank: list[dict[str, Any]]) -> Any:
    return outcome(lambda: make_world_runtime(**per_rank[dist.get_rank()]).close())


@pytest.mark.parametrize(
    ("second", "kind", "why"),
    [
        (
            {"rounding": "once"},
            tp_walk.WalkMismatch,
            "ranks disagree on rounding: 'engine' on rank 0, 'once' on rank 1",
        ),
        ({"plans": ["reference"]}, tp_walk.WalkMismatch, "ranks disagree on plans: None on rank 0"),
        ({"deadline": Deadline(9.0, 9.0)}, tp_walk.WalkMismatch, "ranks disagree on deadline"),
        ({"rounding": "up"}, tp_walk.WalkInputError, "failed on rank 1: rounding is 'up'"),
        ({"shard": (68, 100)}, tp_walk.WalkInputError, "rank 1's shard is [68, 100); it must start at 64"),
        ({"shard": "all"}, tp_walk.SetupError, "choice of the shard failed on rank 1: ValueError"),
    ],
)
def test_ranks_that_differ_raise_alike(second: dict[str, Any], kind: type[Exception], why: str, rank_pool) -> None:
    errors = rank_pool(2)(made_differently, [{}, second])
    assert [type(error) for error in errors] == [kind] * 2
    assert str(errors[0]) == str(errors[1])
    assert why in str(errors[0])


def refused_by_one_rank() -> tuple[str, str]:
    def build(context: Any) -> Any:
        if context.group.rank == 1:
            raise tp_walk.PlanUnavailableError("no link to rank 0")
        return Closable()

    class Closable:
        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    before, EXECUTORS["tp_bf16"] = EXECUTORS["tp_bf16"], build
    try:
        with make_world_runtime() as runtime:
            assert closed == [True] * (runtime.rank == 0)
            return runtime.auto_select(1).name, runtime.explain(1)
    finally:
        EXECUTORS["tp_bf16"] = before


def test_a_plan_that_one_rank_lacks_is_held_by_none(rank_pool) -> None:
    for name, explanation in rank_pool(2)(refused_by_one_rank):
        assert name == "reference"
        assert "tp_bf16: set-up of plan tp_bf16 failed on rank 1: no link to rank 0" in explanation


def walked_differently(per_rank: list[dict[str, Any]]) -> tuple[Any, list[list[int]], list[list[int]], list[list[int]]]:
    with make_world_runtime() as runtime:
        mine = per_rank[runtime.rank]
        base, anchors = mine.pop("base_logits", make_base()), mine.pop("anchors", ANCHORS)
        tokens = torch.full(base.shape[:2], -1)
        noise = Noise(1, mine.pop("offset", 2))
        error = outcome(lambda: runtime.walk(base, anchors, noise=noise, out=WalkOutput(tokens), **mine))
        after = runtime.walk(make_base(), ANCHORS).tokens.tolist()
        return error, tokens.tolist(), anchors[:, None].expand_as(tokens).tolist(), after


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (
            {"base_logits": make_base(2), "anchors": ANCHORS[:2], "temperatures": torch.ones(2)},
            "batch: 3 on rank 0, 2 on rank 1",
        ),
        ({"base_logits": make_base(gamma=2)}, "gamma: 4 on rank 0, 2 on rank 1"),
        ({"anchors": torch.tensor([5, 7, 6])}, "anchors"),
        ({"temperatures": torch.tensor([1.0, 1.0, 0.5])}, "temperatures"),
        ({"temperatures": None}, "temperatures"),
        ({"offset": 3}, "noise offset: 2 on rank 0, 3 on rank 1"),
        ({"num_valid": torch.tensor(3, dtype=torch.int32)}, None),
        ({"num_valid": torch.tensor(2, dtype=torch.int32)}, "batch"),
    ],
)
def test_walks_that_differ_name_the_field_and_give_the_anchors(
    second: dict[str, Any], field: str | None, rank_pool
) -> None:
    common = {"temperatures": torch.ones(3)}
    results = rank_pool(2)(walked_differently, [common, {**common, **second}])
    with WalkRuntime(make_head(), device="cpu") as alone:
        right = alone.walk(make_base(), ANCHORS).tokens.tolist()
    for error, tokens, anchors, after in results:
        assert after == right  # a mismatch leaves the ranks in step
        if field is None:
            assert isinstance(error, WalkOutput)  # as many as the batch: the same walk
        else:
            assert isinstance(error, tp_walk.WalkMismatch)
            assert f"ranks disagree on {field}" in str(error)
            valid = 2 if field == "batch" and "num_valid" in second else len(tokens)
            assert tokens[:valid] == anchors[:valid]


def walks_alone() -> list[Any]:
    runtime = make_world_runtime(deadline=Deadline(startup_s=60.0, steady_s=0.5), plans=["reference"])
    runtime.walk(make_base(), ANCHORS)
    runtime.check()
    if runtime.rank == 1:
        return []
    tokens = torch.full((BATCH, GAMMA), -1)
    failed = outcome(lambda: runtime.walk(make_base(), ANCHORS, out=WalkOutput(tokens)))
    later = torch.full((BATCH, GAMMA), -1)
    again = outcome(lambda: runtime.walk(make_base(), ANCHORS, out=WalkOutput(later)))
    return [failed, again, outcome(runtime.check), tokens.tolist(), later.tolist()]


def test_a_rank_that_walks_alone_times_out_and_stays_failed() -> None:
    pool = RankPool(2)
    try:
        (failed, again, checked, tokens, later), _ = pool(walks_alone)
    finally:
        pool.close()
    for error in (failed, again, checked):
        assert isinstance(error, tp_walk.WalkTimeout)
        assert "rank 0 waited 0.5 s at most" in str(error)
    assert tokens == later == ANCHORS[:, None].expand(BATCH, GAMMA).tolist()


def test_importing_touches_no_gpu() -> None:
    assert not torch.cuda.is_initialized()

"""The host half of int8 and int8_split: where a walk finds its rows, what is reported, and set-ups that fail."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from tp_walk.config import Deadline
from tp_walk.errors import PlanUnavailableError, SetupError
from tp_walk.executors import KernelExecutor
from tp_walk.group import WalkGroup
from tp_walk.int8_executors import Int8Executor, Int8SplitExecutor
from tp_walk.kernels import WalkParams
from tp_walk.peer_logits import RankBuffers
from tp_walk.plan import WalkInputs
from tp_walk.shard import Shard, shard_bounds
from tp_walk.spread import Spread, SpreadParams, buffer_bytes, step_stride

V = 37
BUFFERS = (1 << 20, 1 << 21)

# ---- where a walk finds its rows -------------------------------------------------------------------------------------


def spread_of(rank: int, launched: list[tuple[Any, ...]], walk: WalkParams) -> Spread:
    """Without GPUs: its launch notes what the kernel would have been given."""
    spread = Spread.__new__(Spread)
    spread._rank, spread._shard = rank, shard_bounds(V, 2)[rank]
    spread._buffer = SimpleNamespace(addresses=BUFFERS)  # type: ignore[assignment]
    spread._params = SpreadParams(step_stride=step_stride(V), shard_start=spread._shard.start)

    def launch(arguments: int, stream: int) -> None:
        place = walk.base_logits, walk.base_stride_row, walk.base_stride_step
        launched.append((place, bool(walk.is_opened), spread._params.shard_width, stream))

    spread._launches = {(torch.bfloat16, full): launch for full in (False, True)}  # type: ignore[dict-item]
    return spread


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "full"])
def test_the_launch_reads_the_given_rows_and_the_walk_those_of_its_share(is_full: bool, rank: int, shares: int) -> None:
    walk, launched = WalkParams(shares=shares, is_opened=1), []
    spread = spread_of(rank, launched, walk)
    width = V if is_full else spread._shard.width
    base = torch.zeros(5, 3, width + 7, dtype=torch.bfloat16)[..., :width]
    spread(walk, base, is_full, 77)
    given = base.data_ptr(), 3 * (width + 7), width + 7
    assert launched == [(given, False, 0 if is_full else width, 77)]
    assert walk.is_opened == 1
    found = walk.base_logits, walk.base_stride_row, walk.base_stride_step
    if not is_full:
        assert found == (BUFFERS[rank], 3 * step_stride(V), step_stride(V))
    else:
        first = base.data_ptr() if shares == 1 else base[rank].data_ptr()
        assert found == (first, given[1] * shares, given[2])


@pytest.mark.parametrize("vocab_size", [1, 8, 37, 151_936])
def test_a_buffer_holds_whole_pieces_of_every_row(vocab_size: int) -> None:
    stride = step_stride(vocab_size)
    assert stride % 8 == 0
    assert vocab_size <= stride < vocab_size + 8
    assert buffer_bytes(vocab_size, 5, 3, 1, "engine") == 5 * 3 * stride * 2
    assert buffer_bytes(vocab_size, 5, 3, 2, "none") == 3 * 3 * stride * 4, "the largest share, and fp32"


# ---- what is reported ------------------------------------------------------------------------------------------------


class _Reports(Int8SplitExecutor):
    """Whose walk stores this rank's rows of logits that are known, and their log-sum-exps."""

    def __init__(self, whole: torch.Tensor) -> None:
        group = WalkGroup(dist.group.WORLD, torch.device("cpu"))
        shards = shard_bounds(whole.shape[-1], group.world_size)
        self.shard = shards[group.rank]
        self._whole = whole
        self._context = SimpleNamespace(  # type: ignore[assignment]
            group=group,
            shape=SimpleNamespace(world_size=group.world_size, vocab_size=whole.shape[-1]),
            shard=self.shard,
            rounding="none",
            device=torch.device("cpu"),
            deadline=Deadline(60.0, 60.0),
        )

    def _walk(self, inputs: WalkInputs, on_ranks: RankBuffers | None = None) -> None:
        assert inputs.temperatures is not None
        group = self._context.group
        mine = self._whole[group.rank :: group.world_size]
        if inputs.logits_out is not None:
            inputs.logits_out[: len(mine)] = mine
        if inputs.lse_out is not None:
            given = inputs.temperatures[group.rank :: group.world_size, None, None]
            inputs.lse_out[: len(mine)] = (mine / torch.where(given > 0, given.clamp_min(1e-5), 1.0)).logsumexp(-1)

    def check(self) -> None:
        pass


def _reports(batch: int, valid: int, logits: str) -> None:
    whole = torch.randn(batch, 3, V, generator=torch.Generator().manual_seed(batch))
    temperatures = torch.tensor([0.0, 0.5, 2.0, float("nan"), 1e-9])[:batch]
    executor = _Reports(whole)
    columns = whole if logits == "full" else whole[..., executor.shard.start : executor.shard.stop]
    out = torch.full_like(columns, 7.0) if logits != "none" else None
    lse = torch.full((batch, 3), 7.0)
    inputs = WalkInputs(
        base_logits=whole,
        base_is_full=True,
        anchors=torch.zeros(batch, dtype=torch.int64),
        temperatures=temperatures,
        noise=None,
        num_valid=torch.tensor(valid, dtype=torch.int32),
        logits=logits,  # type: ignore[arg-type]
        logits_rows="sampled",
        tokens=torch.zeros(batch, 3, dtype=torch.int64),
        logits_out=out,
        lse_out=lse,
    )
    executor.walk(inputs)
    for row in range(batch):
        temperature = float(temperatures[row])
        sampled = temperature > 0
        if out is not None:
            assert torch.equal(out[row], columns[row] if row < valid and sampled else torch.full_like(out[row], 7.0))
        right = (whole[row] / (max(temperature, 1e-5) if sampled else 1.0)).logsumexp(-1)
        torch.testing.assert_close(lse[row], right if row < valid else torch.full((3,), 7.0))


@pytest.mark.parametrize("logits", ["none", "local", "full"])
@pytest.mark.parametrize(("world", "batch", "valid"), [(2, 5, 5), (2, 1, 1), (3, 5, 4), (3, 2, 2)])
def test_rows_come_back_in_the_batchs_order(
    rank_pool: Callable[[int], RankPool], world: int, batch: int, valid: int, logits: str
) -> None:
    rank_pool(world)(_reports, batch, valid, logits)


# ---- set-up ----------------------------------------------------------------------------------------------------------


def context_of(world_size: int) -> Any:
    return SimpleNamespace(shape=SimpleNamespace(world_size=world_size, vocab_size=V))


class _Mailboxes:
    def __init__(self) -> None:
        self.is_open = True
        made_mailboxes.append(self)

    def close(self) -> None:
        self.is_open = False


made_mailboxes: list[_Mailboxes] = []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With how many ranks executors have set up their mailboxes."""
    found: list[int] = []

    def set_up(self: KernelExecutor, context: Any, *, ranks: int, shard: Shard, shares: int = 1) -> None:
        found.append(ranks)
        assert shard == Shard(0, V)
        if ranks > 1 and context.shape.world_size == 4:
            raise PlanUnavailableError("no peer access between ranks 0 and 1")
        self._mailboxes = _Mailboxes()  # type: ignore[assignment]

    monkeypatch.setattr(KernelExecutor, "__init__", set_up)
    return found


def refuse(context: Any, *, shares: int) -> None:
    raise SetupError("cudaMalloc failed")


def test_int8_does_without_its_peers_where_it_must(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_walk.int8_executors.Spread", lambda context, *, shares: SimpleNamespace(shares=shares))
    assert Int8Executor(context_of(2))._spread is not None
    assert Int8Executor(context_of(4))._spread is None
    assert Int8Executor(context_of(1))._spread is None
    assert Int8Executor(context_of(9))._spread is None, "more ranks than mailboxes hold"
    assert made == [2, 4, 1, 1, 1]


def test_int8_split_is_refused_where_it_cant_be(made: list[int]) -> None:
    for world_size in (1, 9):
        with pytest.raises(PlanUnavailableError, match=f"over 2 to 8 ranks, not {world_size}; plan int8"):
            Int8SplitExecutor(context_of(world_size))
    with pytest.raises(PlanUnavailableError, match="no peer access"):
        Int8SplitExecutor(context_of(4))


@pytest.mark.parametrize("executor", [Int8Executor, Int8SplitExecutor])
def test_a_buffer_that_cant_be_had_frees_the_mailboxes(
    executor: Callable[[Any], Any], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tp_walk.int8_executors.Spread", refuse)
    made_mailboxes.clear()
    with pytest.raises(SetupError, match="cudaMalloc"):
        executor(context_of(2))
    assert [mailboxes.is_open for mailboxes in made_mailboxes] == [False]

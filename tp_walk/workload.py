"""A walk by everything that can do it: made, checked against the definition, captured, ready to be timed.

The weights are small integers over a power of two, so that every dot product is exact in fp32 in any order: plans and
rivals must then agree with the definition in every token and every bit of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tp_walk.config import LogitsMode
from tp_walk.errors import PlanUnavailableError, WalkError, WalkMismatch, WalkTimeout
from tp_walk.group import WalkGroup
from tp_walk.head import MarkovHead
from tp_walk.noise import Noise
from tp_walk.plan import PLAN_NAMES, REFERENCE_PLANS, WalkOutput
from tp_walk.rivals import PhiloxSampler, ReplicatedWalk, Sampler, ShardedWalk, SingleWalk, TorchSampler
from tp_walk.runtime import WalkRuntime
from tp_walk.shard import shard_bounds
from tp_walk.timing import CapturedWork

Layout = Literal["sharded", "full"]
Rival = SingleWalk | ReplicatedWalk | ShardedWalk

# The rivals' names in tables.
SINGLE, REPLICATED, SHARDED, SHARDED_LOGITS = "torch", "torch_replicated", "torch_sharded", "torch_sharded_logits"

INT8_PLANS = ("int8", "int8_split")

_SEED = 20
_NOISE_KEY = 0x5EED
# Base logits spread over twice the bias: the base proposes, the bias often decides.
_BASE_DEVIATION = 3.0


@dataclass(frozen=True)
class Walk:
    """What is walked. sampled: every row at T = 1, else all greedy. layout: of the base logits at world > 1."""

    batch: int
    gamma: int
    sampled: bool = False
    logits: LogitsMode = "none"
    layout: Layout = "sharded"


@dataclass(frozen=True)
class Prepared:
    """ready: name → what runs the walk. refused: name → what failed, or what it got wrong."""

    ready: dict[str, Callable[[], object]]
    refused: dict[str, str]


@dataclass(frozen=True)
class _Inputs:
    base: torch.Tensor  # [batch, gamma, V]
    local: torch.Tensor  # [batch, gamma, shard width]
    padded: torch.Tensor  # local, with −inf up to the width of the widest shard
    anchors: torch.Tensor
    temperatures: torch.Tensor | None


@dataclass(frozen=True)
class Ranks:
    """This process's part of a measurement.

    device: its GPU, or the CPU. group: the ranks (gloo), None for a world of one. fast_group: the same ranks for the
    walks' own collectives, those that the rivals are made of and those that a plan may need: NCCL on GPUs, where a
    graph can hold them.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    fast_group: dist.ProcessGroup | None = None

    @classmethod
    def of_this_run(cls) -> Ranks:
        """The ranks of `dist.group.WORLD` (gloo), or this process alone. Collective."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(device)
        world = dist.group.WORLD
        return cls(device, world, dist.new_group(backend="nccl") if device.type == "cuda" else world)

    def alone(self) -> Ranks:
        """This process as a world of one."""
        return Ranks(self.device)


class Workload:
    """Weights of one shape on every rank of a group, and all that can walk them. Construction, `prepare` and `close`
    are collectives.

    Args:
        vocab_size, markov_rank: V and r. max_batch, max_gamma: of the walks to come.
        ranks: who walks. On the CPU only the reference plans run, uncaptured.

    Attributes:
        group: the ranks. not_held: plan → why it can't run here.

    Raises:
        WalkError: the runtime couldn't be made; alike on every rank.
    """

    def __init__(
        self,
        vocab_size: int,
        markov_rank: int,
        *,
        max_batch: int,
        max_gamma: int,
        ranks: Ranks,
    ) -> None:
        self._device = device = ranks.device
        self._fast_group = ranks.fast_group
        self.group = WalkGroup(ranks.group, device)
        self._shards = shard_bounds(vocab_size, self.group.world_size)
        generator = torch.Generator(device).manual_seed(_SEED)
        self._w1, self._w2 = (_exact_weights(vocab_size, markov_rank, generator) for _ in range(2))
        self._base = torch.empty(max_batch, max_gamma, vocab_size, dtype=torch.bfloat16, device=device)
        self._base.normal_(0.0, _BASE_DEVIATION, generator=generator)
        self._anchors = torch.randint(vocab_size, (max_batch,), generator=generator, device=device)
        for tensor in (self._w1, self._w2, self._base, self._anchors):
            self._check_same_everywhere(tensor)
        columns = self.group.world_size * self._shards[0].width
        self._w2_padded = pad(self._w2, (0, 0, 0, columns - vocab_size))
        self.runtime = WalkRuntime(
            MarkovHead(self._w1, self._w2),
            max_batch=max_batch,
            max_gamma=max_gamma,
            group=ranks.fast_group,
            device=device,
        )
        reasons = self.runtime.stats()["not_held"]
        self.not_held = {name: why for name, why in reasons.items() if name not in REFERENCE_PLANS}
        # On a GPU the definitions only check: the torch walk, which is a graph, stands for what they would take.
        checking = REFERENCE_PLANS if device.type == "cuda" else ()
        self._plans = [name for name in PLAN_NAMES if name not in self.not_held and name not in checking]

    def prepare(self, walk: Walk) -> Prepared:
        """Everything that does this walk and does it right; on GPUs as CUDA graphs."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the pools of the graphs that are gone
        inputs = self._inputs(walk)
        expected: dict[str, WalkOutput] = {}
        ready: dict[str, Callable[[], object]] = {}
        refused: dict[str, str] = {}
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            name: partial(self._plan, name, walk, inputs, expected) for name in self._plans
        }
        makers |= {
            name: partial(self._rival, name, make, walk, inputs, expected)
            for name, make in self._rivals(walk, inputs).items()
        }
        for name, make in makers.items():
            try:
                ready[name] = self.group.stage(f"check of {name}", make)
            except WalkError as error:
                refused[name] = str(error)
                if isinstance(error, WalkTimeout | WalkMismatch):
                    self.runtime.reset()
        return Prepared(ready, refused)

    def close(self) -> None:
        self.runtime.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _inputs(self, walk: Walk) -> _Inputs:
        shard = self._shards[self.group.rank]
        base = self._base[: walk.batch, : walk.gamma]
        local = base[..., shard.start : shard.stop].contiguous()
        padding = self._shards[0].width - shard.width
        return _Inputs(
            base=base.contiguous(),
            local=local,
            padded=pad(local, (0, padding), value=float("-inf")) if padding else local,
            anchors=self._anchors[: walk.batch].clone(),
            temperatures=torch.ones(walk.batch, device=self._device) if walk.sampled else None,
        )

    def _plan(self, name: str, walk: Walk, inputs: _Inputs, expected: dict[str, WalkOutput]) -> Callable[[], object]:
        offset = torch.zeros(1, dtype=torch.int64, device=self._device)
        noise = Noise(_NOISE_KEY, offset) if walk.sampled else None
        tokens = torch.empty(walk.batch, walk.gamma, dtype=torch.int64, device=self._device)
        logits = None
        if walk.logits != "none":
            logits = self.runtime.logits_buffer(walk.batch, walk.gamma, walk.logits)
        out = WalkOutput(tokens, logits)
        base = inputs.base if walk.layout == "full" else inputs.local

        def run() -> str:
            ran = self.runtime.walk(
                base, inputs.anchors, inputs.temperatures, noise=noise, plan=name, logits=walk.logits, out=out
            ).plan
            return name if ran is None else ran.name

        if run() != name:
            raise PlanUnavailableError("TP_WALK_PLAN forces another plan; unset it to measure")
        ready = self._captured(run)
        tokens.fill_(-1)
        offset.zero_()
        ready()
        self._synchronize()
        self.runtime.check()
        # All that talks to other ranks comes before whatever may raise on one of them alone.
        right = self._expected(name, walk, inputs, expected)
        if logits is not None and walk.logits == "full":
            self._check_same_everywhere(logits)
        _check_tokens(tokens, right.tokens)
        if logits is not None and right.logits is not None:
            shard = self._shards[self.group.rank]
            own = logits[..., shard.start : shard.stop] if walk.logits == "full" else logits
            if not torch.equal(own, right.logits):
                raise WalkError("its logits differ from the definition's")
        return ready

    def _rivals(self, walk: Walk, inputs: _Inputs) -> dict[str, Callable[[Sampler | None], Rival]]:
        keep_logits = walk.logits != "none"
        if self._fast_group is None:
            return {
                SINGLE: lambda sampler: SingleWalk(
                    self._w1, self._w2, inputs.base, inputs.anchors, sampler, keep_logits
                )
            }
        group, shard, full = self._fast_group, self._shards[self.group.rank], walk.layout == "full"
        w2_rows = pad(self._w2[shard.start : shard.stop], (0, 0, 0, inputs.padded.shape[2] - shard.width))

        def replicated(sampler: Sampler | None) -> Rival:
            w2, base = (self._w2, inputs.base) if full else (self._w2_padded, inputs.padded)
            return ReplicatedWalk(self._w1, w2, base, inputs.anchors, group, full, sampler, keep_logits)

        def sharded(sampler: Sampler | None, gather_logits: bool) -> Rival:
            return ShardedWalk(
                self._w1,
                w2_rows,
                inputs.padded,
                inputs.anchors,
                self._shards,
                group,
                sampler,
                keep_logits,
                gather_logits,
            )

        rivals: dict[str, Callable[[Sampler | None], Rival]] = {REPLICATED: replicated}
        if walk.logits != "full":
            rivals[SHARDED] = partial(sharded, gather_logits=False)
        if walk.logits == "full" or walk.sampled:
            rivals[SHARDED_LOGITS] = partial(sharded, gather_logits=True)
        return rivals

    def _rival(
        self,
        name: str,
        make: Callable[[Sampler | None], Rival],
        walk: Walk,
        inputs: _Inputs,
        expected: dict[str, WalkOutput],
    ) -> Callable[[], object]:
        checked = sampler = None
        if inputs.temperatures is not None:
            # Checked with the definition's noise, timed with torch's own, which is faster there.
            checked = make(PhiloxSampler(inputs.temperatures, _NOISE_KEY, 0))
            checked()
            # Ranks that draw for the same ids draw alike, those with ids of their own draw for themselves.
            torch.manual_seed(_SEED + (self.group.rank if name == SHARDED else 0))
            sampler = TorchSampler(inputs.temperatures)
        rival = make(sampler)
        rival()
        ready = self._captured(rival)
        rival.tokens.fill_(-1)
        ready()
        self._synchronize()
        right = self._expected("reference", walk, inputs, expected)
        self._check_same_everywhere(rival.tokens)
        _check_tokens((checked or rival).tokens.T, right.tokens)
        return ready

    def _expected(self, plan: str, walk: Walk, inputs: _Inputs, known: dict[str, WalkOutput]) -> WalkOutput:
        definition = "reference_int8" if plan in (*INT8_PLANS, "reference_int8") else "reference"
        if definition not in known:
            known[definition] = self.runtime.walk(
                inputs.base,
                inputs.anchors,
                inputs.temperatures,
                noise=Noise(_NOISE_KEY, 0),
                plan=definition,
                logits="none" if walk.logits == "none" else "local",
            )
        return known[definition]

    def _captured(self, work: Callable[[], object]) -> Callable[[], object]:
        return CapturedWork(work) if self._device.type == "cuda" else work

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_same_everywhere(self, tensor: torch.Tensor) -> None:
        integers = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        sums = self.group.all_gather_object(int(integers.sum(dtype=torch.int64)))
        if len(set(sums)) > 1:
            raise WalkError(f"ranks hold different values: checksums {sums}")


def _exact_weights(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """`[rows, columns]` bf16 of integers from −4 to 4, over 8."""
    integers = torch.randint(-4, 5, (rows, columns), dtype=torch.int8, device=generator.device, generator=generator)
    return integers.to(torch.bfloat16).div_(8.0)


def _check_tokens(tokens: torch.Tensor, right: torch.Tensor) -> None:
    wrong = (tokens != right).nonzero()
    if len(wrong):
        row, step = wrong[0].tolist()
        raise WalkError(
            f"{len(wrong)} of {right.numel()} tokens differ from the definition's, first in row {row}, step {step}: "
            f"{int(tokens[row, step])}, right is {int(right[row, step])}"
        )

"""The walk as engines run it today: torch's own kernels, γ steps of several launches each, and NCCL between ranks.

These are what tp_walk is timed against. They are written to be fast (preallocated buffers, no copy that an engine could
leave out, captured whole in a CUDA graph) and compute the same tokens as plan `reference` with rounding "engine".

| walk | weights | base logits | each step |
|---|---|---|---|
| `SingleWalk` | whole | whole | no exchange |
| `ReplicatedWalk` | whole on every rank | sharded, gathered once a block | rank 0's token broadcast |
| `ShardedWalk` | sharded | sharded | candidates gathered, or the step's whole logits |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tp_walk.noise import gumbel, random_bits
from tp_walk.reference import MIN_TEMPERATURE
from tp_walk.shard import Shard


class Sampler(Protocol):
    """Turns a step's logits `[batch, width]` bf16 of the ids from `start` on into scores, of which the largest wins."""

    def __call__(self, logits: torch.Tensor, step: int, start: int) -> torch.Tensor: ...


class TorchSampler:
    """Gumbel-max with torch's own generator: −log of exponential noise is Gumbel noise.

    Ranks that draw for the same ids must have seeded the device's generator alike.
    """

    def __init__(self, temperatures: torch.Tensor) -> None:
        self._temperatures = temperatures.clamp(min=MIN_TEMPERATURE)[:, None]

    def __call__(self, logits: torch.Tensor, step: int, start: int) -> torch.Tensor:
        exponential = torch.empty(logits.shape, device=logits.device).exponential_()
        return (logits / self._temperatures).sub_(exponential.log_())


class PhiloxSampler:
    """The noise of DESIGN section 2 in torch operations: the same draws as every plan's."""

    def __init__(self, temperatures: torch.Tensor, key: int, offset: int) -> None:
        batch, device = len(temperatures), temperatures.device
        self._temperatures = temperatures.clamp(min=MIN_TEMPERATURE)[:, None]
        self._key, self._offset = (torch.full((batch,), value, device=device) for value in (key, offset))
        self._rows = torch.arange(batch, device=device)

    def __call__(self, logits: torch.Tensor, step: int, start: int) -> torch.Tensor:
        bits = random_bits(self._key, self._offset, self._rows, step, start, start + logits.shape[1])
        return (logits / self._temperatures).add_(gumbel(bits))


class SingleWalk:
    """One GPU: the whole vocabulary, no exchange.

    Args:
        w1, w2: `[V_target, r]` and `[V, r]` bf16. base_logits: `[batch, gamma, V]` bf16. anchors: `[batch]` int64.
        sampler: None for a greedy walk.
        keep_logits: also leave the step logits in `logits` `[gamma, batch, V]`.

    A call runs the walk; `tokens` `[gamma, batch]` int64 then hold its result.
    """

    def __init__(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        sampler: Sampler | None = None,
        keep_logits: bool = False,
    ) -> None:
        batch, gamma, width = base_logits.shape
        self._w1, self._w2_t = w1, w2.T
        self._base, self._anchors, self._sampler = base_logits, anchors, sampler
        self.tokens = torch.empty(gamma, batch, dtype=torch.int64, device=anchors.device)
        self.logits = torch.empty(
            gamma if keep_logits else 1, batch, width, dtype=torch.bfloat16, device=anchors.device
        )

    def __call__(self) -> None:
        previous = self._anchors
        for step in range(len(self.tokens)):
            logits = self._step_logits(step, previous)
            score = logits if self._sampler is None else self._sampler(logits, step, 0)
            previous = torch.argmax(score, dim=-1, out=self.tokens[step])

    def _step_logits(self, step: int, previous: torch.Tensor) -> torch.Tensor:
        # bf16 result of the product, then one bf16 addition: rounding "engine".
        bias = torch.mm(self._w1[previous], self._w2_t)
        return torch.add(self._base[:, step], bias, out=self.logits[step % len(self.logits)])


class ReplicatedWalk:
    """Base logits gathered once, then the whole walk on every rank; rank 0's token of each step goes to all.

    base_logits: this rank's shard `[batch, gamma, width]`, padded with −inf to the same width on every rank; or, with
    `base_is_full`, the whole `[batch, gamma, V]`, which needs no gathering. w2 `[columns, r]` has a row for each of the
    columns so gathered, zero for the padded ones. group: an NCCL group, or gloo on the CPU.

    Otherwise as `SingleWalk`; `logits` is `[gamma, batch, columns]`.
    """

    def __init__(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        group: dist.ProcessGroup,
        base_is_full: bool = False,
        sampler: Sampler | None = None,
        keep_logits: bool = False,
    ) -> None:
        batch, gamma, width = base_logits.shape
        world_size, device = 1 if base_is_full else dist.get_world_size(group), anchors.device
        self._w1, self._w2_t = w1, w2.T
        self._base, self._anchors, self._group, self._sampler = base_logits, anchors, group, sampler
        self._base_is_full = base_is_full
        self._gathered = base_logits[None] if base_is_full else base_logits.new_empty(world_size, *base_logits.shape)
        self.tokens = torch.empty(gamma, batch, dtype=torch.int64, device=device)
        steps = gamma if keep_logits else 1
        self.logits = torch.empty(steps, batch, world_size * width, dtype=torch.bfloat16, device=device)

    def __call__(self) -> None:
        if not self._base_is_full:
            _all_gather(self._gathered, self._base, self._group)
        world_size, batch, gamma, width = self._gathered.shape
        previous = self._anchors
        for step in range(gamma):
            bias = torch.mm(self._w1[previous], self._w2_t)
            logits = self.logits[step % len(self.logits)]
            # The gathered logits are added as they lie, [world, batch, width]: putting them in order first costs more.
            torch.add(
                self._gathered[:, :, step].transpose(0, 1),
                bias.view(batch, world_size, width),
                out=logits.view(batch, world_size, width),
            )
            score = logits if self._sampler is None else self._sampler(logits, step, 0)
            previous = torch.argmax(score, dim=-1, out=self.tokens[step])
            dist.broadcast(previous, group_src=0, group=self._group)


class ShardedWalk:
    """W2 and base logits stay sharded; a collective each step.

    Greedy, and sampled unless `gather_logits`: each rank's best (score, id) is gathered. `gather_logits`: the step's
    whole logits are gathered, and every rank draws the token from them.

    w2: this rank's rows, padded with zero rows to `[width, r]`; base_logits: `[batch, gamma, width]` with −inf there.
    shards: every rank's. `logits` is `[gamma, batch, width]`, with `gather_logits` `[gamma, world, batch, width]`.
    Otherwise as `ReplicatedWalk`.
    """

    def __init__(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        shards: Sequence[Shard],
        group: dist.ProcessGroup,
        sampler: Sampler | None = None,
        keep_logits: bool = False,
        gather_logits: bool = False,
    ) -> None:
        batch, gamma, width = base_logits.shape
        world_size, device = len(shards), anchors.device
        self._w1, self._w2_t, self._start = w1, w2.T, shards[dist.get_rank(group)].start
        self._base, self._anchors, self._group, self._sampler = base_logits, anchors, group, sampler
        self._gather_logits = gather_logits
        self._local = torch.empty(
            gamma if keep_logits and not gather_logits else 1, batch, width, dtype=torch.bfloat16, device=device
        )
        self._whole = torch.empty(
            gamma if keep_logits else 1, world_size, batch, width, dtype=torch.bfloat16, device=device
        )
        self.logits = self._whole if gather_logits else self._local
        self.tokens = torch.empty(gamma, batch, dtype=torch.int64, device=device)
        # Ids travel beside the scores as float32, which holds them exactly up to 2^24.
        self._sent = torch.empty(2, batch, device=device)
        self._received = torch.empty(world_size, 2, batch, device=device)

    def __call__(self) -> None:
        previous = self._anchors
        for step in range(len(self.tokens)):
            bias = torch.mm(self._w1[previous], self._w2_t)
            logits = torch.add(self._base[:, step], bias, out=self._local[step % len(self._local)])
            previous = self._from_logits(logits, step) if self._gather_logits else self._from_best(logits, step)

    def _from_best(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        score = logits if self._sampler is None else self._sampler(logits, step, self._start)
        best, where = score.max(dim=-1)
        self._sent[0].copy_(best)
        torch.add(where, self._start, out=self._sent[1])
        _all_gather(self._received, self._sent, self._group)
        # The first of equals: the lowest rank, whose ids are the smallest.
        winner = self._received[:, 0].argmax(dim=0, keepdim=True)
        return self.tokens[step].copy_(self._received[:, 1].gather(0, winner)[0])

    def _from_logits(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        whole = self._whole[step % len(self._whole)]
        _all_gather(whole, logits, self._group)
        ordered = whole.transpose(0, 1).flatten(1)
        score = ordered if self._sampler is None else self._sampler(ordered, step, 0)
        return torch.argmax(score, dim=-1, out=self.tokens[step])


def _all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """received: `[world, *sent.shape]`. One collective, no copy."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
    gather(received.flatten(0, 1), sent, group=group)

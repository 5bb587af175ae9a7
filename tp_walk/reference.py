"""The definitions: plans `reference` and `reference_int8` in plain torch, on CPU or GPU, at any world size.

Every other plan is held to what this file computes. Each rank works on its own columns of the vocabulary alone, and the
ranks agree on each step's token by the largest key. On a CUDA device nothing waits for the host unless the group's
backend makes it, so that a graph can capture even these plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tp_walk.config import LOGITS_MODES, LOGITS_ROWS, ROUNDINGS, Rounding
from tp_walk.errors import PlanUnavailableError, WalkError, WalkMismatch, WalkTimeout
from tp_walk.noise import Noise, gumbel, random_bits
from tp_walk.plan import PLAN_NAMES, ExecutorContext, WalkInputs
from tp_walk.quantize import MAX_INT8_RANK, quantize_rows, scale_dots, split_planes

# Temperatures above zero but below this count as this.
MIN_TEMPERATURE = 1e-5

_LOW32 = 0xFFFFFFFF
NO_KEY = -(2**63)  # below all others: nothing to choose from


def ordered(score: torch.Tensor) -> torch.Tensor:
    """int64 of float32 scores, in the order in which they win: NaN of either sign above all, -0 as +0."""
    bits = (score + 0.0).view(torch.int32).long()  # -0 + 0 is +0
    return torch.where(score.isnan(), 0x7FFFFFFF, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def walk_key(score: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys of which the largest wins: NaN of either sign first, then the larger score, then the smaller id.

    score: float32, ids: int64 below 2^32, of one shape. The high half is `ordered(score)`, the low half
    0xFFFFFFFF - id.
    """
    return (ordered(score) << 32) + (_LOW32 - ids)


def key_id(key: torch.Tensor) -> torch.Tensor:
    """The id that `walk_key` packed."""
    return _LOW32 - (key & _LOW32)


def add_bias(base: torch.Tensor, bias: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """One step's logits from base (bf16, or float32 with rounding "none") and the float32 bias, in the given rounding.

    "engine": bias → bf16, then the fp32 sum → bf16. "once": the fp32 sum → bf16. "none": bias → bf16, sum stays fp32.
    """
    if rounding != "once":
        bias = bias.bfloat16().float()
    total = base.float() + bias
    return total if rounding == "none" else total.bfloat16()


# (step, bias `[batch, shard width]` float32, score of the same shape) → each row's best key over all ranks.
Picker = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class _Rows(Protocol):
    """This rank's rows of W2, and how they meet u."""

    def load(self, context: ExecutorContext) -> None: ...
    def bias(self, u: torch.Tensor) -> torch.Tensor: ...
    def memory_bytes(self) -> int: ...


class Bf16Rows:
    """bf16 weights, kept as float32 so that a step need not convert them again."""

    def __init__(self, context: ExecutorContext) -> None:
        self._rows = torch.empty(context.shard.width, context.shape.markov_rank, device=context.device)
        self.load(context)

    def load(self, context: ExecutorContext) -> None:
        self._rows.copy_(context.head.w2_rows(context.shard.start, context.shard.stop))

    def bias(self, u: torch.Tensor) -> torch.Tensor:
        return u.float() @ self._rows.T

    def memory_bytes(self) -> int:
        return self._rows.nbytes


class _Int8Rows:
    """int8 weights and their scales. The integers are kept as float32: see `bias`."""

    def __init__(self, context: ExecutorContext) -> None:
        if context.shape.markov_rank > MAX_INT8_RANK:
            raise PlanUnavailableError(
                f"int8 plans need markov_rank <= {MAX_INT8_RANK}, where int32 sums are exact; "
                f"this head's is {context.shape.markov_rank}"
            )
        self._rows = torch.empty(context.shard.width, context.shape.markov_rank, device=context.device)
        self._scales = torch.empty(context.shard.width, device=context.device)
        self.load(context)

    def load(self, context: ExecutorContext) -> None:
        rows = context.head.w2_rows(context.shard.start, context.shard.stop).to(context.device)
        for name, weights in (("W1", context.w1), ("W2", rows)):
            if not weights.isfinite().all():
                raise PlanUnavailableError(f"int8 plans need finite weights; {name} has infinities or NaNs")
        quantized, scales = quantize_rows(rows)
        self._rows.copy_(quantized)
        self._scales.copy_(scales)

    def bias(self, u: torch.Tensor) -> torch.Tensor:
        """`[batch, r]` → `[batch, rows]` float32, by the integer definition.

        Each plane's sum stays below 512 · 127 · 128 < 2^24, so float32 products and sums of these integers are exact in
        any order, on devices that have no integer matrix product too.
        """
        hi, lo, scales = split_planes(u)
        sums = (torch.stack([hi, lo]).float() @ self._rows.T).to(torch.int32)
        return scale_dots(256 * sums[0] + sums[1], scales, self._scales)

    def memory_bytes(self) -> int:
        return self._rows.nbytes + self._scales.nbytes


class ReferenceExecutor:
    """A definition as an executor; which one is a matter of `rows` alone."""

    def __init__(self, name: str, context: ExecutorContext, rows: _Rows) -> None:
        self.name = name
        self._context = context
        self._rows = rows
        self._timeout_s = context.deadline.startup_s
        self._failure: WalkTimeout | None = None

    def memory_bytes(self) -> int:
        return self._rows.memory_bytes()

    def walk(self, inputs: WalkInputs) -> None:
        """Runs the walk. After a failure the tokens are the anchors.

        Raises:
            WalkMismatch: the ranks were called with different arguments.
            WalkTimeout: a rank was lost or late. What it would have sent may still arrive: this executor is done for.
        """
        inputs = _without_inert_rows(inputs, self._context.device)
        try:
            self.check()
            self._agree(inputs)
            self._walk(inputs)
        except WalkError as error:
            _store(inputs.tokens, inputs.anchors.long()[:, None].expand_as(inputs.tokens), _live_rows(inputs))
            if isinstance(error, WalkTimeout):
                self._failure = error
            raise
        self._timeout_s = self._context.deadline.steady_s

    def check(self) -> None:
        if self._failure is not None:
            raise WalkTimeout(str(self._failure))

    def clamped_anchor(self) -> tuple[int, int] | None:
        return None  # the CPU refuses it, and on a GPU nobody looks

    def counts(self) -> dict[str, int]:
        return {}

    def reset(self) -> None:
        """Raises WalkTimeout on every rank if a rank failed: a late rank's messages may still be in the group."""
        self._context.group.vote(f"reset of {self.name}", self._failure)

    def reload(self, context: ExecutorContext) -> None:
        self._context = context
        self._rows.load(context)

    def close(self) -> None:
        """Nothing is held outside torch's own memory."""

    def _agree(self, inputs: WalkInputs) -> None:
        """Raises WalkMismatch on every rank if a rank's call differs, where the host may look."""
        group = self._context.group
        capturing = inputs.tokens.is_cuda and torch.cuda.is_current_stream_capturing()
        if group.world_size == 1 or capturing:
            return
        mine = _launch_fields(self.name, self._context.rounding, inputs)
        fields = group.all_gather(torch.tensor(list(mine.values())), self._timeout_s)
        for name, values in zip(mine, fields.T.tolist(), strict=True):
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise WalkMismatch(
                        f"ranks disagree on {name}: {values[0]} on rank 0, {value} on rank {rank} (tensors by a hash); "
                        f"call walk with the same arguments on every rank"
                    )

    def _walk(self, inputs: WalkInputs) -> None:
        context, group = self._context, self._context.group
        batch, gamma = inputs.tokens.shape
        base = _local_columns(inputs, context)
        live = _live_rows(inputs)
        draw = None if inputs.temperatures is None else Draw(inputs.temperatures, inputs.noise, live)
        pick = self._picker(base, draw)
        logits = None if inputs.logits_out is None else base.new_empty(base.shape, dtype=inputs.logits_out.dtype)
        log_sums = torch.empty(batch, gamma, dtype=torch.float64, device=context.device)
        # On a GPU nobody has looked at the anchors, and an inert row's may be anything.
        previous = inputs.anchors.long().clamp(0, context.w1.shape[0] - 1)
        for step in range(gamma):
            bias = self._rows.bias(context.w1[previous])
            logit = add_bias(base[:, step], bias, context.rounding)
            if logits is not None:
                logits[:, step] = logit
            value = logit.float()
            if inputs.lse_out is not None:
                scaled = value.double() if draw is None else value.double() / draw.divisor[:, None]
                log_sums[:, step] = scaled.logsumexp(dim=-1)
            score = value if draw is None else draw.score(value, step, context.shard.start, context.shard.stop)
            drafted = key_id(pick(step, bias, score))
            previous = drafted if context.d2t is None else context.d2t[drafted]
            _store(inputs.tokens[:, step], previous, live)
        if inputs.lse_out is not None:
            _store(inputs.lse_out, group.all_gather(log_sums, self._timeout_s).logsumexp(dim=0).float(), live)
        if inputs.logits_out is not None and logits is not None:
            if inputs.logits == "full":
                logits = group.all_gather_columns(logits, [shard.width for shard in context.shards], self._timeout_s)
            if inputs.logits_rows == "sampled":
                live = torch.zeros_like(previous, dtype=torch.bool) if draw is None else live & draw.sampled
            _store(inputs.logits_out, logits, live)

    def _picker(self, base: torch.Tensor, draw: Draw | None) -> Picker:
        """What finds each step's keys. base: `[batch, gamma, shard width]`; like noise, known before the first step."""
        context, timeout_s = self._context, self._timeout_s
        ids = torch.arange(context.shard.start, context.shard.stop, device=context.device)
        return lambda step, bias, score: context.group.all_reduce_max(best_key(score, ids), timeout_s)


class Draw:
    """One walk's temperatures and noise. Reads a device-side offset, then advances it."""

    def __init__(self, temperatures: torch.Tensor, noise: Noise | None, live: torch.Tensor) -> None:
        assert noise is not None  # WalkRuntime takes no temperatures without it
        batch, device = temperatures.shape[0], temperatures.device
        self.sampled = temperatures > 0
        self.divisor = torch.where(self.sampled, temperatures.clamp(min=MIN_TEMPERATURE), 1.0)
        self._key = _per_row(noise.key, batch, device)
        self._offset = _per_row(noise.offset, batch, device)
        self._rows = torch.arange(batch, device=device) if noise.rows is None else noise.rows[:batch].long()
        if isinstance(noise.offset, torch.Tensor):
            if noise.offset.numel() == 1:
                noise.offset.add_(1)
            else:
                noise.offset[:batch].add_(live.long())

    def score(self, value: torch.Tensor, step: int, start: int, stop: int) -> torch.Tensor:
        """Gumbel-max keys of the sampled rows, logits of the greedy ones; `[batch, stop - start]` float32."""
        # The host may look at a CPU tensor, and spares the greedy rows' noise.
        host = value.device.type == "cpu"
        rows = self.sampled.nonzero()[:, 0] if host else torch.arange(len(value), device=value.device)
        bits = random_bits(self._key[rows], self._offset[rows], self._rows[rows], step, start, stop)
        drawn = value.index_copy(0, rows, value[rows] / self.divisor[rows, None] + gumbel(bits))
        return torch.where(self.sampled[:, None], drawn, value)


def reference(context: ExecutorContext) -> ReferenceExecutor:
    return ReferenceExecutor("reference", context, Bf16Rows(context))


def reference_int8(context: ExecutorContext) -> ReferenceExecutor:
    return ReferenceExecutor("reference_int8", context, _Int8Rows(context))


def best_key(score: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[batch]` int64, each row's largest key; a rank without columns contributes one that is below all others."""
    if not len(ids):
        return torch.full(score.shape[:1], NO_KEY, device=score.device)
    # torch's max has the keys' order: NaN above all, the first of equals. One pass instead of a key for every id.
    best, where = score.max(dim=-1)
    return walk_key(best, ids[where])


def _local_columns(inputs: WalkInputs, context: ExecutorContext) -> torch.Tensor:
    start = context.shard.start if inputs.base_is_full else 0
    return inputs.base_logits[..., start : start + context.shard.width]


def _without_inert_rows(inputs: WalkInputs, device: torch.device) -> WalkInputs:
    """On the CPU, where the host may look at num_valid: the arguments cut down to the valid rows."""
    if inputs.num_valid is None or device.type != "cpu":
        return inputs
    valid = min(max(int(inputs.num_valid), 0), inputs.tokens.shape[0])
    return inputs._replace(
        base_logits=inputs.base_logits[:valid],
        anchors=inputs.anchors[:valid],
        temperatures=None if inputs.temperatures is None else inputs.temperatures[:valid],
        num_valid=None,
        tokens=inputs.tokens[:valid],
        logits_out=None if inputs.logits_out is None else inputs.logits_out[:valid],
        lse_out=None if inputs.lse_out is None else inputs.lse_out[:valid],
    )


def _live_rows(inputs: WalkInputs) -> torch.Tensor:
    rows = torch.arange(inputs.tokens.shape[0], device=inputs.tokens.device)
    return rows >= 0 if inputs.num_valid is None else rows < inputs.num_valid


def _store(out: torch.Tensor, values: torch.Tensor, live: torch.Tensor) -> None:
    """Writes the live rows and leaves the others as they are, without a look at `live` by the host."""
    out.copy_(torch.where(live.view(-1, *[1] * (out.ndim - 1)), values, out))


def _per_row(value: int | torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """`[batch]` int64 from an int of up to 64 bits or a tensor `[1]` or `[batch or more]`."""
    if isinstance(value, int):
        signed = (value + 2**63) % 2**64 - 2**63
        return torch.full((batch,), signed, dtype=torch.int64, device=device)
    return value.clone()[:batch] if value.numel() > 1 else value.repeat(batch)


def _launch_fields(plan: str, rounding: Rounding, inputs: WalkInputs) -> dict[str, int]:
    """What must be the same on every rank, as integers."""
    batch, gamma = inputs.tokens.shape
    noise = inputs.noise if inputs.temperatures is not None else None
    return {
        "batch": batch,
        "gamma": gamma,
        "plan": PLAN_NAMES.index(plan),
        "rounding": ROUNDINGS.index(rounding),
        "logits": LOGITS_MODES.index(inputs.logits),
        "logits_rows": LOGITS_ROWS.index(inputs.logits_rows),
        "lse": int(inputs.lse_out is not None),
        "num_valid": batch if inputs.num_valid is None else int(inputs.num_valid),
        "anchors": _hash(inputs.anchors),
        "temperatures": 0 if inputs.temperatures is None else _hash(inputs.temperatures.view(torch.int32)),
        "noise key": 0 if noise is None else _hash(noise.key),
        "noise offset": 0 if noise is None else _hash(noise.offset),
        "noise rows": 0 if noise is None or noise.rows is None else _hash(noise.rows),
    }


def _hash(value: int | torch.Tensor) -> int:
    """An int64 that differs, almost surely, where the integers or their order differ."""
    if isinstance(value, int):
        return (value + 2**63) % 2**64 - 2**63
    weights = (2 * torch.arange(value.numel(), device=value.device) + 1) * 0x1E3779B97F4A7C15
    return int((value.long() * weights).sum())

"""What a plan is, and the seam between WalkRuntime and the code that runs a plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from tp_walk.config import Deadline, LogitsMode, LogitsRows, Rounding, WalkShape
from tp_walk.errors import PlanUnavailableError
from tp_walk.shard import Shard

if TYPE_CHECKING:
    from tp_walk.group import WalkGroup
    from tp_walk.head import MarkovHead
    from tp_walk.noise import Noise
    from tp_walk.peer_logits import PeerLogits

PLAN_NAMES = ("tp_bf16", "int8", "int8_split", "certified", "reference", "reference_int8")

# The definitions run anywhere and take memory only once they are walked, so that a kill switch always has its plan.
REFERENCE_PLANS = ("reference", "reference_int8")

# auto_select leaves these out of walks that ask for logits or log-sum-exps: int8_split exchanges them by collectives
# that take longer than the walk, and certified is then the walk of tp_bf16, of which its measured time isn't.
SLOW_TO_REPORT = ("int8_split", "certified")


def is_taken_on_demand(name: str, device: torch.device) -> bool:
    """Whether a plan is built at its first walk rather than with the runtime: the definitions, and on the CPU
    `certified`, which is one there."""
    return name in REFERENCE_PLANS or (name == "certified" and device.type == "cpu")


@dataclass(frozen=True)
class Plan:
    """A way to run a walk, and why it was chosen.

    expected_us: predicted µs of one block, runner_up: the next best plan, margin: its predicted time over this one's
    (all None when nothing was measured). provenance: where the choice comes from, in words.
    """

    name: str
    expected_us: float | None = None
    runner_up: str | None = None
    margin: float | None = None
    provenance: str = "named by the caller"


class WalkInputs(NamedTuple):
    """One walk's arguments, validated by WalkRuntime; every tensor is on the runtime's device.

    base_logits: `[batch, gamma, width]` bf16 (fp32 too when rounding is "none"), any row stride, last stride 1.
    base_is_full: the columns are ids `[0, V)`; otherwise this rank's shard. More columns than that are padding.
    anchors: `[batch]` int32 or int64, any stride. temperatures: `[batch]` float32 or None (all greedy).
    noise: given whenever temperatures are. num_valid: int32 scalar; rows from there on are inert.
    tokens: `[batch, gamma]` int64, written. logits_out: `[batch, gamma, width or V]` written, bf16 (fp32 when rounding
    is "none"), None when logits is "none". lse_out: `[batch, gamma]` float32, written, or None.
    """

    base_logits: torch.Tensor
    base_is_full: bool
    anchors: torch.Tensor
    temperatures: torch.Tensor | None
    noise: Noise | None
    num_valid: torch.Tensor | None
    logits: LogitsMode
    logits_rows: LogitsRows
    tokens: torch.Tensor
    logits_out: torch.Tensor | None
    lse_out: torch.Tensor | None


class WalkOutput(NamedTuple):
    """A walk's results; given as `walk(out=…)`, the buffers that it writes into, of just these shapes and contiguous.

    tokens: `[batch, gamma]` int64, target ids.
    logits: `[batch, gamma, shard width]` ("local") or `[batch, gamma, V]` ("full"), bf16; float32 with rounding "none".
    lse: `[batch, gamma]` float32, log-sum-exp of logit / T over the whole vocabulary (T = 1 for greedy rows): within
    1e-5 and a rounding to float32 of the exact value of the same logits, the same bits on every rank.
    plan: the plan that ran.

    What wasn't asked for is None. Rows from num_valid on aren't written, nor are the logits of greedy rows with
    logits_rows "sampled".
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class ExecutorContext:
    """What an executor is built from.

    head: the weights; rows of W2 only through `head.w2_rows`. w1 `[V_target(+), r]` bf16 and d2t `[V]` int64 or None
    are on `device` already, shared by all executors of the runtime.
    shards: every rank's, in rank order; shard: this rank's. peer_logits: the output buffers that all ranks map.
    """

    head: MarkovHead
    w1: torch.Tensor
    d2t: torch.Tensor | None
    shape: WalkShape
    shards: tuple[Shard, ...]
    shard: Shard
    group: WalkGroup
    device: torch.device
    max_batch: int
    max_gamma: int
    rounding: Rounding
    deadline: Deadline
    peer_logits: PeerLogits


class PlanExecutor(Protocol):
    """Runs one plan. All calls but those that ask (`memory_bytes`, `check`, `clamped_anchor`) are collectives, in the
    same order on every rank.
    """

    name: str

    def memory_bytes(self) -> int:
        """Device bytes that this plan alone holds (W1 and d2t are the runtime's)."""
        ...

    def walk(self, inputs: WalkInputs) -> None:
        """Enqueues the walk, and the advance of a device-side noise offset if temperatures are given."""
        ...

    def check(self) -> None:
        """Raises WalkTimeout or WalkMismatch if the host can know of a failure. No device synchronisation."""
        ...

    def clamped_anchor(self) -> tuple[int, int] | None:
        """Block and row of the last anchor out of range that the device clamped, as far as it tells; None if none."""
        ...

    def counts(self) -> dict[str, int]:
        """What the plan has counted since it was built, by name; empty where nothing is. May read device memory."""
        ...

    def reset(self) -> None:
        """Brings a failed executor back, once all ranks are alive."""
        ...

    def reload(self, context: ExecutorContext) -> None:
        """Takes the context's new weights, of the same shapes. On CUDA into the same memory, so that captured graphs
        stay valid; the context's w1 and d2t are refilled in place there, too."""
        ...

    def close(self) -> None:
        """Frees everything; idempotent."""
        ...


ExecutorFactory = Callable[[ExecutorContext], PlanExecutor]


def _lazy(module: str, name: str) -> ExecutorFactory:
    """A factory that imports its module when called, so that importing tp_walk touches no GPU library."""

    def build(context: ExecutorContext) -> PlanExecutor:
        try:
            factory: ExecutorFactory = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise PlanUnavailableError(f"{module} can't be imported: {error}") from error
        return factory(context)

    return build


# A factory raises PlanUnavailableError where its plan can't run. All ranks build together, and WalkRuntime votes on the
# outcome, so a factory that works alone may simply raise. One that talks to other ranks ends each of its stages with
# WalkGroup.stage or .vote, frees what it took before it raises, and so returns on all ranks or on none: only then may
# its executor's close() talk to them.
EXECUTORS: dict[str, ExecutorFactory] = {
    "tp_bf16": _lazy("tp_walk.executors", "TpBf16Executor"),
    "int8": _lazy("tp_walk.int8_executors", "Int8Executor"),
    "int8_split": _lazy("tp_walk.int8_executors", "Int8SplitExecutor"),
    "certified": _lazy("tp_walk.certified", "certified"),
    "reference": _lazy("tp_walk.reference", "reference"),
    "reference_int8": _lazy("tp_walk.reference", "reference_int8"),
}

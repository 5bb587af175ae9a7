"""WalkRuntime: weights, ranks and plans brought together, and the one call that walks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tp_walk.config import MAX_GAMMA, ROUNDINGS, Deadline, LogitsMode, LogitsRows, Rounding, WalkShape, settings
from tp_walk.errors import PlanUnavailableError, RuntimeClosedError, WalkError, WalkInputError, WalkMismatch
from tp_walk.group import WalkGroup
from tp_walk.head import MarkovHead, check_same_shapes
from tp_walk.inputs import InputChecker
from tp_walk.noise import Noise
from tp_walk.peer_logits import PeerLogits
from tp_walk.plan import EXECUTORS, PLAN_NAMES, ExecutorContext, Plan, PlanExecutor, WalkOutput, is_taken_on_demand
from tp_walk.plan_table import Layout
from tp_walk.selection import Selector, agree_on_selector, select_here
from tp_walk.shard import Shard, check_shards, shard_bounds
from tp_walk.watcher import Watcher

_handles = itertools.count(1)
_open: weakref.WeakValueDictionary[int, WalkRuntime] = weakref.WeakValueDictionary()


class WalkRuntime:
    """The serial walk of a Markov head, ready to run.

    Construction, `walk`, `reset`, `reload` and `close` are collectives over `group`: every rank calls them in the same
    order, with the same arguments. A context manager closes it; merely dropping it runs no collective.

    Args:
        head: the weights, the same on every rank. A plan reads only the rows of W2 that it needs.
        max_batch: the most requests in a walk.
        max_gamma: the most steps in a walk, 1..64.
        rounding: how base and bias become a logit: "engine", "once" or "none".
        group: the ranks that W2 is split over, a torch.distributed group (gloo is enough); None for a world of one.
        device: where it walks; by default the current CUDA device where there is one, else the CPU.
        shard: this rank's rows of W2, a Shard or (start, stop), where the engine's split isn't the default one.
        plans: names of the plans to hold in memory; by default every one that can run here. The reference plans are
            always at hand; one that wasn't named takes its memory at its first walk.
        deadline: how long a rank waits for the others; Deadline() by default.
        on_poison: called from a host thread with the error of a walk that failed, once for each failure: a graph's
            replay runs no Python that could raise it.

    Attributes:
        shard: this rank's rows of W2. world_size, rank: of the group. device: as chosen. logits_dtype: of the outputs.
        handle: an int by which `torch.ops.tp_walk.walk` finds this runtime.

    Raises:
        WalkInputError: a bad argument, by name and value.
        WalkMismatch: the ranks were given different arguments or heads of different shapes.
        PlanUnavailableError: a plan in `plans`, or the one that TP_WALK_PLAN forces, can't run here.
        SetupError: anything else. Whatever fails on one rank is raised alike on every rank.
    """

    def __init__(
        self,
        head: MarkovHead,
        max_batch: int = 64,
        max_gamma: int = 16,
        rounding: Rounding = "engine",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        shard: Shard | tuple[int, int] | None = None,
        plans: Sequence[str] | None = None,
        deadline: Deadline | None = None,
        on_poison: Callable[[Exception], None] | None = None,
    ) -> None:
        self._closed = False
        self._executors: dict[str, PlanExecutor] = {}
        self._refused: dict[str, str] = {}
        self._walks: dict[str, int] = {}
        self._requests = self._drafted = 0
        deadline = Deadline() if deadline is None else deadline
        forced = settings().plan
        self.device = _device(device)
        self._group = WalkGroup(group, self.device, deadline.startup_s)
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self._group.stage("check of the arguments", lambda: _check(max_batch, max_gamma, rounding, plans, forced))
        self._agree(
            {
                "vocab_size": head.vocab_size,
                "target_vocab_size": head.target_vocab_size,
                "markov_rank": head.markov_rank,
                "the presence of d2t": head.d2t is not None,
                "max_batch": max_batch,
                "max_gamma": max_gamma,
                "rounding": rounding,
                "plans": plans,
                "deadline": deadline,
                "device type": self.device.type,
                "TP_WALK_PLAN": forced,
            }
        )
        shards = self._gather_shards(head.vocab_size, shard)
        self.shard = shards[self.rank]
        # `reload` writes into what captured graphs read, which must not be the caller's own head.
        is_cuda = self.device.type == "cuda"
        w1, d2t = self._group.stage("load of W1", lambda: head.tables_on(self.device, copy=is_cuda))
        self._context = ExecutorContext(
            head=head,
            w1=w1,
            d2t=d2t,
            shape=WalkShape(head.vocab_size, head.markov_rank, self.world_size),
            shards=shards,
            shard=self.shard,
            group=self._group,
            device=self.device,
            max_batch=max_batch,
            max_gamma=max_gamma,
            rounding=rounding,
            deadline=deadline,
            peer_logits=PeerLogits(self._group, self.device),
        )
        self._inputs = InputChecker(
            head.vocab_size, head.target_vocab_size, self.shard, max_batch, max_gamma, rounding, self.device
        )
        self.logits_dtype = self._inputs.logits_dtype
        self._forced = None if forced is None else Plan(forced, provenance="forced by TP_WALK_PLAN")
        self._named = {name: Plan(name) for name in PLAN_NAMES}
        self._usual_layout: Layout = "sharded" if self.world_size > 1 else "full"
        self._selector: Selector
        try:
            self._hold(plans)
        except BaseException:
            with contextlib.suppress(WalkError):  # what went wrong first is what to tell
                self._free()
            raise
        self._watcher = None if on_poison is None else Watcher(self.check, on_poison)
        self.handle = next(_handles)
        _open[self.handle] = self

    def walk(
        self,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        noise: Noise | None = None,
        plan: Plan | str | None = None,
        logits: LogitsMode = "none",
        logits_rows: LogitsRows = "all",
        num_valid: torch.Tensor | None = None,
        out: WalkOutput | None = None,
        lse: bool = False,
    ) -> WalkOutput:
        """Walks gamma steps for every request; one block.

        Args:
            base_logits: `[batch, gamma, width]` bf16 (float32 too with rounding "none"), any row stride, last stride 1.
                width ≥ V: columns are ids, this rank's are picked out. Narrower: this rank's shard, padded at will.
            anchors: `[batch]` int64 or int32, any stride, target ids in `[0, rows of W1)`.
            temperatures: `[batch]` float32; T ≤ 0 or NaN is greedy, as are all rows without temperatures.
            noise: where sampled rows draw from; needed with temperatures, unread without.
            plan: a Plan, a plan's name, or None for `auto_select`. TP_WALK_PLAN goes before all of them.
            logits: "none", "local" (this rank's columns) or "full" (all, on every rank).
            logits_rows: "all", or "sampled" to write only the rows with T > 0.
            num_valid: int32 scalar on the device; rows from there on are inert: no store, no noise, no error.
            out: buffers to write into; what it lacks is made.
            lse: also return each step's log-sum-exp of logit / T over the whole vocabulary (T = 1 for greedy rows).

        An empty batch returns at once and touches neither device nor ranks.

        Raises:
            WalkInputError: a bad argument. PlanUnavailableError: a plan that isn't held, or can't run here.
            WalkTimeout, WalkMismatch: the ranks failed each other; the tokens are the anchors. RuntimeClosedError.
        """
        if self._closed:
            raise RuntimeClosedError("this WalkRuntime is closed; make a new one")
        inputs = self._inputs(base_logits, anchors, temperatures, noise, logits, logits_rows, num_valid, out, lse)
        batch, gamma = inputs.tokens.shape
        layout: Layout = "full" if inputs.base_is_full else "sharded"
        chosen = self._plan(plan, lse or logits != "none", (batch, gamma, temperatures is not None, layout))
        if batch:
            self._executor(chosen.name).walk(inputs)
            self._walks[chosen.name] = self._walks.get(chosen.name, 0) + 1
            self._requests += batch
            self._drafted += batch * gamma
        return WalkOutput(inputs.tokens, inputs.logits_out, inputs.lse_out, chosen)

    def auto_select(
        self, batch: int, gamma: int | None = None, sampled: bool = False, layout: Layout | None = None
    ) -> Plan:
        """The plan for a walk of this size: the fastest by the measured table of this machine, else by a cost model.
        The same on every rank.

        gamma: max_gamma if it isn't given. layout: of the base logits, "sharded" or "full"; sharded where there are
        several ranks if it isn't given.

        Raises:
            WalkInputError: batch or gamma is outside this runtime's limits.
        """
        context = self._context
        gamma = context.max_gamma if gamma is None else gamma
        if not 0 <= batch <= context.max_batch:
            raise WalkInputError(f"the batch is {batch}; this runtime was made with max_batch={context.max_batch}")
        if not 1 <= gamma <= context.max_gamma:
            raise WalkInputError(f"gamma is {gamma}; it must be in 1..{context.max_gamma}, this runtime's max_gamma")
        return self._plan(None, False, (batch, gamma, sampled, layout or self._usual_layout))

    def memory_bytes(self, plan: Plan | str) -> int:
        """Bytes on the device that the plan holds for itself, 0 if it isn't held. W1 and d2t come on top, once."""
        name = plan.name if isinstance(plan, Plan) else plan
        if name not in PLAN_NAMES:
            raise WalkInputError(f"plan is {name!r}; it must be one of {', '.join(PLAN_NAMES)}")
        return self._executors[name].memory_bytes() if name in self._executors else 0

    def logits_buffer(
        self, batch: int | None = None, gamma: int | None = None, logits: LogitsMode = "full"
    ) -> torch.Tensor:
        """A buffer for `walk(out=…)`: `[batch, gamma, columns of the mode]`, of the logits' dtype, uninitialised.

        batch, gamma: the runtime's maxima if they aren't given.
        "full", where tp_bf16 runs on several GPUs: memory that every rank's kernel writes into while the walk goes on.
        Any other costs a copy. Making one is a collective, and all ranks walk with the same one, or its first rows. It
        lasts until `close`; from a failed walk until `reset` a peer may still write into it for a moment. Raises
        SetupError or PlanUnavailableError where a rank can't allocate or map it, alike on every rank.
        """
        batch = self._context.max_batch if batch is None else batch
        gamma = self._context.max_gamma if gamma is None else gamma
        shape = batch, gamma, self.logits_width(logits)
        if logits == "full" and self.world_size > 1 and "tp_bf16" in self._executors:
            return self._context.peer_logits.make(shape, self.logits_dtype)
        return torch.empty(shape, dtype=self.logits_dtype, device=self.device)

    def logits_width(self, logits: LogitsMode) -> int:
        """Columns of the logits of a mode: the shard's width for "local", V for "full"."""
        if logits not in ("local", "full"):
            raise WalkInputError(f"logits is {logits!r}; columns are for 'local' or 'full'")
        return self._inputs.logits_width(logits)

    def check(self) -> None:
        """Raises the WalkTimeout or WalkMismatch of a failed walk. A host read: it waits for nothing."""
        if self._closed:
            raise RuntimeClosedError("this WalkRuntime is closed; make a new one")
        for executor in list(self._executors.values()):  # a copy: the watcher's thread looks, too
            executor.check()

    def reset(self) -> None:
        """Brings failed plans back, once every rank is alive and calls it. Raises alike on every rank if it can't."""
        if self._closed:
            raise RuntimeClosedError("this WalkRuntime is closed; make a new one")
        for executor in self._executors.values():
            executor.reset()

    def standby(self) -> Plan:
        """The plan to walk with while another has failed and waits for its reset: the one-GPU int8 where it is held,
        which needs the other ranks for sharded base logits alone; else the definition, which needs them all.

        It depends on what is held, not on what has failed, so every rank names the same, whatever it has noticed yet.
        """
        return Plan("int8" if "int8" in self._executors else "reference", provenance="stands in until reset()")

    def stats(self) -> dict[str, Any]:
        """Counts since construction: "walks" by plan, "requests" and drafted "tokens" (padded rows count, too; graph
        replays run no Python and don't); "memory_bytes" by plan held; "not_held", the other plans with the reason;
        "clamped_anchors", by plan the (block, row) of the last anchor out of range, which a kernel clamps; "counts", by
        plan what it counts itself, graph replays too: reading that waits for the device."""
        return {
            "walks": dict(self._walks),
            "requests": self._requests,
            "tokens": self._drafted,
            "memory_bytes": {name: one.memory_bytes() for name, one in self._executors.items()},
            "counts": {name: counts for name, one in self._executors.items() if (counts := one.counts())},
            "clamped_anchors": {name: at for name, one in self._executors.items() if (at := one.clamped_anchor())},
            "not_held": {name: self._why_not_held(name) for name in PLAN_NAMES if name not in self._executors},
        }

    def explain(self, batch: int, gamma: int | None = None, sampled: bool = False, layout: Layout | None = None) -> str:
        """Why `auto_select` answers as it does, and what became of every plan: one line each, for people."""
        plan = self.auto_select(batch, gamma, sampled, layout)
        times, _ = self._selector.times(
            max(batch, 1), gamma or self._context.max_gamma, sampled, layout or self._usual_layout
        )
        lines = [f"batch {batch}: {plan.name} ({plan.provenance})"]
        for name in PLAN_NAMES:
            executor = self._executors.get(name)
            if executor is None:
                lines.append(f"  {name}: {self._why_not_held(name)}")
                continue
            expected = f", {times[name]:.1f} µs expected" if name in times else ""
            lines.append(f"  {name}: held, {executor.memory_bytes() / 1e6:.1f} MB{expected}")
            try:
                executor.check()
            except WalkError as error:
                lines[-1] += f"; failed: {error}; until reset(), walk with plan={self.standby().name!r}"
        return "\n".join(lines)

    def reload(self, head: MarkovHead) -> None:
        """Takes the weights of another head of the same shapes. On CUDA they go into the same memory: captured graphs
        stay valid. A plan that can't take them is dropped, and its error raised once the others have theirs.

        Raises:
            WalkInputError: the head's shapes differ from those of the head that the runtime was made with.
            PlanUnavailableError, SetupError: alike on every rank.
        """
        if self._closed:
            raise RuntimeClosedError("this WalkRuntime is closed; make a new one")
        context = self._context

        def load() -> ExecutorContext:
            check_same_shapes(context.head, head)
            w1, d2t = head.tables_on(self.device)
            if self.device.type == "cuda":
                w1 = context.w1.copy_(w1)
                d2t = d2t if context.d2t is None or d2t is None else context.d2t.copy_(d2t)
            return dataclasses.replace(context, head=head, w1=w1, d2t=d2t)

        self._context = context = self._group.stage("load of W1", load)
        self._refused.clear()
        failure: WalkError | None = None
        for name, executor in list(self._executors.items()):
            try:
                self._group.stage(f"reload of plan {name}", partial(executor.reload, context))
            except WalkError as error:
                self._refused[name] = str(error)
                failure = failure or error
                self._executors.pop(name).close()
        self._selector = self._selector.among(self._executors or ("reference",))
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Frees everything, together with the other ranks. Idempotent.

        Raises:
            WalkTimeout: a rank is lost. What it may still map stays allocated; the rest is freed.
        """
        if not self._closed:
            self._closed = True
            _open.pop(self.handle, None)
            if self._watcher is not None:
                self._watcher.stop()
            self._free()

    def __enter__(self) -> WalkRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _agree(self, mine: dict[str, Any]) -> None:
        """Raises WalkMismatch on every rank where a rank's arguments differ."""
        gathered = self._group.all_gather_object(mine)
        for name, first in gathered[0].items():
            for rank, theirs in enumerate(gathered):
                if theirs[name] != first:
                    raise WalkMismatch(
                        f"ranks disagree on {name}: {first!r} on rank 0, {theirs[name]!r} on rank {rank}; "
                        f"make the runtime with the same arguments on every rank"
                    )

    def _gather_shards(self, vocab_size: int, shard: Shard | tuple[int, int] | None) -> tuple[Shard, ...]:
        def own() -> Shard:
            if shard is None:
                return shard_bounds(vocab_size, self.world_size)[self.rank]
            start, stop = (shard.start, shard.stop) if isinstance(shard, Shard) else shard
            return Shard(int(start), int(stop))

        shards = self._group.all_gather_object(self._group.stage("choice of the shard", own))
        check_shards(shards, vocab_size)  # every rank sees the same shards, and raises the same
        return tuple(shards)

    def _hold(self, plans: Sequence[str] | None) -> None:
        if self._forced is not None:
            plans = [self._forced.name]  # no other can run, and a kill switch mustn't need what it switches off
        if plans is None:
            for name in [name for name in EXECUTORS if not is_taken_on_demand(name, self.device)]:
                with contextlib.suppress(PlanUnavailableError):  # explain() has the reason
                    self._build(name)
        for name in dict.fromkeys(plans or ()):
            self._build(name)
        if not self._executors:
            self._build("reference")
        self._selector = agree_on_selector(self._group, self.device, self._context.shape, self._executors)

    def _build(self, name: str) -> PlanExecutor:
        def build() -> None:
            self._executors[name] = EXECUTORS[name](self._context)

        try:
            self._group.stage(f"set-up of plan {name}", build)
        except WalkError as error:
            self._refused[name] = str(error)
            if name in self._executors:
                self._executors.pop(name).close()
            raise
        return self._executors[name]

    def _executor(self, name: str) -> PlanExecutor:
        executor = self._executors.get(name)
        if executor is None:
            if not is_taken_on_demand(name, self.device) or name in self._refused:
                raise PlanUnavailableError(f"plan {name} isn't held: {self._why_not_held(name)}")
            executor = self._build(name)
        return executor

    def _why_not_held(self, name: str) -> str:
        if name in self._refused:
            return self._refused[name]
        if is_taken_on_demand(name, self.device):
            return "takes its memory at its first walk"
        return "not among this runtime's plans="

    def _plan(self, plan: Plan | str | None, reports: bool, size: tuple[int, int, bool, Layout]) -> Plan:
        if self._forced is not None:
            return self._forced
        if isinstance(plan, Plan):
            return plan
        if plan is None:
            return (self._selector.reporting if reports else self._selector)(*size)
        if plan not in self._named:
            raise WalkInputError(f"plan is {plan!r}; it must be a Plan, None or one of {', '.join(PLAN_NAMES)}")
        return self._named[plan]

    def _free(self) -> None:
        """Closes every executor, also where one raises; then raises what the first one did."""
        failure: WalkError | None = None
        closes = [executor.close for executor in reversed(self._executors.values())]
        self._executors.clear()
        for close in (*closes, self._context.peer_logits.close):
            try:
                close()
            except WalkError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def auto_select(
    batch: int,
    gamma: int | None = None,
    sampled: bool = False,
    layout: Layout | None = None,
    *,
    shape: WalkShape | None = None,
) -> Plan:
    """`WalkRuntime.auto_select` of the one runtime that is open in this process.

    shape: of a runtime to come. Where none is open, the answer is what this machine's table, or the cost model, says of
    such a runtime; gamma is 7 then if it isn't given.

    Raises:
        PlanUnavailableError: no runtime is open and no shape was given, or no GPU is here; or several are open.
    """
    runtimes = list(_open.values())
    if not runtimes and shape is not None:
        return select_here(shape, batch, gamma or 7, sampled, layout)
    if len(runtimes) != 1:
        raise PlanUnavailableError(
            f"{len(runtimes)} runtimes are open in this process; ask one by its own auto_select"
            if runtimes
            else "no WalkRuntime is open in this process; make one, or give the shape of the one to come"
        )
    return runtimes[0].auto_select(batch, gamma, sampled, layout)


def open_runtime(handle: int) -> WalkRuntime:
    """The open runtime with this `handle`. Raises RuntimeClosedError if there is none."""
    runtime = _open.get(handle)
    if runtime is None:
        raise RuntimeClosedError(f"no open WalkRuntime has the handle {handle}")
    return runtime


def _device(device: torch.device | str | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type not in ("cpu", "cuda"):
        raise WalkInputError(f"device is {chosen}; it must be a CUDA device or the CPU")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise WalkInputError(f"device is {chosen}, and torch finds no CUDA device here")
    return torch.empty(0, device=chosen).device  # "cuda" with its index, as tensors have it


def _check(max_batch: int, max_gamma: int, rounding: Rounding, plans: Sequence[str] | None, forced: str | None) -> None:
    if max_batch < 1:
        raise WalkInputError(f"max_batch is {max_batch}; it must be at least 1")
    if not 1 <= max_gamma <= MAX_GAMMA:
        raise WalkInputError(f"max_gamma is {max_gamma}; it must be in 1..{MAX_GAMMA}")
    if rounding not in ROUNDINGS:
        raise WalkInputError(f"rounding is {rounding!r}; it must be one of {', '.join(ROUNDINGS)}")
    for source, names in (("plans", plans or ()), ("TP_WALK_PLAN", () if forced is None else (forced,))):
        for name in names:
            if name not in PLAN_NAMES:
                raise WalkInputError(f"{source} names {name!r}; plans are {', '.join(PLAN_NAMES)}")

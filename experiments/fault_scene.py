"""A rank in a case of the fault matrix: its runtime, what it can do wrong and where, and the notes that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from fault_ranks import Life

from tp_walk import Deadline, MarkovHead, Noise, WalkError, WalkOutput, WalkRuntime
from tp_walk.group import WalkGroup

T = TypeVar("T")

VICTIM = 1
BATCH, GAMMA, MAX_GAMMA = 3, 7, 16
FIRST_ANCHOR = 3
STAND_IN = "stand-in"

_TEMPERATURES = (0.0, 1.0, 0.7)


@dataclass(frozen=True)
class Setting:
    """Where cases are lived. device: "cpu" or "cuda" (ranks take GPUs in turns). plan: the one that walks. standby: the
    one that serves while that has failed and a rank is lost, None where only the definition could.
    """

    device: str
    plan: str
    vocab_size: int
    markov_rank: int
    deadline: Deadline
    max_batch: int = 8
    standby: str | None = None

    def device_of(self, rank: int) -> torch.device:
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % torch.cuda.device_count())


@dataclass(frozen=True)
class Note:
    """What became of one part of a case on one rank.

    kind, error: of what it raised, or None. began, ended: on the clock that all processes of a machine share. tokens:
    of a block; anchored: they are the anchors; right: they are the definition's.
    """

    part: str
    kind: str | None
    error: str
    began: float
    ended: float
    tokens: list[list[int]] | None = None
    anchored: bool = False
    right: bool = True


@dataclass(frozen=True)
class GivenWalk:
    """A walk's arguments, and the tokens that it writes."""

    base: torch.Tensor
    anchors: torch.Tensor
    temperatures: torch.Tensor | None
    noise: Noise
    tokens: torch.Tensor
    plan: str
    logits: Any
    logits_rows: Any
    valid: int

    def run(self, runtime: WalkRuntime) -> None:
        valid = None
        if self.valid < len(self.anchors):
            valid = torch.tensor(self.valid, dtype=torch.int32, device=self.anchors.device)
        out = WalkOutput(self.tokens)
        arguments = self.base, self.anchors, self.temperatures, self.noise, self.plan, self.logits, self.logits_rows
        runtime.walk(*arguments, num_valid=valid, out=out)

    def is_anchored(self) -> bool:
        """Inert rows aside, which a walk leaves alone."""
        live = self.tokens[: self.valid]
        return torch.equal(live, self.anchors[: self.valid, None].expand_as(live))

    def is_right(self, alone: WalkRuntime) -> bool:
        plan = "reference_int8" if "int8" in self.plan else "reference"
        right = alone.walk(self.base, self.anchors, self.temperatures, self.noise, plan).tokens
        return torch.equal(self.tokens[: self.valid], right[: self.valid])


@cache
def head_of(setting: Setting, device: torch.device) -> MarkovHead:
    """Weights whose dot products are exact, so that every plan has the definition's tokens."""
    generator = torch.Generator().manual_seed(1)
    w1, w2 = (
        torch.randint(-4, 5, (setting.vocab_size, setting.markov_rank), generator=generator).div(8.0).bfloat16()
        for _ in range(2)
    )
    return MarkovHead(w1.to(device), w2.to(device))


@cache
def base_of(setting: Setting, device: torch.device) -> torch.Tensor:
    base = torch.randn(setting.max_batch, MAX_GAMMA, setting.vocab_size, generator=torch.Generator().manual_seed(2))
    return base.mul(3.0).bfloat16().to(device)


@cache
def alone_of(setting: Setting, device: torch.device) -> WalkRuntime:
    """The definition, on this rank by itself."""
    head = head_of(setting, device)
    return WalkRuntime(head, setting.max_batch, MAX_GAMMA, device=device, plans=["reference"])


class Scene:
    """A rank of a case: its runtime, and the notes that it takes."""

    def __init__(self, life: Life, setting: Setting) -> None:
        self.life, self.setting = life, setting
        self.rank, self.is_victim = life.rank, life.rank == VICTIM
        self.device = setting.device_of(life.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.head = head_of(setting, self.device)
        self.base = base_of(setting, self.device)
        self.alone = alone_of(setting, self.device)
        self.runtime: WalkRuntime | None = None
        self.notes: list[Note] = []
        self.blocks = 0

    def note(self, part: str, action: Callable[[], T]) -> T | None:
        """Runs a part; what it raises of this package is noted, and anything else ends the case."""
        began = time.monotonic()
        try:
            result = action()
        except WalkError as error:
            self.notes.append(Note(part, type(error).__name__, str(error), began, time.monotonic()))
            return None
        self.notes.append(Note(part, None, "", began, time.monotonic()))
        return result

    def open_with_standby(self, **different: Any) -> None:
        """A runtime that also holds the plan that stands in."""
        self.open(plans=[plan for plan in (self.setting.plan, self.setting.standby) if plan], **different)

    def open(self, **different: Any) -> None:
        """A runtime of all ranks; `different` overrides its arguments."""
        arguments: dict[str, Any] = {"deadline": self.setting.deadline, "plans": [self.setting.plan], **different}

        def make() -> WalkRuntime:
            sizes = self.setting.max_batch, MAX_GAMMA
            return WalkRuntime(self.head, *sizes, group=dist.group.WORLD, device=self.device, **arguments)

        self.runtime = self.note("set-up", make)

    def close(self) -> None:
        if self.runtime is not None:
            self.note("close", self.runtime.close)

    def reset(self) -> None:
        if self.runtime is not None:
            self.note("reset", self.runtime.reset)

    def block(self, after_launch: Callable[[], None] = lambda: None, **different: Any) -> None:
        """A block, waited for and checked as an engine does; `different` overrides what it is given."""
        if self.runtime is not None:
            self.blocks += 1
            walk = self.given(**different)

            def run() -> None:
                walk.run(self.open_runtime)
                after_launch()
                self.wait()

            self.watch(f"block {self.blocks}", walk, run)

    def recover(self, action: str | None) -> None:
        """After a fault on a GPU: a reset and a block where all ranks live, else a block by the plan that stands in.
        The definitions have nothing but their group, which ends with a rank that is lost.
        """
        if self.runtime is None or self.device.type == "cpu":
            return
        if action == "killed":
            walk = self.given(plan=self.runtime.standby().name)
            self.watch(STAND_IN, walk, lambda: walk.run(self.open_runtime), asks=False)
            return
        if action == "stopped" and not self.is_victim:
            self.life.resume_victim()
        self.reset()
        self.block()

    def watch(self, part: str, walk: GivenWalk, run: Callable[[], object], asks: bool = True) -> None:
        """Notes what becomes of a block that `run` walks. asks: the host does at the end, about all plans."""
        began = time.monotonic()
        kind, error = None, ""
        try:
            run()
            if asks:
                self.open_runtime.check()
        except WalkError as raised:
            kind, error = type(raised).__name__, str(raised)
        ended = time.monotonic()
        self.notes.append(
            Note(part, kind, error, began, ended, walk.tokens.tolist(), walk.is_anchored(), walk.is_right(self.alone))
        )

    @property
    def open_runtime(self) -> WalkRuntime:
        assert self.runtime is not None
        return self.runtime

    def given(
        self,
        batch: int = BATCH,
        gamma: int = GAMMA,
        anchor: int = FIRST_ANCHOR,
        temperatures: tuple[float, ...] | None = _TEMPERATURES,
        key: int = 5,
        offset: int | None = None,
        rows: int = 0,
        valid: int | None = None,
        plan: str | None = None,
        logits: Any = "none",
        logits_rows: Any = "all",
    ) -> GivenWalk:
        """A walk to be. anchor: of the first request; the others count on from there, as do rows."""
        device = self.device
        order = torch.arange(batch, device=device)
        offset = self.blocks if offset is None else offset
        return GivenWalk(
            self.base[:batch, :gamma],
            order + anchor,
            None if temperatures is None else torch.tensor((temperatures * batch)[:batch], device=device),
            Noise(key, offset, order + rows),
            torch.full((batch, gamma), -1, device=device),
            plan or self.setting.plan,
            logits,
            logits_rows,
            batch if valid is None else valid,
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def act(self, action: str | None) -> None:
        """What the victim does. Stopped, it goes on once the others have reported."""
        if action == "raises":
            raise RuntimeError("injected")
        if action is not None:
            getattr(self.life, {"killed": "kill", "stopped": "stop"}[action])()


@contextmanager
def at_stage(name: str, action: Callable[[], None]) -> Iterator[None]:
    """`action` happens at the beginning of the stage of set-up with this name."""
    stage = WalkGroup.stage

    def with_fault(self: WalkGroup, name_here: str, inner: Callable[[], T]) -> T:
        def act_first() -> T:
            if name_here == name:
                action()
            return inner()

        return stage(self, name_here, act_first)

    with mock.patch.object(WalkGroup, "stage", with_fault):
        yield


@contextmanager
def at_exchange(number: int, action: Callable[[], None]) -> Iterator[None]:
    """`action` happens before the number-th exchange of tokens (from 0) of a walk by a definition."""
    exchange, seen = WalkGroup.all_reduce_max, [0]

    def with_fault(self: WalkGroup, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
        if seen[0] == number:
            action()
        seen[0] += 1
        return exchange(self, tensor, timeout_s)

    with mock.patch.object(WalkGroup, "all_reduce_max", with_fault):
        yield

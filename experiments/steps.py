#!/usr/bin/env python3
"""Where does a step's time go? Measured by leaving parts out of the kernel: by how much does a block get faster?

    python experiments/steps.py --budget-seconds 200

tp_bf16 on all GPUs of this machine (1, 2, 4 or 8 of them) and int8 on each of them alone, on builds of the kernel that
lack a part (`kernel_variants.LEFT_OUT`), on the whole one, and on that launched without the cooperative attribute.
Those of a size share one runtime, so that W2 and mailboxes lie at the same addresses, and take turns. All kernels are
compiled first, by all cores. Each step is told with the seconds that have passed, and rows are written as they come, so
that a run that is cut leaves what it has and says how far it came.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import kernel_variants
import torch
from kernel_variants import EXCHANGE, LEFT_OUT, NOISE, PRODUCTS, ROWS, STEPS, W2, U, VariantJob

from tp_walk import Deadline, MarkovHead, Noise, WalkOutput, WalkRuntime, executors, jit, kernels
from tp_walk.bench import EMPTY, numbers
from tp_walk.errors import WalkError
from tp_walk.executors import KernelExecutor
from tp_walk.group import WalkGroup
from tp_walk.kernels import THREADS, Specialisation
from tp_walk.launches import Launch
from tp_walk.precompile import Target, compile_together, current_gpu
from tp_walk.ranks import run_ranks
from tp_walk.results import Column, ResultTable, environment
from tp_walk.shard import shard_bounds
from tp_walk.timing import METHOD, BlockTimer, CapturedWork, Timing
from tp_walk.workload import Ranks

RESULT = Path(__file__).parent / "results" / "steps.json"
MARKOV_RANK = 256
PLANS = ("tp_bf16", "int8")
NOISE_KEY, SEED = 0x5EED, 7
# startup_s is for set-up: walks have steady_s from the first on, so that a build whose waits expire costs a second.
DEADLINE = Deadline(startup_s=20.0, steady_s=1.0)
# Waits within a CTA have no deadline: what has not ended by now never does.
HANG_S = 5.0

WHOLE, PLAIN = "production", "not cooperative"
BUILDS = (WHOLE, *LEFT_OUT)
# Their keys in the result. What a step does is told per step, too.
KEYS = {
    PRODUCTS: "products",
    ROWS: "rows",
    EXCHANGE: "exchange",
    U: "u",
    NOISE: "noise",
    STEPS: "steps",
    W2: "w2",
    PLAIN: "cooperative",
}
PER_BLOCK = (W2, PLAIN)

COLUMNS = (
    Column("where", "plan"),
    Column("batch", "batch"),
    Column("gamma", "γ"),
    Column("mode", "mode"),
    Column("whole_us", "whole"),
    Column("products_text", "dot products"),
    Column("rows_text", "base logits, rounding, best row"),
    Column("exchange_text", "exchange"),
    Column("u_text", "fetch of u"),
    Column("noise_text", "noise"),
    Column("steps_text", "all steps"),
    Column("w2_text", "load of W2"),
    Column("cooperative_text", "cooperative launch"),
    Column("empty_us", "empty launch"),
)


@dataclass(frozen=True)
class Size:
    """A row of the table to be."""

    plan: str
    batch: int
    gamma: int
    sampled: bool


@dataclass(frozen=True)
class Options:
    """What to measure. budget_s: no size is begun after so many seconds from `began`, a time.time(), on. out: written
    on rank 0 after each.
    """

    vocab_size: int
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    iterations: int
    budget_s: float
    out: Path
    began: float

    def elapsed_s(self) -> float:
        return time.time() - self.began

    def say(self, text: str) -> None:
        click.echo(f"{self.elapsed_s():6.1f} s  {text}")

    def gammas_of(self, batch: int) -> tuple[int, ...]:
        """All of them at the smallest batch; else the first, as every step is like the others."""
        return self.gammas if batch == self.batches[0] else self.gammas[:1]

    def sizes(self, plan: str, batch: int) -> list[Size]:
        """The most important ones first: both modes of a γ, then the next γ."""
        return [Size(plan, batch, gamma, sampled) for gamma in self.gammas_of(batch) for sampled in (False, True)]


def timed_specialisations(**arguments: Any) -> list[Specialisation]:
    """Of `kernels.specialisations`, with its arguments, those of walks of max_batch requests that report nothing."""
    found = [one for one in kernels.specialisations(**arguments) if one.logits == "none" and not one.base_fp32]
    return list({one.sampled: one for one in found}.values())  # the last of each serves the largest batches


def specialisations_of(plan: str, vocab_size: int, batch: int, world_size: int, target: Target) -> list[Specialisation]:
    ranks = world_size if plan == "tp_bf16" else 1
    return timed_specialisations(
        int8=plan == "int8",
        markov_rank=MARKOV_RANK,
        rows=max(shard.width for shard in shard_bounds(vocab_size, ranks)),
        world_size=ranks,
        max_batch=batch,
        rounding="engine",
        num_sms=target.num_sms,
        shared_limit=target.shared_limit,
    )


def builds(sampled: bool) -> tuple[str, ...]:
    """The builds that walks of this mode are timed on: greedy ones draw no noise."""
    return tuple(name for name in BUILDS if sampled or name != NOISE)


def jobs(options: Options, world_size: int, target: Target) -> list[VariantJob]:
    """Every kernel that is timed, once."""
    wanted = [
        VariantJob(plan, "walk.cu", "walk", tuple(one.macros.items()), name)
        for batch in options.batches
        for plan in PLANS
        for one in specialisations_of(plan, options.vocab_size, batch, world_size, target)
        for name in builds(one.sampled)
    ]
    return list(dict.fromkeys(wanted))


class PlainLaunch(Launch):
    """A launch that doesn't ask for all CTAs at once. They fit nonetheless: Launch has seen to that."""

    def __init__(self, what: str, kernel: jit.CompiledKernel, **configuration: Any) -> None:
        super().__init__(what, kernel, **configuration)
        self._config.attrs = []
        self._config.numAttrs = 0


@contextmanager
def ended_if_hung(what: str, limit_s: float) -> Iterator[None]:
    """Ends this process, and so the measurement, where what is done meanwhile takes longer: a kernel that hangs has no
    other end.
    """

    def end() -> None:
        click.echo(f"{what} hangs: given up after {limit_s:g} s", err=True)
        os._exit(1)

    watch = threading.Timer(limit_s, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


class Builds:
    """One plan's walks of one batch on every build. Construction and `captured` are collectives over `group`.

    ranks: who walks together. group: all ranks, as they are timed together. say: is told what is begun.

    Raises:
        WalkError: the runtime couldn't be made; alike on every rank.
    """

    def __init__(
        self,
        head: MarkovHead,
        plan: str,
        batch: int,
        max_gamma: int,
        ranks: Ranks,
        group: WalkGroup,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._batch, self._device, self._group, self._say = plan, batch, ranks.device, group, say
        with mock.patch.object(executors, "specialisations", timed_specialisations):
            self.runtime = group.stage(
                f"set-up of {plan}",
                lambda: WalkRuntime(
                    head,
                    batch,
                    max_gamma,
                    group=ranks.group,
                    device=ranks.device,
                    plans=[plan],
                    deadline=DEADLINE,
                ),
            )
        executor = self.runtime._executors[plan]
        assert isinstance(executor, KernelExecutor)
        executor.params.startup_deadline_ns = executor.params.steady_deadline_ns
        self._production = executor._launches
        found = specialisations_of(plan, head.vocab_size, batch, self.runtime.world_size, current_gpu())
        self._specialisations = {one.sampled: one for one in found}
        generator = torch.Generator(self._device).manual_seed(SEED)
        base = torch.empty(batch, max_gamma, head.vocab_size, dtype=torch.bfloat16, device=self._device)
        base.normal_(0.0, 3.0, generator=generator)
        shard = self.runtime.shard
        self._base = base[..., shard.start : shard.stop].contiguous()
        self._anchors = torch.randint(head.vocab_size, (batch,), generator=generator, device=self._device)

    def captured(self, gamma: int, sampled: bool) -> tuple[dict[str, CapturedWork], dict[str, str]]:
        """Name of a build, or PLAIN → its walk as a graph, which has run; and the names of those that failed → why.

        Raises:
            WalkError: the whole build failed; alike on every rank.
        """
        # All are loaded before one of them runs: loading may wait for a kernel that waits for a peer.
        launches = self._group.stage("load of the builds", lambda: dict(self._launches(sampled)))
        one = self._specialisations[sampled]
        base = self._base[:, :gamma].contiguous()
        out = WalkOutput(torch.full((self._batch, gamma), -1, dtype=torch.int64, device=self._device))
        temperatures = torch.ones(self._batch, device=self._device) if sampled else None
        offset = torch.zeros(1, dtype=torch.int64, device=self._device)
        noise = Noise(NOISE_KEY, offset) if sampled else None

        def walk() -> None:
            self.runtime.walk(base, self._anchors, temperatures, noise, self._plan, out=out)

        def capture(name: str, launch: Launch) -> CapturedWork:
            key = one.base_fp32, one.sampled, one.logits
            instead: list[tuple[Launch, Specialisation]] = [(launch, one)]
            with ended_if_hung(f"build {name!r}", HANG_S):
                with mock.patch.dict(self._production, {key: instead}):
                    walk()
                    ready = CapturedWork(walk)
                ready()
                torch.cuda.synchronize(self._device)
            self.runtime.check()
            return ready

        ready: dict[str, CapturedWork] = {}
        refused: dict[str, str] = {}
        for name, launch in launches.items():
            self._say(f"first walk of {self._plan}, batch {self._batch}, γ {gamma}{', T = 1' * sampled}: {name!r}")
            try:
                ready[name] = self._group.stage(f"first walk of build {name!r}", partial(capture, name, launch))
            except WalkError as error:
                if name == WHOLE:
                    raise  # it is no fault of the builds', and there is nothing to compare them with
                refused[name] = str(error)
                self._say(f"{name!r} isn't timed: {error}")
                self.runtime.reset()
                offset.zero_()  # ranks must agree on it, and some may have come to the walk's end
        return ready, refused

    def _launches(self, sampled: bool) -> Iterator[tuple[str, Launch]]:
        one, num_sms = self._specialisations[sampled], current_gpu().num_sms
        for name in (*builds(sampled), PLAIN):
            kernel_variants.use(WHOLE if name == PLAIN else name)
            kernel = jit.compile_kernel("walk.cu", "walk", one.macros)
            make = PlainLaunch if name == PLAIN else Launch
            placement = one.placement
            yield (
                name,
                make(
                    f"the walk ({name})",
                    kernel,
                    grid=placement.grid,
                    threads=THREADS,
                    num_sms=num_sms,
                    shared_bytes=placement.shared_bytes,
                ),
            )
        kernel_variants.use(WHOLE)


def row_of(size: Size, timings: Mapping[str, Timing], world_size: int) -> dict[str, Any]:
    """Of each build: its time, and by how much the whole one's is above that, in µs a block and a step."""
    row: dict[str, Any] = {
        "where": f"tp_bf16 on {world_size}" if size.plan == "tp_bf16" else "int8 on 1",
        "batch": size.batch,
        "gamma": size.gamma,
        "mode": "T = 1" if size.sampled else "greedy",
        "world_size": world_size,
        "whole_us": timings[WHOLE].median_us,
        "whole_spread_us": timings[WHOLE].spread_us,
        "empty_us": timings[EMPTY].median_us,
        "iterations": timings[WHOLE].iterations,
    }
    for name, key in KEYS.items():
        if name in timings:
            falls = timings[WHOLE].median_us - timings[name].median_us
            row |= {f"without_{key}_us": timings[name].median_us, f"without_{key}_spread_us": timings[name].spread_us}
            row |= {f"{key}_us": falls, f"{key}_step_us": falls / size.gamma}
            row[f"{key}_text"] = f"{falls:.1f}" if name in PER_BLOCK else f"{falls:.1f} / {falls / size.gamma:.2f}"
    return row


def table_of(rows: Sequence[Mapping[str, Any]], vocab_size: int) -> ResultTable:
    return ResultTable(
        f"By how much a block's time falls when the kernel leaves a part out, µs a block / µs a step "
        f"(V = {vocab_size:,}, r = {MARKOV_RANK})",
        f"{METHOD} Builds take turns on one runtime of max_batch = batch. Parts overlap: their sum isn't the whole. "
        "Exchange: all waits for other CTAs and ranks, while each still stores its best. The fetch of u: the read of "
        "its row of W1 and the prefetches. The second column at a batch of more than 8 (int8: 4) holds the noise, too, "
        "which is drawn there. All steps: what remains is the launch, the load of W2 and the end.",
        environment(),
        COLUMNS,
        rows,
    )


def run(options: Options) -> ResultTable:
    """On the ranks of `dist.group.WORLD`, or this process alone."""
    ranks = Ranks.of_this_run()
    group = WalkGroup(ranks.group, ranks.device)
    generator = torch.Generator(ranks.device).manual_seed(SEED)
    w1, w2 = (
        torch.randn(options.vocab_size, MARKOV_RANK, device=ranks.device, generator=generator).mul_(0.3).bfloat16()
        for _ in range(2)
    )
    rows: list[dict[str, Any]] = []
    table = table_of(rows, options.vocab_size)

    def is_late() -> bool:
        return bool(group.all_gather_object(options.elapsed_s() > options.budget_s)[0])

    def say(text: str) -> None:
        if group.rank == 0:
            options.say(text)

    with BlockTimer(group, ranks.device) as timer:
        empty = timer.empty_graph(THREADS)
        say(f"{group.world_size} ranks are ready")
        for batch, plan in itertools.product(options.batches, PLANS):
            if is_late():
                return table
            walkers = ranks if plan == "tp_bf16" else ranks.alone()
            of_plan = Builds(MarkovHead(w1, w2), plan, batch, max(options.gammas_of(batch)), walkers, group, say)
            with of_plan.runtime as runtime:
                say(f"runtime of {plan}, batch {batch}, is made")
                for size in options.sizes(plan, batch):
                    if is_late():
                        return table
                    try:
                        walks, refused = of_plan.captured(size.gamma, size.sampled)
                        say(f"{len(walks)} builds are timed")
                        timings = timer.measure(walks | {EMPTY: empty}, options.iterations)
                        group.stage(f"check of {size}", runtime.check)
                    except WalkError as error:
                        say(f"{size} isn't timed: {error}")
                        runtime.reset()
                        continue
                    rows.append(row_of(size, timings, group.world_size) | {"refused": refused})
                    if group.rank == 0:
                        table.write(options.out)
                    say(f"{size}: " + ", ".join(f"{name} {one.median_us:.1f}" for name, one in timings.items()))
    return table


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks of tp_bf16.  [default: GPUs, to a power of two]")
@click.option("--vocab", "vocab_size", type=click.IntRange(min=1), default=151_936, show_default=True)
@click.option("--batches", callback=numbers, default="1,8,64", show_default=True)
@click.option(
    "--gamma", callback=numbers, default="7,16", show_default=True, help="Those after the first: first batch."
)
@click.option("--iterations", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--budget-seconds", type=click.FloatRange(min=0), default=240.0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULT, help="File to write.")
def main(
    nproc: int | None,
    vocab_size: int,
    batches: tuple[int, ...],
    gamma: tuple[int, ...],
    iterations: int,
    budget_seconds: float,
    out: Path,
) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("this times GPUs, and torch finds no CUDA device here")
    began = time.time()
    world_size = nproc or min(8, 1 << (torch.cuda.device_count().bit_length() - 1))
    options = Options(vocab_size, batches, gamma, iterations, budget_seconds, out, began)
    target = current_gpu()
    wanted = jobs(options, world_size, target)
    options.say(f"{len(wanted)} kernels are compiled")
    compile_together(wanted, target.arch)
    options.say("all are; ranks start")
    try:
        click.echo(run_ranks(world_size, run, options)[0].to_markdown())
    except WalkError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

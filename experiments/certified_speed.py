#!/usr/bin/env python3
"""How long does plan certified take on real text, fallbacks included, beside tp_bf16, int8 and the torch walk?

    python experiments/certified_blocks.py        # once, where the text is; carry build/certified_blocks.npz along
    python experiments/certified_speed.py --nproc 2 --budget-seconds 120

Every iteration walks other blocks of the set, copied into the graphs' inputs before the clock starts. Before that all
blocks are walked by certified and tp_bf16, whose tokens must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from certified_blocks import PACKED, Blocks, unpack

from tp_walk.bench import numbers
from tp_walk.errors import PlanUnavailableError, WalkError
from tp_walk.group import WalkGroup
from tp_walk.kernels import THREADS
from tp_walk.noise import Noise
from tp_walk.plan import WalkOutput
from tp_walk.ranks import run_ranks
from tp_walk.results import Column, ResultTable, environment
from tp_walk.rivals import ShardedWalk, SingleWalk, TorchSampler
from tp_walk.runtime import WalkRuntime
from tp_walk.shard import shard_bounds
from tp_walk.timing import METHOD, BlockTimer, CapturedWork
from tp_walk.workload import Ranks

RESULT = Path(__file__).parent / "results" / "certified_speed.json"
PLANS = ("certified", "tp_bf16", "int8")
TORCH, EMPTY = "torch", "empty"
SHOWN = {"certified": "certified", "tp_bf16": "tp_bf16", "int8": "int8", TORCH: "torch", EMPTY: "empty launch"}
NOISE_KEY, SEED = 0x5EED, 7


@dataclass(frozen=True)
class Options:
    """packed: of certified_blocks.py. budget_s: no size is begun after so many seconds. out: written after each."""

    packed: Path
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    iterations: int
    budget_s: float
    out: Path


class Bench:
    """Blocks, plans and rivals of one γ on all ranks. Every method is a collective."""

    def __init__(self, resources: ExitStack, blocks: Blocks, gamma: int, max_batch: int, ranks: Ranks) -> None:
        self._device, self._gamma, self._ranks = ranks.device, gamma, ranks
        self._head = blocks.head
        self.runtime = resources.enter_context(
            WalkRuntime(
                blocks.head,
                max_batch,
                gamma,
                group=ranks.fast_group,
                device=ranks.device,
                plans=[*PLANS],
            )
        )
        base = blocks.base(self.runtime.shard, ranks.device)
        self.anchors = blocks.anchors.to(ranks.device)
        # All of them, made once: `[blocks, gamma, shard width]`.
        self.base = torch.cat([base.logits(part, gamma) for part in torch.split(self.anchors, 64)])

    def check(self, temperature: float, batch: int) -> None:
        """Raises WalkError unless certified drafts every block as tp_bf16 does."""
        temperatures = self._temperatures(batch, temperature)
        for first in range(0, len(self.anchors) - batch + 1, batch):
            base, anchors = self.base[first : first + batch], self.anchors[first : first + batch]
            noise = None if temperatures is None else Noise(NOISE_KEY, first)
            drafts = [self.runtime.walk(base, anchors, temperatures, noise, plan).tokens for plan in PLANS[:2]]
            if not torch.equal(*drafts):
                raise WalkError(f"certified and tp_bf16 differ in blocks {first} to {first + batch}, T {temperature}")

    def measure(self, timer: BlockTimer, batch: int, temperature: float, iterations: int) -> dict[str, Any]:
        """A row's times, in µs, and counts of plan certified."""
        base, anchors = self.base[:batch].clone(), self.anchors[:batch].clone()
        temperatures = self._temperatures(batch, temperature)
        candidates: dict[str, Callable[[], object]] = {
            plan: self._captured_plan(plan, base, anchors, temperatures) for plan in PLANS
        }
        candidates[TORCH] = self._captured_rival(base, anchors, temperatures)
        candidates[EMPTY] = timer.empty_graph(THREADS)
        order = np.random.default_rng(SEED).permutation(len(self.anchors))
        picks = torch.from_numpy(np.resize(order, (iterations, batch))).to(self._device)

        def bring(iteration: int) -> None:
            chosen = picks[iteration % iterations]
            torch.index_select(self.base, 0, chosen, out=base)
            torch.index_select(self.anchors, 0, chosen, out=anchors)

        before = self.runtime.stats()["counts"]["certified"]
        samples = timer.samples(candidates, iterations, bring)
        self.runtime.check()
        after = self.runtime.stats()["counts"]["certified"]
        counts = {name: after[name] - before[name] for name in after}
        row: dict[str, Any] = {"counts": counts, "iterations": iterations}
        for name, times in samples.items():
            slowest = times.max(axis=0)
            row[f"{name}_mean_us"] = float(slowest.mean())
            row[f"{name}_us"], row[f"{name}_p99_us"] = (float(q) for q in np.percentile(slowest, [50, 99]))
            row[f"{name}_text"] = " / ".join(f"{row[f'{name}{q}_us']:.1f}" for q in ("_mean", "", "_p99"))
        row["blocks_percent"] = 100 * counts["certified_blocks"] / counts["blocks"]
        row["scored"] = counts["candidates_scored"] / counts["steps"]
        row["speedup"] = row["tp_bf16_mean_us"] / row["certified_mean_us"]
        return row

    def _temperatures(self, batch: int, temperature: float) -> torch.Tensor | None:
        return torch.full((batch,), temperature, device=self._device) if temperature > 0 else None

    def _captured_plan(
        self, plan: str, base: torch.Tensor, anchors: torch.Tensor, temperatures: torch.Tensor | None
    ) -> CapturedWork:
        offset = torch.zeros(1, dtype=torch.int64, device=self._device)
        noise = None if temperatures is None else Noise(NOISE_KEY, offset)
        out = WalkOutput(torch.empty(len(anchors), self._gamma, dtype=torch.int64, device=self._device))

        def walk() -> None:
            self.runtime.walk(base, anchors, temperatures, noise, plan, out=out)

        walk()
        return CapturedWork(walk)

    def _captured_rival(
        self, base: torch.Tensor, anchors: torch.Tensor, temperatures: torch.Tensor | None
    ) -> CapturedWork:
        head, shard = self._head, self.runtime.shard
        sampler = None if temperatures is None else TorchSampler(temperatures)
        w1 = head.w1.to(self._device)
        rows = head.w2_rows(shard.start, shard.stop).to(self._device)
        rival: SingleWalk | ShardedWalk
        if self._ranks.fast_group is None:
            rival = SingleWalk(w1, rows, base, anchors, sampler)
        else:
            shards = shard_bounds(head.vocab_size, self.runtime.world_size)
            rival = ShardedWalk(w1, rows, base, anchors, shards, self._ranks.fast_group, sampler)
        rival()
        return CapturedWork(rival)


def run(options: Options) -> ResultTable:
    """On the ranks of `dist.group.WORLD`, or this process alone."""
    ranks = Ranks.of_this_run()
    group = WalkGroup(ranks.group, ranks.device)
    blocks = unpack(options.packed)
    rows: list[dict[str, object]] = []
    table = ResultTable(
        title="Time of a block of held-out text, µs: mean / median / p99",
        method=f"{METHOD} Each iteration walks other blocks, of {len(blocks.anchors)} in text held out of "
        f"{blocks.fit.description}; fallbacks of certified are part of its time. On several ranks base logits are "
        "sharded, int8 gathers them, and torch's walk is the sharded one.",
        environment=environment(),
        columns=[
            Column("world_size", "GPUs"),
            Column("gamma", "γ"),
            Column("batch", "batch"),
            Column("mode", "mode"),
            *[Column(f"{name}_text", title) for name, title in SHOWN.items()],
            Column("speedup", "tp_bf16 / certified, means", 2),
            Column("blocks_percent", "blocks certified, %", 2),
            Column("scored", "rows scored a step", 0),
        ],
        rows=rows,
    )
    started = time.monotonic()
    with ExitStack() as resources:
        timer = resources.enter_context(BlockTimer(group, ranks.device))
        for gamma in options.gammas:
            with ExitStack() as of_gamma:
                bench = Bench(of_gamma, blocks, gamma, max(options.batches), ranks)
                for temperature in options.temperatures:
                    bench.check(temperature, max(options.batches))
                    for batch in options.batches:
                        if group.all_gather_object(time.monotonic() - started > options.budget_s)[0]:
                            return table
                        iterations = max(200, min(options.iterations, len(blocks.anchors) // batch))
                        row = bench.measure(timer, batch, temperature, iterations)
                        mode = f"T = {temperature:g}" if temperature > 0 else "greedy"
                        size = {"world_size": group.world_size, "gamma": gamma, "batch": batch, "mode": mode}
                        rows.append(size | row)
                        if group.rank == 0:
                            table.write(options.out)
                            times = ", ".join(f"{title} {row[f'{name}_text']}" for name, title in SHOWN.items())
                            shares = (
                                f"{row['blocks_percent']:.2f} % of blocks certified, {row['scored']:.0f} rows a step"
                            )
                            click.echo(f"{size}: {times}; {shares}")
    return table


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(1), help="Ranks to start.")
@click.option("--packed", default=PACKED, type=click.Path(path_type=Path), help="File of certified_blocks.py.")
@click.option("--batches", callback=numbers, default="1,8,64", show_default=True)
@click.option("--gamma", callback=numbers, default="7,16", show_default=True)
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0), show_default=True)
@click.option("--iterations", default=2048, show_default=True, type=click.IntRange(1), help="Most, of batch 1.")
@click.option("--budget-seconds", default=240.0, show_default=True, help="Begin no size after that.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File to write.")
def main(
    nproc: int,
    packed: Path,
    batches: tuple[int, ...],
    gamma: tuple[int, ...],
    temperatures: tuple[float, ...],
    iterations: int,
    budget_seconds: float,
    out: Path,
) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("this times GPUs, and torch finds no CUDA device here")
    options = Options(packed, batches, gamma, temperatures, iterations, budget_seconds, out)
    try:
        (table, *_) = run_ranks(nproc, run, options)
    except PlanUnavailableError as error:
        raise click.ClickException(str(error)) from error
    click.echo(table.to_markdown())


if __name__ == "__main__":
    main()

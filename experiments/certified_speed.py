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
from certified_blocks import PACKED, unpack

from tp_walk.bench import numbers
from tp_walk.config import LogitsMode
from tp_walk.errors import PlanUnavailableError
from tp_walk.group import WalkGroup
from tp_walk.kernels import THREADS
from tp_walk.ranks import run_ranks
from tp_walk.results import Column, ResultTable, environment
from tp_walk.rivals import ShardedWalk, SingleWalk, TorchSampler
from tp_walk.shard import shard_bounds
from tp_walk.text_workload import TextBlocks, TextWorkload
from tp_walk.timing import METHOD, BlockTimer, CapturedWork
from tp_walk.workload import Layout, Ranks, Walk

RESULT = Path(__file__).parent / "results" / "certified_speed.json"
PLANS = ("certified", "tp_bf16", "int8")
TORCH, EMPTY = "torch", "empty"
# Name: whether requests are sampled, and the logits that are wanted.
MODES: dict[str, tuple[bool, LogitsMode]] = {
    "greedy": (False, "none"),
    "T = 1": (True, "none"),
    "T = 1, local logits": (True, "local"),
}
SHOWN = {"certified": "certified", "tp_bf16": "tp_bf16", "int8": "int8", TORCH: "torch", EMPTY: "empty launch"}


@dataclass(frozen=True)
class Options:
    """packed: of certified_blocks.py. budget_s: no size is begun after so many seconds. out: written after each."""

    packed: Path
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    modes: tuple[str, ...]
    iterations: int
    budget_s: float
    out: Path


class Bench:
    """Plans and rivals of one γ on all ranks. Every method is a collective."""

    def __init__(self, resources: ExitStack, blocks: TextBlocks, gamma: int, max_batch: int, ranks: Ranks) -> None:
        self._gamma, self._ranks, self._head = gamma, ranks, blocks.head
        self._layout: Layout = "full" if ranks.fast_group is None else "sharded"
        self._text = resources.enter_context(
            TextWorkload(blocks, [*PLANS], max_batch=max_batch, max_gamma=gamma, ranks=ranks)
        )

    def check(self, mode: str, batch: int) -> None:
        """Raises WalkError unless certified drafts every block as tp_bf16 does."""
        self._prepare(mode, batch)
        self._text.check(*PLANS[:2], self._text.num_blocks)

    def _prepare(self, mode: str, batch: int) -> None:
        sampled, logits = MODES[mode]
        self._text.prepare(Walk(batch, self._gamma, sampled, logits, self._layout))

    def measure(self, timer: BlockTimer, batch: int, mode: str, iterations: int) -> dict[str, Any]:
        """A row's times, in µs, and counts of plan certified."""
        text = self._text
        self._prepare(mode, batch)
        candidates: dict[str, Callable[[], object]] = {plan: text.captured(plan) for plan in PLANS}
        candidates[TORCH] = self._captured_rival()
        candidates[EMPTY] = timer.empty_graph(THREADS)
        before = text.runtime.stats()["counts"]["certified"]
        samples = timer.samples(candidates, iterations, text.bring)
        text.runtime.check()
        after = text.runtime.stats()["counts"]["certified"]
        counts = {name: after[name] - before[name] for name in after}
        row: dict[str, Any] = {"counts": counts, "iterations": iterations}
        for name, times in samples.items():
            slowest = times.max(axis=0)
            row[f"{name}_mean_us"] = float(slowest.mean())
            row[f"{name}_us"], row[f"{name}_p99_us"] = (float(q) for q in np.percentile(slowest, [50, 99]))
            row[f"{name}_text"] = " / ".join(f"{row[f'{name}{q}_us']:.1f}" for q in ("_mean", "", "_p99"))
        # None where walks want logits: those are the dense walk's.
        row["blocks_percent"] = 100 * counts["certified_blocks"] / counts["blocks"] if counts["blocks"] else None
        row["scored"] = counts["candidates_scored"] / counts["steps"] if counts["steps"] else None
        row["speedup"] = row["tp_bf16_mean_us"] / row["certified_mean_us"]
        return row

    def _captured_rival(self) -> CapturedWork:
        head, text, device = self._head, self._text, self._ranks.device
        shard = text.runtime.shard
        sampler = None if text.temperatures is None else TorchSampler(text.temperatures)
        w1 = head.w1.to(device)
        rows = head.w2_rows(shard.start, shard.stop).to(device)
        rival: SingleWalk | ShardedWalk
        if self._ranks.fast_group is None:
            rival = SingleWalk(w1, rows, text.base, text.anchors, sampler)
        else:
            shards = shard_bounds(head.vocab_size, text.runtime.world_size)
            rival = ShardedWalk(w1, rows, text.base, text.anchors, shards, self._ranks.fast_group, sampler)
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
                for mode in options.modes:
                    bench.check(mode, max(options.batches))
                    for batch in options.batches:
                        if group.all_gather_object(time.monotonic() - started > options.budget_s)[0]:
                            return table
                        iterations = max(200, min(options.iterations, len(blocks.anchors) // batch))
                        row = bench.measure(timer, batch, mode, iterations)
                        size = {"world_size": group.world_size, "gamma": gamma, "batch": batch, "mode": mode}
                        rows.append(size | row)
                        if group.rank == 0:
                            table.write(options.out)
                            times = ", ".join(f"{title} {row[f'{name}_text']}" for name, title in SHOWN.items())
                            click.echo(f"{size}: {times}; {row['counts']}")
    return table


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(1), help="Ranks to start.")
@click.option("--packed", default=PACKED, type=click.Path(path_type=Path), help="File of certified_blocks.py.")
@click.option("--batches", callback=numbers, default="1,8,64", show_default=True)
@click.option("--gamma", callback=numbers, default="7,16", show_default=True)
@click.option(
    "--mode",
    "modes",
    type=click.Choice([*MODES]),
    multiple=True,
    default=[*MODES],
    show_default=True,
    help="Again for more.",
)
@click.option("--iterations", default=2048, show_default=True, type=click.IntRange(1), help="Most, of batch 1.")
@click.option("--budget-seconds", default=240.0, show_default=True, help="Begin no size after that.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File to write.")
def main(
    nproc: int,
    packed: Path,
    batches: tuple[int, ...],
    gamma: tuple[int, ...],
    modes: tuple[str, ...],
    iterations: int,
    budget_seconds: float,
    out: Path,
) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("this times GPUs, and torch finds no CUDA device here")
    options = Options(packed, batches, gamma, modes, iterations, budget_seconds, out)
    try:
        (table, *_) = run_ranks(nproc, run, options)
    except PlanUnavailableError as error:
        raise click.ClickException(str(error)) from error
    click.echo(table.to_markdown())


if __name__ == "__main__":
    main()

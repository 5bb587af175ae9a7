"""The speed table: tp_walk's plans and today's torch walks, in one run, over the sizes that matter.

    torchrun --nproc-per-node 2 -m tp_walk.bench --json bench.json --budget-seconds 240

On several ranks every row also has the one-GPU plans and the one-GPU torch walk, which each rank runs by itself. The
points come in order of importance, and the file is written after each of them, so that a run that is cut short keeps
the best of its work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tp_walk.config import LogitsMode
from tp_walk.kernels import THREADS
from tp_walk.ranks import run_ranks
from tp_walk.results import Cell, Column, ResultTable, environment
from tp_walk.timing import METHOD, BlockTimer, Timing
from tp_walk.workload import REPLICATED, SHARDED, SHARDED_LOGITS, SINGLE, Ranks, Walk, Workload

# name → (sampled, logits)
MODES: dict[str, tuple[bool, LogitsMode]] = {
    "greedy": (False, "none"),
    "greedy-local": (False, "local"),
    "greedy-full": (False, "full"),
    "t1": (True, "none"),
    "t1-local": (True, "local"),
    "t1-full": (True, "full"),
}

# What a launch alone takes, and the suffix of what one GPU of several does by itself.
EMPTY = "empty"
ONE_GPU = "_1gpu"


_PLACE = (Column("vocab_size", "V"), Column("gamma", "γ"), Column("batch", "batch"), Column("mode", "mode"))
_ON_ONE_RANK = (
    Column("tp_bf16_us", "tp_bf16"),
    Column("certified_us", "certified"),
    Column("int8_us", "int8"),
    Column("torch_us", "torch"),
)
_ON_SEVERAL_RANKS = (
    Column("tp_bf16_us", "tp_bf16"),
    Column("certified_us", "certified"),
    Column("int8_us", "int8, base gathered"),
    Column("int8_split_us", "int8_split"),
    Column("int8_1gpu_us", "int8, 1 GPU"),
    Column("torch_1gpu_us", "torch, 1 GPU"),
    Column("torch_replicated_us", "torch, replicated"),
    Column("torch_sharded_us", "torch, sharded"),
    Column("torch_sharded_logits_us", "torch, sharded, step logits gathered"),
)
_COMPARED = (Column("speedup", "best rival / tp_bf16", 2), Column("empty_us", "empty launch"))


@dataclass(frozen=True)
class Point:
    """A row of the table to be."""

    vocab_size: int
    walk: Walk

    @property
    def mode(self) -> str:
        temperature = "T = 1" if self.walk.sampled else "greedy"
        return temperature if self.walk.logits == "none" else f"{temperature}, {self.walk.logits} logits"


@dataclass(frozen=True)
class Options:
    """What to measure. budget_s: no point is begun after so many seconds. out: written on rank 0 after each point."""

    vocab_sizes: tuple[int, ...]
    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    modes: tuple[tuple[bool, LogitsMode], ...]
    markov_rank: int
    iterations: int
    budget_s: float
    out: Path | None

    def points(self) -> list[Point]:
        """The most important first: the vocabularies and modes in the order given; the ends of the batches, then 8,
        before the sizes between them, which an eye can interpolate."""

        def importance(point: Point) -> tuple[int, int, int, int]:
            walk = point.walk
            between = walk.batch not in (self.batches[0], 8, self.batches[-1])
            mode = self.modes.index((walk.sampled, walk.logits))
            return int(between), self.vocab_sizes.index(point.vocab_size) + mode, mode, self.gammas.index(walk.gamma)

        points = [
            Point(vocab_size, Walk(batch, gamma, sampled, logits))
            for vocab_size in self.vocab_sizes
            for sampled, logits in self.modes
            for gamma in self.gammas
            for batch in self.batches
        ]
        return sorted(points, key=importance)


def row_of(point: Point, timings: Mapping[str, Timing], refused: Mapping[str, str], world_size: int) -> dict[str, Any]:
    """A row: median, p99 and spread of each candidate; the best rival over the same ranks against tp_bf16."""
    walk = point.walk
    row: dict[str, Any] = {
        "vocab_size": point.vocab_size,
        "gamma": walk.gamma,
        "batch": walk.batch,
        "mode": point.mode,
        "world_size": world_size,
    }
    for name, timing in timings.items():
        row[f"{name}_us"], row[f"{name}_p99_us"] = timing.median_us, timing.p99_us
        row[f"{name}_spread_us"], row["iterations"] = timing.spread_us, timing.iterations
    rivals = [timings[name].median_us for name in (SINGLE, REPLICATED, SHARDED, SHARDED_LOGITS) if name in timings]
    if rivals and "tp_bf16" in timings:
        row["speedup"] = min(rivals) / timings["tp_bf16"].median_us
    row["refused"] = dict(refused)
    return row


def run_bench(options: Options, progress: Callable[[str], None] = lambda line: None) -> ResultTable:
    """Measures on the ranks of `dist.group.WORLD` (gloo), or on this process alone; a collective.

    progress: told each row, in words, as it comes; on rank 0.
    """
    ranks = Ranks.of_this_run()
    rows: list[dict[str, Any]] = []
    times = _ON_ONE_RANK if ranks.group is None else _ON_SEVERAL_RANKS
    table = ResultTable("Time of a block, µs", METHOD, _environment(ranks), (*_PLACE, *times, *_COMPARED), rows)
    with ExitStack() as resources:
        started = time.monotonic()
        workloads = _Workloads(resources, options, ranks)
        timer: BlockTimer | None = None
        for point in options.points():
            ours = workloads.over_ranks(point.vocab_size)
            if ours.group.all_gather_object(time.monotonic() - started > options.budget_s)[0]:
                break
            timer = timer or resources.enter_context(BlockTimer(ours.group, ranks.device))
            rows.append(_measure(point, workloads, timer, options.iterations) | {"not_held": ours.not_held})
            if ours.group.rank == 0:
                if options.out is not None:
                    table.write(options.out)
                progress(_line(rows[-1]))
    return table


def _environment(ranks: Ranks) -> dict[str, Cell]:
    found = environment()
    if ranks.group is not None and ranks.device.type == "cuda":
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["NVLink multicast"] = "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "as NCCL likes"
    return found


class _Workloads:
    """One workload a vocabulary over all ranks, and one on this GPU alone, made when first wanted and kept."""

    def __init__(self, resources: ExitStack, options: Options, ranks: Ranks) -> None:
        self._resources, self._options, self.ranks = resources, options, ranks
        self._made: dict[tuple[int, Ranks], Workload] = {}

    def over_ranks(self, vocab_size: int) -> Workload:
        return self._of(vocab_size, self.ranks)

    def alone(self, vocab_size: int) -> Workload | None:
        """None in a world of one, where it would be the same."""
        return None if self.ranks.group is None else self._of(vocab_size, self.ranks.alone())

    def _of(self, vocab_size: int, ranks: Ranks) -> Workload:
        if (vocab_size, ranks) not in self._made:
            self._made[vocab_size, ranks] = self._resources.enter_context(
                Workload(
                    vocab_size,
                    self._options.markov_rank,
                    max_batch=max(self._options.batches),
                    max_gamma=max(self._options.gammas),
                    ranks=ranks,
                )
            )
        return self._made[vocab_size, ranks]


def _measure(point: Point, workloads: _Workloads, timer: BlockTimer, iterations: int) -> dict[str, Any]:
    ours, alone = workloads.over_ranks(point.vocab_size), workloads.alone(point.vocab_size)
    prepared = ours.prepare(point.walk)
    candidates, refused = dict(prepared.ready), dict(prepared.refused)
    if alone is not None:
        # One rank's one-GPU walk may fail alone; what isn't ready everywhere is timed nowhere.
        prepared = alone.prepare(point.walk)
        everywhere = set.intersection(*map(set, ours.group.all_gather_object(list(prepared.ready))))
        candidates |= {f"{name}{ONE_GPU}": run for name, run in prepared.ready.items() if name in everywhere}
        refused |= {f"{name}{ONE_GPU}": reason for name, reason in prepared.refused.items()}
    if workloads.ranks.device.type == "cuda":
        candidates[EMPTY] = timer.empty_graph(THREADS)
    row = row_of(point, timer.measure(candidates, iterations), refused, ours.group.world_size)
    return row | {"counts": ours.runtime.stats()["counts"]}


def _line(row: Mapping[str, Any]) -> str:
    times = {key.removesuffix("_us"): value for key, value in row.items() if key.endswith("_us")}
    medians = {name: value for name, value in times.items() if not name.endswith(("_p99", "_spread"))}
    parts = [f"{name} {value:.1f}" for name, value in medians.items()]
    parts += [f"{name} not timed: {reason}" for name, reason in row["refused"].items()]
    # Since the runtime was made, so over all rows so far.
    parts += [f"{name} counted {counts}" for name, counts in row.get("counts", {}).items()]
    return f"V {row['vocab_size']:,} γ {row['gamma']} batch {row['batch']} {row['mode']}: {', '.join(parts)}"


def numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Reads an option such as 1,8,64."""
    try:
        read = tuple(int(part) for part in value.split(","))
    except ValueError:
        read = ()
    if not read or min(read) < 1:
        raise click.BadParameter(f"{value!r} is no list of positive integers such as 1,8,64")
    return read


def _modes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[tuple[bool, LogitsMode], ...]:
    unknown = [name for name in value.split(",") if name not in MODES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(MODES)}")
    return tuple(MODES[name] for name in value.split(","))


@click.command("bench")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks to start, unless torchrun did.  [default: one a GPU]")
@click.option("--vocab", callback=numbers, default="151936,248320", show_default=True, help="Vocabulary sizes.")
@click.option("--rank", "markov_rank", type=click.IntRange(min=1), default=256, show_default=True, help="Of the head.")
@click.option("--gamma", callback=numbers, default="7,16", show_default=True, help="Steps of a block.")
@click.option("--batches", callback=numbers, default="1,2,4,8,16,32,64", show_default=True)
@click.option("--modes", callback=_modes, default="greedy,t1-local,t1-full,greedy-full", show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--budget-seconds", type=click.FloatRange(min=0), default=float("inf"), help="Begin no point after that.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Where the JSON goes.")
def main(
    nproc: int | None,
    vocab: tuple[int, ...],
    markov_rank: int,
    gamma: tuple[int, ...],
    batches: tuple[int, ...],
    modes: tuple[tuple[bool, LogitsMode], ...],
    iterations: int,
    budget_seconds: float,
    out: Path | None,
) -> None:
    """Time a block of every plan beside today's torch walks: the speed table."""
    options = Options(vocab, gamma, batches, modes, markov_rank, iterations, budget_seconds, out)
    if not torch.cuda.is_available():
        raise click.ClickException("the bench times GPUs, and torch finds no CUDA device here")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        try:
            _run_and_show(options)
        finally:
            dist.destroy_process_group()
    else:
        run_ranks(nproc or torch.cuda.device_count(), _run_and_show, options)


def _run_and_show(options: Options) -> None:
    """Rank 0 shows each row as it comes, how far the run is, and the table at the end."""
    is_quiet = dist.is_initialized() and dist.get_rank() > 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=is_quiet) as bar:
        task = bar.add_task("measuring", total=len(options.points()))

        def show(line: str) -> None:
            bar.console.print(line, soft_wrap=True, highlight=False)
            bar.advance(task)

        result = run_bench(options, show)
    if not is_quiet:
        table = Table(*(column.title for column in result.columns), title=result.title, caption=result.method)
        for cells in result.cells():
            table.add_row(*cells)
        Console().print(table)
        for name, why in (result.rows[-1]["not_held"] if result.rows else {}).items():
            click.echo(f"{name} was not timed: {why}")


if __name__ == "__main__":
    main()

"""`tp-walk crossover` measures which plan is fastest at which size; `tp-walk plan` says which one that is."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.distributed.elastic.multiprocessing import SignalException

from tp_walk import blind_base
from tp_walk.bench import numbers
from tp_walk.config import MAX_GAMMA, WalkShape, settings
from tp_walk.crossover import Request, measure
from tp_walk.crossover_plot import plot
from tp_walk.files import check_writable
from tp_walk.head import MarkovHead
from tp_walk.plan import EXECUTORS
from tp_walk.plan_table import LAYOUTS, MODES, Layout, Machine, Mode, PlanTable, Row, Sample, known_tables, user_path
from tp_walk.ranks import run_ranks
from tp_walk.selection import Selector, machine_here, origin
from tp_walk.text_workload import TextBlocks
from tp_walk.topology import gpu_of, other_use

INTERRUPTED = 130
# Models of compute capability 9.0, as a part of the driver's name for them.
HOPPER_MODELS = ("H100", "H200", "H20", "H800", "GH200")
_HOPPER = re.compile(rf"\b({'|'.join(HOPPER_MODELS)})\b", re.IGNORECASE)


def _choices(allowed: tuple[str, ...]) -> Any:
    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        unknown = [name for name in value.split(",") if name not in allowed]
        if unknown:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return tuple(value.split(","))

    return read


@click.command("crossover")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks to measure with.  [default: one a GPU]")
@click.option(
    "--head", type=click.Path(exists=True, path_type=Path), help="A checkpoint, for vocabulary and rank, and its text."
)
@click.option("--vocab", "vocab_size", type=click.IntRange(min=1), default=151_936, show_default=True)
@click.option("--rank", "markov_rank", type=click.IntRange(min=1), default=256, show_default=True, help="Of the head.")
@click.option("--gamma", "gammas", callback=numbers, default="7,16", show_default=True)
@click.option("--batches", callback=numbers, default="1,2,4,8,16,32,64", show_default=True)
@click.option("--mode", "modes", callback=_choices(MODES), default=",".join(MODES), show_default=True)
@click.option("--layout", "layouts", callback=_choices(LAYOUTS), default=",".join(LAYOUTS), show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here, too.")
@click.option("--plot", "chart", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: a .png or .svg file.")
@click.option("--force", is_flag=True, help="Measure although others use the GPUs.")
def crossover(
    nproc: int | None,
    head: Path | None,
    vocab_size: int,
    markov_rank: int,
    gammas: tuple[int, ...],
    batches: tuple[int, ...],
    modes: tuple[Mode, ...],
    layouts: tuple[Layout, ...],
    iterations: int,
    out: Path | None,
    chart: Path | None,
    force: bool,
) -> None:
    """Measure which plan is fastest at which batch size, on this machine.

    Starts the ranks itself. The table goes to the user's data directory, where every runtime finds it. Ctrl-C keeps
    what is measured by then. Plan certified is timed on held-out text if --head is a directory of
    experiments/text_head.py; else on random weights, as all others are.
    """
    text = None
    if head is not None:
        weights = MarkovHead.from_checkpoint(head)
        vocab_size, markov_rank = weights.vocab_size, weights.markov_rank
        text = head if (head / blind_base.FILE_NAME).exists() else None
    nproc = nproc or max(1, torch.cuda.device_count())
    _check_gpus(nproc, force)
    own = user_path(machine_here(WalkShape(vocab_size, markov_rank, nproc)))
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / own.name
        kept = [path for path in (own, out) if path is not None and _is_writable(path)]
        if not kept:
            raise click.ClickException(f"{own} can't be written; --out names another file")
        request = Request(vocab_size, markov_rank, gammas, batches, modes, layouts, iterations, out=(fresh, *kept))
        finished = measure_on_ranks(nproc, request, text)
        if not fresh.exists():
            raise click.ClickException("interrupted before anything was measured")
        table = PlanTable.read(fresh)
    show(table, Console())
    click.echo(f"kept in {' and '.join(map(str, kept))}")
    if chart is not None:
        plot(table, chart)
        click.echo(f"drawn in {chart}")
    if not finished:
        click.echo("interrupted: the sizes shown are those that were measured", err=True)
        raise SystemExit(INTERRUPTED)


@click.command("plan")
@click.option("--gpu", help="A model, or a part of its name, such as H200.  [default: the one here]")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks.")
@click.option("--batch", "batches", callback=numbers, default="1", show_default=True, help="One, or several: 1,8,64.")
@click.option("--gamma", type=click.IntRange(1, MAX_GAMMA), default=7, show_default=True)
@click.option("--mode", type=click.Choice(MODES), default="greedy", show_default=True)
@click.option("--layout", type=click.Choice(LAYOUTS), help="[default: sharded where there are several ranks]")
@click.option("--vocab", "vocab_size", type=click.IntRange(min=1), default=151_936, show_default=True)
@click.option("--rank", "markov_rank", type=click.IntRange(min=1), default=256, show_default=True, help="Of the head.")
def plan(
    gpu: str | None,
    nproc: int,
    batches: tuple[int, ...],
    gamma: int,
    mode: Mode,
    layout: Layout | None,
    vocab_size: int,
    markov_rank: int,
) -> None:
    """Say which plan a walk should take, and why. Needs no GPU: tables of known machines come with tp_walk."""
    if gpu is not None and not _HOPPER.search(gpu):
        raise click.ClickException(
            f"the kernels are for NVIDIA Hopper ({', '.join(HOPPER_MODELS)}), and no GPU of these is named {gpu!r}; on "
            f"others plan reference runs"
        )
    if forced := settings().plan:
        click.echo(f"TP_WALK_PLAN forces {forced} on every walk that is started here. Without it:", err=True)
    shape = WalkShape(vocab_size, markov_rank, nproc)
    machine, table = machine_here(shape) if gpu is None else None, None
    for known in known_tables():
        same_shape = (known.machine.world_size, known.machine.vocab_size, known.machine.markov_rank) == (
            nproc,
            vocab_size,
            markov_rank,
        )
        if same_shape and (known.machine == machine or (gpu and gpu.lower() in known.machine.gpu.lower())):
            machine, table = known.machine, known
            break
    machine = machine or Machine(gpu or "", nproc, "unknown" if nproc > 1 else "none", vocab_size, markov_rank)
    selector = Selector(machine, table, EXECUTORS, "" if table is None else origin(table))
    for batch in batches:
        chosen = selector(batch, gamma, mode == "sampled", layout or ("sharded" if nproc > 1 else "full"))
        if chosen.expected_us is None:
            raise click.ClickException(f"no kernel is known to hold {machine}, batch {batch}; plan reference runs it")
        click.echo(f"batch {batch}: {chosen.name}, {chosen.expected_us:.1f} µs expected", nl=False)
        click.echo(f"; next {chosen.runner_up}, {chosen.margin:.2f} ×" if chosen.runner_up else "", nl=False)
        click.echo(f" ({chosen.provenance})")


def measure_on_ranks(nproc: int, request: Request, text: Path | None = None) -> bool:
    """Measures on ranks of this host, with a progress bar; False when it was interrupted. text: as of
    `TextBlocks.read`."""
    try:
        run_ranks(nproc, _measure_and_show_progress, request, text)
    except (KeyboardInterrupt, SignalException):
        return False
    return True


def show(table: PlanTable, console: Console) -> None:
    """One table for each layout, mode and γ: rows are batches, columns plans, the fastest marked."""
    console.print(
        f"{table.machine}, measured {table.provenance.get('date')}; µs of a block, median ± quartiles' spread; "
        f"certified, if timed, on {table.provenance.get('text') or 'random weights'}, its mean"
    )
    for (layout, mode, gamma), rows in groupby(table.rows, key=lambda row: (row.layout, row.mode, row.gamma)):
        console.print(_rich_table(f"{mode}, γ = {gamma}, base logits {layout}", list(rows)))


def _rich_table(title: str, rows: list[Row]) -> Table:
    plans, rivals = _names(row.plans for row in rows), _names(row.baseline for row in rows)
    table = Table("batch", *plans, *rivals, "best rival / best plan", title=title, title_justify="left")
    for row in rows:
        best = min(row.plans, key=lambda name: row.plans[name].us, default=None)
        cells = [_cell(row.plans.get(name), name == best) for name in plans]
        cells += [_cell(row.baseline.get(name), False) for name in rivals]
        ratio = "–"
        if best is not None and row.baseline:
            ratio = f"{min(sample.us for sample in row.baseline.values()) / row.plans[best].us:.2f}"
        table.add_row(str(row.batch), *cells, ratio)
    return table


def _names(mappings: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _cell(sample: Sample | None, is_best: bool) -> str:
    if sample is None:
        return "–"
    text = f"{sample.us:.1f} ± {sample.spread_us:.1f}"
    return f"[bold green]★ {text}[/]" if is_best else text


def _measure_and_show_progress(request: Request, text: Path | None) -> None:
    """On each rank. A signal ends the measurement after the size at hand, so that the ranks stay together."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    is_quiet = dist.is_initialized() and dist.get_rank() > 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=is_quiet) as bar:
        task = bar.add_task("measuring")
        blocks = None if text is None else TextBlocks.read(text)
        measure(
            request, lambda done, total: bar.update(task, completed=done, total=total), lambda: bool(signals), blocks
        )
    if signals:
        # Everything is written and closed; whoever sent the signal waits for this process to die of it.
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])


def _check_gpus(nproc: int, force: bool) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < nproc:
        raise click.ClickException(
            f"measuring with --nproc {nproc} needs as many CUDA devices, and torch finds {count} here; "
            "`tp-walk plan --gpu MODEL` answers from the tables of other machines"
        )
    for index in range(nproc):
        gpu = gpu_of(torch.device("cuda", index))
        use = other_use(gpu)
        if use is not None and not force:
            raise click.ClickException(f"GPU {index} ({gpu}) isn't free: {use}; wait, or measure all the same: --force")


def _is_writable(path: Path) -> bool:
    try:
        check_writable(path.parent)
    except OSError:
        return False
    return True

"""The command `tp-walk`: reads options, prints; what it prints is computed elsewhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_walk import bench, crossover_cli
from tp_walk.bench import numbers
from tp_walk.config import ROUNDINGS, Rounding, settings
from tp_walk.doctor import RankReport, Report, examine
from tp_walk.errors import WalkError
from tp_walk.files import check_writable
from tp_walk.head import MarkovHead
from tp_walk.precompile import HOPPER, compile_together, jobs


class _Commands(click.Group):
    """Errors that tp_walk raises on purpose are one line and exit status 1, without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except WalkError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The serial Markov walk of a block drafter, as one GPU launch per block."""


@main.command()
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks to try together.  [default: one per GPU]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(nproc: int | None, as_json: bool) -> None:
    """Say what is here, which plans can run, and why others can't.

    Exits with 1 when something that is here doesn't work: a link, or a plan. A machine without a GPU is fine.
    """
    report = examine(nproc or max(1, torch.cuda.device_count()))
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(report), "is_healthy": report.is_healthy}, indent=1))
    else:
        _print_report(report)
    if not report.is_healthy:
        raise SystemExit(1)


@main.command("compile")
@click.option("--head", type=click.Path(exists=True, path_type=Path), help="A checkpoint, for vocabulary and rank.")
@click.option("--vocab", "vocab_sizes", callback=numbers, default="151936", show_default=True, help="One, or several.")
@click.option("--rank", "markov_rank", type=click.IntRange(min=1), default=256, show_default=True, help="Of the head.")
@click.option(
    "--nproc", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True, help="Repeatable."
)
@click.option("--max-batch", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--rounding", type=click.Choice(ROUNDINGS), multiple=True, default=("engine",), show_default=True)
def compile_ahead(
    head: Path | None,
    vocab_sizes: tuple[int, ...],
    markov_rank: int,
    nproc: tuple[int, ...],
    max_batch: int,
    rounding: tuple[Rounding, ...],
) -> None:
    """Fill the kernel cache ahead of time, by all cores. Needs no GPU; the kernels are for Hopper."""
    if head is not None:
        weights = MarkovHead.from_checkpoint(head)
        vocab_sizes, markov_rank = (weights.vocab_size,), weights.markov_rank
    cache_dir = settings().cache_dir
    try:
        check_writable(cache_dir)
    except OSError as error:
        raise click.ClickException(
            f"{cache_dir} can't be written ({error}): TP_WALK_CACHE_DIR names another"
        ) from error
    table = Table("kernel", "registers", "spilled bytes")
    shapes = [jobs(vocab_size, markov_rank, nproc, max_batch, rounding) for vocab_size in vocab_sizes]
    # Vocabularies of about the same size share kernels.
    wanted = {(job.source, job.macros): job for job in itertools.chain.from_iterable(shapes)}.values()
    with Console(stderr=True).status(f"compiling {len(wanted)} kernels"):
        compile_together(wanted, HOPPER.arch)
    for job in wanted:
        resources = job.compile(HOPPER.arch).resources
        table.add_row(job.purpose, str(resources.registers), str(resources.stack_bytes))
    console = Console()
    console.print(table)
    console.print(f"{len(wanted)} kernels for {HOPPER.arch} in {cache_dir}", soft_wrap=True)


main.add_command(bench.main)
main.add_command(crossover_cli.crossover)
main.add_command(crossover_cli.plan)


def _print_report(report: Report) -> None:
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in report.environment.items() if value is not None))
    for what in report.missing:
        console.print(f"[yellow]missing:[/] {escape(what)}")
    if any(rank.gpu is not None for rank in report.ranks):
        console.print(_gpu_table(report.ranks))
    for number, rank in enumerate(report.ranks):
        if rank.obstacle is not None:
            console.print(f"[red]rank {number}:[/] {escape(rank.obstacle)}")
    console.print(_plan_table(report.ranks))
    console.print("[green]all that is here works[/]" if report.is_healthy else "[red]something here doesn't work[/]")


def _gpu_table(ranks: Sequence[RankReport]) -> Table:
    """Each rank's GPU, and its way to the others: the link, and a hop's time, p50 / p99."""
    table = Table("rank", "GPU", "UUID", *(f"to {peer}" for peer in range(len(ranks))))
    for number, rank in enumerate(ranks):
        name, uuid = (rank.gpu.name, rank.gpu.uuid) if rank.gpu else ("none", "")
        ways = ["–" if peer == number else link for peer, link in enumerate(rank.links)]
        for hop in rank.hops:
            ways[hop.peer] += f"\n{hop.hop_p50_us:.2f} / {hop.hop_p99_us:.2f} µs"
        table.add_row(str(number), name, uuid, *ways)
    return table


def _plan_table(ranks: Sequence[RankReport]) -> Table:
    """One row a plan; ranks that agree share it."""
    table = Table("plan", "state", "why")
    for name in ranks[0].plans:
        for report in dict.fromkeys(rank.plans[name] for rank in ranks):
            colour = {"runs": "green", "broken": "red"}.get(report.state, "yellow")
            table.add_row(name, f"[{colour}]{report.state}[/]", escape(report.reason or ""))
    return table


if __name__ == "__main__":
    main()

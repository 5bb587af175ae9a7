"""Measures the crossover tables of several vocabularies in one go: those that come with the package, and the second,
independent run by which they are judged.

    torchrun --nproc-per-node 2 experiments/crossover_tables.py --out tp_walk/crossover_tables
    torchrun --nproc-per-node 1 experiments/crossover_tables.py --out tp_walk/crossover_tables
    torchrun --nproc-per-node 2 experiments/crossover_tables.py --out second --batches 1,2,3,4,6,8,12,16,24,32,48,64

Plan certified is timed on the blocks of build/certified_blocks.npz (experiments/certified_blocks.py), whose ids are
spread over vocabularies that the head isn't of.
`tp-walk crossover` does the same for one vocabulary, and keeps the table where runtimes find it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from certified_blocks import PACKED, unpack

from tp_walk.bench import numbers
from tp_walk.config import WalkShape
from tp_walk.crossover import Request, measure
from tp_walk.group import WalkGroup
from tp_walk.plan_table import LAYOUTS, MODES
from tp_walk.selection import machine_of


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


@click.command()
@click.option("--vocab", "vocab_sizes", callback=numbers, default="151936,248320,129280,163840", show_default=True)
@click.option("--rank", "markov_rank", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--gamma", "gammas", callback=numbers, default="7,16", show_default=True)
@click.option("--batches", callback=numbers, default="1,2,4,8,16,32,64", show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--budget-seconds", type=click.FloatRange(min=0), default=float("inf"), help="Each vocabulary has its share."
)
@click.option("--packed", default=PACKED, type=click.Path(path_type=Path), help="File of certified_blocks.py.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="A folder.")
def main(
    vocab_sizes: tuple[int, ...],
    markov_rank: int,
    gammas: tuple[int, ...],
    batches: tuple[int, ...],
    iterations: int,
    budget_seconds: float,
    packed: Path,
    out: Path,
) -> None:
    started = time.monotonic()
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    group = WalkGroup(dist.group.WORLD, device)
    blocks = unpack(packed)
    for number, vocab_size in enumerate(vocab_sizes, start=1):
        until = started + budget_seconds * number / len(vocab_sizes)
        machine = machine_of(group, device, WalkShape(vocab_size, markov_rank, group.world_size))
        path = out / machine.file_name
        table = measure(
            Request(vocab_size, markov_rank, gammas, batches, MODES, LAYOUTS, iterations, (path,)),
            should_stop=partial(_is_past, until),
            blocks=blocks.over(vocab_size),
        )
        if group.rank == 0:
            refused = {f"{name} at {row.place}: {why}" for row in table.rows for name, why in row.refused.items()}
            click.echo(f"{path}: {len(table.rows)} sizes after {time.monotonic() - started:.0f} s")
            for reason in sorted(refused):
                click.echo(f"  not timed: {reason}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

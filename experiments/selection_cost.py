#!/usr/bin/env python3
"""What does a call of auto_select cost a round of an engine, once it has been asked for the size before?

    python experiments/selection_cost.py

On a CPU: the call is the same there, whatever plans can run.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from pathlib import Path

import click
import torch

import tp_walk
from tp_walk.results import Column, ResultTable, environment

RESULT = Path(__file__).parent / "results" / "selection_cost.json"
CALLS, REPEATS = 20_000, 15
COLUMNS = (Column("call", "call"), Column("best_us", "best of the runs, µs", 2), Column("worst_us", "worst", 2))


def measured(name: str, call: Callable[[], object]) -> dict[str, object]:
    """One row: µs of a call, the mean of each run's calls; the first run is for warming up."""
    call()
    times = [run / CALLS * 1e6 for run in timeit.repeat(call, number=CALLS, repeat=REPEATS + 1)[1:]]
    return {"call": name, "best_us": min(times), "worst_us": max(times)}


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULT, help="File to write.")
def main(out: Path) -> None:
    weights = torch.zeros(64, 256, dtype=torch.bfloat16)
    with tp_walk.WalkRuntime(tp_walk.MarkovHead(weights, weights), 64, 16, device="cpu") as runtime:
        rows = [
            measured("runtime.auto_select(8)", lambda: runtime.auto_select(8)),
            measured("tp_walk.auto_select(8)", lambda: tp_walk.auto_select(8)),
        ]
    method = f"{REPEATS} runs of {CALLS:,} calls of a size that has been asked for before, garbage collection off."
    table = ResultTable("Time of a call of auto_select", method, environment(), COLUMNS, rows)
    table.write(out)
    click.echo(table.to_markdown())


if __name__ == "__main__":
    main()

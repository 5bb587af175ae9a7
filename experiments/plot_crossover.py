"""Draws measured crossover tables, such as those that come with the package, as the README's chart.

python experiments/plot_crossover.py tp_walk/crossover_tables/TABLE.json experiments/results/crossover.svg --gamma 7
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from tp_walk.crossover_plot import plot
from tp_walk.plan_table import LAYOUTS, MODES, Layout, Mode, PlanTable


@click.command()
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("chart", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--gamma", type=click.IntRange(min=1), multiple=True, help="Only these.  [default: all]")
@click.option("--mode", type=click.Choice(MODES), multiple=True, help="Only these.  [default: all]")
@click.option("--layout", type=click.Choice(LAYOUTS), multiple=True, help="Only these.  [default: all]")
def main(table: Path, chart: Path, gamma: tuple[int, ...], mode: tuple[Mode, ...], layout: tuple[Layout, ...]) -> None:
    measured = PlanTable.read(table)
    rows = [
        row
        for row in measured.rows
        if (not gamma or row.gamma in gamma) and (not mode or row.mode in mode) and (not layout or row.layout in layout)
    ]
    plot(replace(measured, rows=rows), chart)


if __name__ == "__main__":
    main()

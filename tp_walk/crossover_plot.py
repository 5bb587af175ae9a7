"""A chart of the measured table: time of a block against batch, a line for each plan, crossovers marked."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from tp_walk.errors import PlanUnavailableError, WalkInputError
from tp_walk.plan_table import LAYOUTS, Mode, PlanTable, Row

_COLOURS = {"tp_bf16": "#1f77b4", "int8": "#d62728", "int8_split": "#ff7f0e", "certified": "#2ca02c"}
_RIVAL_STYLES = ("--", ":", "-.")


def mode_title(mode: Mode) -> str:
    """What readers call a mode that was measured."""
    return "T = 1" if mode == "sampled" else mode


def crossings(rows: list[Row]) -> list[tuple[float, str, str]]:
    """(batch, plan before, plan after) wherever the fastest plan changes along rows of rising batch.

    The batch is where the two lines between the measured ones meet, or the later one when they never do: a plan ends.
    """
    found = []
    for before, after in pairwise(rows):
        if not (before.plans and after.plans):
            continue
        old, new = (min(row.plans, key=lambda name: row.plans[name].us) for row in (before, after))
        if old == new:
            continue
        batch = float(after.batch)
        if new in before.plans and old in after.plans:
            gap_before = before.plans[new].us - before.plans[old].us
            gap_after = after.plans[old].us - after.plans[new].us
            batch = before.batch + (after.batch - before.batch) * gap_before / (gap_before + gap_after)
        found.append((batch, old, new))
    return found


def plot(table: PlanTable, path: Path) -> None:
    """Draws a table into a .png or .svg file: a panel for each layout, mode and γ.

    Raises:
        PlanUnavailableError: matplotlib isn't installed. WalkInputError: there is nothing to draw, or another suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanUnavailableError(f"charts need matplotlib ({error}); install tp-walk[plot]") from error
    if path.suffix not in (".png", ".svg"):
        raise WalkInputError(f"{path} can't be drawn: charts are .png or .svg files")
    panels: dict[tuple[str, Mode, int], list[Row]] = {}
    for row in sorted(table.rows, key=lambda row: (LAYOUTS.index(row.layout), row.gamma, row.mode, row.batch)):
        panels.setdefault((row.layout, row.mode, row.gamma), []).append(row)
    if not panels:
        raise WalkInputError("the table has no rows to draw")
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axis, ((layout, mode, gamma), rows) in zip(axes, panels.items(), strict=False):
        _draw(axis, rows)
        layout_text = "" if table.machine.world_size == 1 else f", base logits {layout}"
        axis.set_title(f"{mode_title(mode)}, γ = {gamma}{layout_text}", fontsize=10)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    labels = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside lower center",
        ncols=min(len(labels), 2 * columns + 1),
        frameon=False,
    )
    figure.suptitle(f"{table.machine}", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axis: Any, rows: list[Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in row.plans)
    rivals = dict.fromkeys(name for row in rows for name in row.baseline)
    for name in names:
        points = [(row.batch, row.plans[name].us) for row in rows if name in row.plans]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=_COLOURS.get(name), label=name)
    for name, style in zip(rivals, _RIVAL_STYLES, strict=False):
        points = [(row.batch, row.baseline[name].us) for row in rows if name in row.baseline]
        axis.plot(*zip(*points, strict=True), style, color="grey", linewidth=1, label=name)
    for batch, _, new in crossings(rows):
        axis.axvline(batch, color="black", linewidth=0.8, linestyle=(0, (2, 2)))
        axis.annotate(
            f" {new}\n from {math.ceil(batch)}",
            (batch, 0.97),
            xycoords=("data", "axes fraction"),
            verticalalignment="top",
            fontsize=8,
            backgroundcolor=(1, 1, 1, 0.7),
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([row.batch for row in rows], [str(row.batch) for row in rows])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    ticks = [us for us in (20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000) if low <= us <= high]
    axis.set_yticks(ticks, [str(us) for us in ticks])
    axis.set_xlabel("batch")
    axis.set_ylabel("µs a block")
    axis.grid(alpha=0.25)

"""Writes the README's measured tables from experiments/results and from the crossover tables that come with tp_walk.

`--check` only says whether they are up to date.

A table stands between `<!-- table: NAME.json -->` and `<!-- end of table -->`, and nothing there is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tp_walk.crossover_plot import mode_title
from tp_walk.plan_table import MODES, SHIPPED_DIR, PlanTable, Row
from tp_walk.results import Column, ResultTable

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "experiments" / "results"

_END = "<!-- end of table -->"
_TABLE = re.compile(rf"(<!-- table: (?P<name>[\w.-]+\.json) -->\n)(?P<body>.*?)({_END})", re.DOTALL)


def with_tables(text: str, results: Path = RESULTS, shipped: Path = SHIPPED_DIR) -> str:
    """The text with every table made anew; one that wasn't measured yet says so.

    Raises:
        ValueError: a marker has no end, or an end no marker.
        tp_walk.errors.WalkInputError: a results file holds no table.
    """
    if text.count("<!-- table:") != text.count(_END) or len(_TABLE.findall(text)) != text.count(_END):
        raise ValueError(f"each <!-- table: NAME.json --> needs its own {_END}")

    def fill(match: re.Match[str]) -> str:
        path = results / match["name"]
        if (shipped / path.name).exists():
            return f"{match[1]}{plan_times(PlanTable.read(shipped / path.name)).to_markdown()}\n{_END}"
        body = ResultTable.read(path).to_markdown() if path.exists() else f"*Not measured yet: no {path.name}.*"
        return f"{match[1]}{body}\n{_END}"

    return _TABLE.sub(fill, text)


def plan_times(table: PlanTable) -> ResultTable:
    """The times of all plans where base logits lie sharded (whole on one GPU), the best of each size in bold."""
    layout = "sharded" if table.machine.world_size > 1 else "full"
    rows = [row for row in table.rows if row.layout == layout]
    plans = dict.fromkeys(plan for row in rows for plan in row.plans)
    columns = [Column("gamma", "γ"), Column("batch", "batch")]
    for mode in MODES:
        columns += [Column(f"{mode} {plan}", f"{plan}, {mode_title(mode)}") for plan in plans]
        columns.append(Column(f"{mode} ratio", f"best torch / best, {mode_title(mode)}", 2))
    sizes: dict[tuple[int, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row.gamma, row.batch)):
        size = sizes.setdefault((row.gamma, row.batch), {"gamma": row.gamma, "batch": row.batch})
        size |= {f"{row.mode} {key}": cell for key, cell in _cells(row).items()}
    about = {"GPU": f"{table.machine}", **table.provenance}
    return ResultTable(
        f"Time of a block by plan, µs, base logits {'sharded' if layout == 'sharded' else 'whole'}",
        "A crossover table that comes with the package, timed as by the bench; source: a hash of csrc/ at the time. "
        "Best torch: the fastest of the torch walks.",
        about,
        columns,
        list(sizes.values()),
    )


def _cells(row: Row) -> dict[str, Any]:
    if not row.plans:
        return {}
    best = min(row.plans, key=lambda plan: row.plans[plan].us)
    cells: dict[str, Any] = {
        plan: f"**{sample.us:.1f}**" if plan == best else sample.us for plan, sample in row.plans.items()
    }
    if row.baseline:
        cells["ratio"] = min(sample.us for sample in row.baseline.values()) / row.plans[best].us
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args(arguments).check
    text = README.read_text()
    made = with_tables(text)
    if made == text:
        return 0
    if check:
        print("README.md differs from experiments/results: run experiments/tables.py", file=sys.stderr)
        return 1
    README.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

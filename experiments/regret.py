"""How much slower than the best plan is the one that auto_select takes?

Plans are selected from the tables that come with the package. A second, independent measuring run, at batches that the
first didn't measure too, says what the selected plan and the best one really take. Regret is the ratio of the two.

    python experiments/regret.py --second FOLDER
    python experiments/regret.py --seed

The latter judges what is selected where nothing is measured, by the tables that come with the package, among the plans
that the cost model knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click

from tp_walk.cost_model import KNOWN_PLANS
from tp_walk.plan_table import SHIPPED_DIR, PlanTable, Row, joint_provenance, load
from tp_walk.results import Column, ResultTable
from tp_walk.selection import Selector

RESULTS = Path(__file__).resolve().parent / "results"

COLUMNS = (
    Column("where", "table"),
    Column("mode", "mode"),
    Column("layout", "base logits"),
    Column("sizes", "sizes"),
    Column("mean", "mean regret", 3),
    Column("worst", "worst regret", 3),
    Column("worst_at", "at"),
    Column("not_best", "another plan was faster"),
)


# By whether the seed is judged.
METHODS = {
    False: "Selected from the shipped tables; both times are from a second measuring run, which also has batches that "
    "the first didn't measure.",
    True: f"Selected by the model alone, among the plans that it knows ({', '.join(KNOWN_PLANS)}), and compared with "
    "the best of these. Both times are from the shipped tables, to which the model's constants were fitted.",
}


@dataclass(frozen=True)
class Choice:
    """One size: what was selected from the first run, what was best in the second, and the ratio of their times."""

    row: Row
    selected: str
    best: str
    regret: float


def choices(first: PlanTable | None, second: PlanTable) -> list[Choice]:
    """The choice at each size of the second run, among the plans that ran there; from the first or else the seed, then
    among those that it knows."""
    found = []
    for row in second.rows:
        us = {name: sample.us for name, sample in row.plans.items() if first is not None or name in KNOWN_PLANS}
        if us:
            size = row.batch, row.gamma, row.mode == "sampled", row.layout
            selected = Selector(second.machine, first, us)(*size).name
            best = min(us, key=us.__getitem__)
            found.append(Choice(row, selected, best, us[selected] / us[best]))
    return found


def summary(where: str, found: Sequence[Choice]) -> dict[str, Any]:
    """A row of the result: mean and worst regret of some choices."""
    worst = max(found, key=lambda choice: choice.regret)
    row = worst.row
    return {
        "where": where,
        "mode": _common(choice.row.mode for choice in found),
        "layout": _common(choice.row.layout for choice in found),
        "sizes": len(found),
        "mean": mean(choice.regret for choice in found),
        "worst": worst.regret,
        "worst_at": f"batch {row.batch}, γ {row.gamma}: {worst.selected}, best {worst.best}"
        if worst.regret > 1
        else "–",
        "not_best": sum(choice.selected != choice.best for choice in found),
    }


def _common(values: Iterable[str]) -> str:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else "all"


@click.command()
@click.option("--first", type=click.Path(exists=True, file_okay=False, path_type=Path), default=SHIPPED_DIR)
@click.option("--second", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Judge by these tables.")
@click.option("--seed", is_flag=True, help="Judge the seed, by the tables of --first.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="[default: in experiments/results]")
def main(first: Path, second: Path | None, seed: bool, out: Path | None) -> None:
    if seed == (second is not None):
        raise click.UsageError("either --second or --seed")
    judges = second or first
    rows: list[dict[str, Any]] = []
    everything: list[Choice] = []
    tables: list[PlanTable] = []
    for path in sorted(judges.glob("*.json")):
        judge = PlanTable.read(path)
        tables.append(judge)
        table = None if seed else load(first / path.name, judge.machine)
        if table is None and not seed:
            raise click.ClickException(f"{first} has no {path.name}")
        found = choices(table, judge)
        everything += found
        for mode, layout in dict.fromkeys((choice.row.mode, choice.row.layout) for choice in found):
            part = [choice for choice in found if (choice.row.mode, choice.row.layout) == (mode, layout)]
            rows.append(summary(str(judge.machine), part))
    if not everything:
        raise click.ClickException(f"{judges} holds no tables")
    rows.append(summary("all", everything))
    result = ResultTable(
        "Regret of auto_select: time of the selected plan over that of the best",
        METHODS[seed],
        {"GPU": tables[0].machine.gpu, **joint_provenance(tables)},
        COLUMNS,
        rows,
    )
    result.write(out or RESULTS / ("seed_regret.json" if seed else "regret.json"))
    click.echo(result.to_markdown())


if __name__ == "__main__":
    main()

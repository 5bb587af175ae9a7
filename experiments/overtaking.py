"""From which batch on is bf16 split over two GPUs faster than int8 on one, and by how much?

Two comparisons from the tables that come with the package: with the base logits whole wherever they are wanted, as the
question is usually put (int8 on one GPU against tp_bf16 on two; of the two-GPU table where there is no other, since
int8 then walks on each GPU as if it were alone); and with the base logits sharded, as tensor parallelism leaves them,
so that int8 must gather them first.

    python experiments/overtaking.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tp_walk.plan_table import SHIPPED_DIR, Layout, Mode, PlanTable, joint_provenance
from tp_walk.results import Column, ResultTable

RESULTS = Path(__file__).resolve().parent / "results"

COLUMNS = (
    Column("vocab_size", "V"),
    Column("gamma", "γ"),
    Column("mode", "mode"),
    Column("base", "base logits"),
    Column("overtakes", "tp_bf16 ahead from batch"),
    Column("least", "by at least, %"),
    Column("most", "by at most, %"),
    Column("ratios", "int8 / tp_bf16 by batch"),
)


def times(table: PlanTable, plan: str, layout: Layout, mode: Mode, gamma: int) -> dict[int, float]:
    """batch → µs of a plan."""
    return {
        row.batch: row.plans[plan].us
        for row in table.rows
        if (row.layout, row.mode, row.gamma) == (layout, mode, gamma) and plan in row.plans
    }


def overtaking(int8: Mapping[int, float], tp_bf16: Mapping[int, float]) -> dict[str, Any]:
    """From the smallest batch after which tp_bf16 stays ahead: its lead there and beyond, in % of its own time."""
    ratios = {batch: int8[batch] / tp_bf16[batch] for batch in sorted(int8.keys() & tp_bf16.keys())}
    behind = [batch for batch, ratio in ratios.items() if ratio <= 1.0]
    ahead = {batch: ratio for batch, ratio in ratios.items() if not behind or batch > max(behind)}
    leads = [100.0 * (ratio - 1.0) for ratio in ahead.values()]
    return {
        "overtakes": min(ahead, default=None),
        "least": min(leads, default=None),
        "most": max(leads, default=None),
        "ratios": ", ".join(f"{batch}: {ratio:.2f}" for batch, ratio in ratios.items()),
    }


@click.command()
@click.option("--tables", type=click.Path(exists=True, file_okay=False, path_type=Path), default=SHIPPED_DIR)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "overtaking.json")
def main(tables: Path, out: Path) -> None:
    known = [PlanTable.read(path) for path in sorted(tables.glob("*.json"))]
    rows: list[dict[str, Any]] = []
    for two in (table for table in known if table.machine.world_size == 2):
        machine = two.machine
        same_head = machine.gpu, machine.vocab_size, machine.markov_rank
        alone = (
            table
            for table in known
            if table.machine.world_size == 1
            and (table.machine.gpu, table.machine.vocab_size, table.machine.markov_rank) == same_head
        )
        comparisons: list[tuple[str, PlanTable, Layout]] = [
            ("whole", next(alone, two), "full"),
            ("sharded", two, "sharded"),
        ]
        for mode, gamma in dict.fromkeys((row.mode, row.gamma) for row in two.rows):
            for base, table, layout in comparisons:
                ours = times(two, "tp_bf16", layout, mode, gamma)
                theirs = times(table, "int8", layout, mode, gamma)
                place = {"vocab_size": machine.vocab_size, "gamma": gamma, "mode": mode, "base": base}
                rows.append(place | overtaking(theirs, ours))
    if not rows:
        raise click.ClickException(f"{tables} has no table of two GPUs")
    result = ResultTable(
        "Where bf16 on two GPUs overtakes int8",
        "From the shipped tables. Whole base logits: int8 walks on one GPU, or on each of two. Sharded: it gathers "
        "them over two GPUs first.",
        {"GPU": known[0].machine.gpu, **joint_provenance(known)},
        COLUMNS,
        rows,
    )
    result.write(out)
    click.echo(result.to_markdown())


if __name__ == "__main__":
    main()

"""A table of runs of the main job, from what `launch/serve_walk.py --json` wrote.

torchrun --nproc-per-node 2 launch/serve_walk.py --temperature 0 --json text.json
torchrun --nproc-per-node 2 launch/serve_walk.py --synthetic --temperature 1 --max-batch 64 --json synthetic.json
python experiments/served.py text.json synthetic.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tp_walk.results import Column, ResultTable

RESULT = Path(__file__).resolve().parent / "results" / "served.json"

COLUMNS = (
    Column("work", "requests"),
    Column("temperature", "T"),
    Column("chosen_by", "plan by"),
    Column("plans", "rounds by plan"),
    Column("mean_batch", "mean batch"),
    Column("seconds", "s"),
    Column("blocks", "blocks"),
    Column("drafted_tokens_per_s", "drafted tokens/s", 0),
    Column("walk_p50_ms", "a walk, p50, ms", 2),
    Column("walk_p99_ms", "p99", 2),
    Column("accepted_with_walk", "accepted a block, with the walk", 2),
    Column("accepted_without", "without", 2),
    Column("certified_steps", "steps certified"),
)
METHOD = (
    "Continuous batching. A round's walk is a call, not a graph, and timed from the call to its tokens on the host, "
    "synchronisation included; between walks the job makes base logits and counts, which is most of its time."
)


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, of one report."""
    setup, served = report["setup"], report["served"]
    counts = served["counts"].get("certified")
    quality: dict[str, Any] = next(iter(report["quality"].values()), {})
    provenance = setup["provenance"]
    return {
        **{key: served[key] for key in ("mean_batch", "seconds", "blocks", "drafted_tokens_per_s")},
        **{key: served[key] for key in ("walk_p50_ms", "walk_p99_ms")},
        **{key: quality.get(key) for key in ("accepted_with_walk", "accepted_without")},
        **{key: setup[key] for key in ("world_size", "vocab_size", "gamma", "max_batch", "work")},
        "temperature": "0 and 1 by turns" if setup["temperature"] is None else f"{setup['temperature']:g}",
        "chosen_by": "--plan" if "named by the caller" in provenance else "auto_select",
        "provenance": provenance,
        "plans": ", ".join(f"{plan} {rounds:,}" for plan, rounds in served["plans"].items()),
        "certified_steps": f"{counts['certified_steps']:,} of {counts['steps']:,}"
        if counts and served["plans"].get("certified")
        else None,
    }


@click.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULT, show_default=True)
def main(reports: tuple[Path, ...], out: Path) -> None:
    read = [json.loads(path.read_text()) for path in reports]
    if any(report["environment"] != read[0]["environment"] for report in read):
        raise click.ClickException("the reports are of different machines or versions")
    setup = read[0]["setup"]
    shape = f"V = {setup['vocab_size']:,}, r = {setup['markov_rank']}, γ = {setup['gamma']}"
    title = f"The main job on {setup['world_size']} ranks: {shape}"
    result = ResultTable(title, METHOD, read[0]["environment"], COLUMNS, [row_of(report) for report in read])
    result.write(out)
    click.echo(result.to_markdown())


if __name__ == "__main__":
    main()

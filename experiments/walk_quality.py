#!/usr/bin/env python3
"""What does a walk do for a blind block? Accepted tokens with it and without, and where its tokens were in the base.

python experiments/text_head.py && python experiments/walk_quality.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from held_out import GAMMA, RESAMPLES, HeldOutText, command, interval, with_interval

from tp_walk.results import Column, ResultTable, environment
from tp_walk.serving import TOP_SIZES
from tp_walk.serving_report import temperature_name

RESULT = Path(__file__).parent / "results" / "walk_quality.json"
TEMPERATURES = (0.0, 1.0)


def measure(directory: Path, blocks: int) -> ResultTable:
    """A row for each temperature.

    Raises:
        WalkError: there is no text head in the directory.
    """
    text = HeldOutText.at_random(directory, blocks)
    w2, right = text.w2.float(), text.continuations()
    ways = {
        "walk": lambda u: u.float() @ w2.T,
        "base": lambda u: torch.zeros(len(u), len(w2)),
    }
    rows: list[dict[str, object]] = []
    for temperature in TEMPERATURES:
        row: dict[str, object] = {"temperature": temperature_name(temperature)}
        drafts = text.drafts(ways, temperature)
        for way, draft in drafts.items():
            found = interval(text.accepted(draft))
            row |= dict(zip((f"{way}_accepted", f"{way}_low", f"{way}_high"), found, strict=True))
            row[f"{way}_text"] = with_interval(found, 3)
            row[f"{way}_matching_percent"] = 100 * float((draft.tokens == right).double().mean())
        for size in TOP_SIZES:
            row[f"top_{size}_percent"] = 100 * float((drafts["walk"].base_ranks < size).double().mean())
        rows.append(row)
    return ResultTable(
        title="A blind block with and without the walk, on held-out text",
        method=f"{blocks} blocks of γ = {GAMMA} on a CPU, in text held out of {text.description}; in brackets 95 % of "
        f"{RESAMPLES} bootstrap means over blocks. Matching: tokens that are the text's at their place. Top: how often "
        "the walk's token is among so many of its step's likeliest by the base alone.",
        environment=environment(),
        columns=[
            Column("temperature", ""),
            Column("walk_text", "accepted a block, walk"),
            Column("base_text", "accepted, base alone"),
            Column("walk_matching_percent", "matching, walk, %"),
            Column("base_matching_percent", "matching, base alone, %"),
            *[Column(f"top_{size}_percent", f"top {size}, %") for size in TOP_SIZES],
        ],
        rows=rows,
    )


if __name__ == "__main__":
    command(measure, RESULT, __doc__)()

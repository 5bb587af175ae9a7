#!/usr/bin/env python3
"""How many steps, and whole blocks, do the candidates of plan `certified` decide on real text, and how many are scored?

python experiments/text_head.py && python experiments/certified_share.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from held_out import CHUNK, GAMMA, SEED, HeldOutText, command
from rich.progress import track

from tp_walk.certify import bias_bound, limit, selection_values
from tp_walk.reference import add_bias, ordered
from tp_walk.results import Column, ResultTable, environment
from tp_walk.serving_report import temperature_name

RESULTS = Path(__file__).parent / "results"
TEMPERATURES = (0.0, 1.0)
BIAS_FACTORS = (1, 2, 4)
LENGTHS = (256, 512, 1024, 2048, 4096)
QUANTILES = (0.5, 0.9, 0.99)


def walk(text: HeldOutText, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`[factors, blocks, gamma, lengths]` bool, certified or not, and `[factors, blocks, gamma]` ids to be scored.

    Each step starts from the right token, whatever became of the steps before.
    """
    generator = torch.Generator().manual_seed(SEED)
    w2, every = text.w2.float(), text.anchors()
    certified, scored = [], []
    for first in track(range(0, len(every), CHUNK), f"T = {temperature:g}", transient=True):
        anchors = every[first : first + CHUNK]
        base = text.base.logits(anchors, GAMMA)[..., text.used]
        sampled = torch.full((len(anchors),), temperature > 0)
        divisor = torch.full((len(anchors),), temperature) if temperature > 0 else None
        previous = anchors.repeat(len(BIAS_FACTORS), 1)
        steps = []
        for step in range(GAMMA):
            score = selection_values(base[:, step], divisor, sampled, "engine")
            noise = torch.zeros(())
            if divisor is not None:
                noise = -torch.empty_like(score).exponential_(generator=generator).log_()
                score = score / divisor[:, None] + noise
            order = ordered(score)
            largest = order.topk(max(LENGTHS) + 1, dim=1).values
            of_factors = []
            for i, factor in enumerate(BIAS_FACTORS):
                dots = factor * (text.head.w1[previous[i]].float() @ w2.T)
                values = add_bias(base[:, step], dots, "engine").float()
                if divisor is not None:
                    values = values / divisor[:, None] + noise
                value, where = values.max(dim=1)
                # Ids that the corpus lacks have zero rows: their dots are 0.
                bound = bias_bound(dots).clamp_min(0.0)
                best = ordered(value)[:, None]
                limits = limit(largest, bound, divisor, sampled, "engine")
                # An id that isn't kept is no certified step's best, so the best of all may stand for the kept.
                of_factors.append((best > limits[:, list(LENGTHS)], _reaching(order, best, bound, divisor, sampled)))
                previous[i] = text.used[where]
            steps.append(tuple(torch.stack(several) for several in zip(*of_factors, strict=True)))
        done, reached = (torch.stack(several, dim=2) for several in zip(*steps, strict=True))
        certified.append(done)
        scored.append(reached)
    return torch.cat(certified, dim=1), torch.cat(scored, dim=1)


def _reaching(
    order: torch.Tensor, best: torch.Tensor, bound: torch.Tensor, divisor: torch.Tensor | None, sampled: torch.Tensor
) -> torch.Tensor:
    """`[batch]`: how many ids the best doesn't exclude."""
    return (limit(order, bound, divisor, sampled, "engine") >= best).sum(dim=1)


def measure(directory: Path, blocks: int) -> ResultTable:
    """A row for each temperature, factor of the bias and list length.

    Raises:
        WalkError: there is no text head in the directory.
    """
    text = HeldOutText.at_random(directory, blocks)
    rows: list[dict[str, object]] = []
    for temperature in TEMPERATURES:
        certified, scored = walk(text, temperature)
        for i, factor in enumerate(BIAS_FACTORS):
            quantiles = torch.quantile(scored[i].flatten().float(), torch.tensor(QUANTILES)).tolist()
            for j, length in enumerate(LENGTHS):
                steps = certified[i, :, :, j].double()
                whole = float(steps.prod(dim=1).mean())
                row: dict[str, object] = {
                    "temperature": temperature_name(temperature),
                    "factor": factor,
                    "length": length,
                    "steps_percent": 100 * float(steps.mean()),
                    "blocks_percent": 100 * whole,
                    "batches_percent": 100 * whole**64,
                    "most_scored": int(scored[i].max()),
                }
                row |= {f"scored_p{100 * q:g}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
                rows.append(row)
    return ResultTable(
        title="What the candidates of plan certified decide on held-out text",
        method=f"{blocks} blocks of γ = {GAMMA} on a CPU, in text held out of {text.description}. Bias: W1 times the "
        "factor. List: candidates kept of a request's step. Steps, each from the right token, and blocks of which all "
        "steps are certified; of 64: were blocks independent. To score: ids that a step's best doesn't exclude.",
        environment=environment(),
        columns=[
            Column("temperature", ""),
            Column("factor", "bias ×"),
            Column("length", "list"),
            Column("steps_percent", "steps, %", 2),
            Column("blocks_percent", "blocks, %", 2),
            Column("batches_percent", "all of 64 blocks, %", 1),
            *[Column(f"scored_p{100 * q:g}", f"to score, p{100 * q:g}", 0) for q in QUANTILES],
            Column("most_scored", "most"),
        ],
        rows=rows,
    )


def plot(table: ResultTable, chart: Path) -> None:
    """Blocks that fall back over the length of the list, a curve for each temperature and factor."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves: dict[tuple[object, object], list[tuple[int, float]]] = {}
    for row in table.rows:
        point = int(str(row["length"])), 100 - float(str(row["blocks_percent"]))
        curves.setdefault((row["temperature"], row["factor"]), []).append(point)
    for (temperature, factor), points in curves.items():
        style = "-" if temperature == temperature_name(0.0) else "--"
        axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{temperature}, bias × {factor}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xlabel("candidates kept of a request's step")
    axes.set_ylabel("blocks that fall back, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(chart, metadata={"Date": None})


if __name__ == "__main__":
    command(measure, RESULTS / "certified_share.json", __doc__, blocks=500, draw=plot)()

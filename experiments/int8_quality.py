#!/usr/bin/env python3
"""What do 8 bits cost? Errors of W2 and of the bias in int8, e4m3 and e5m2, and what becomes of drafts on real text.

    python experiments/text_head.py && python experiments/int8_quality.py

All three formats have the row scales of plan int8, max|row| / 127. The drafts are those of blocks at random places of
text that the head wasn't fitted to; each format draws the same noise. Only ids that the corpus uses are candidates: the
others have zero rows in W2, and base logits of log(0.01 / tokens): less than a thousandth of the draws at T = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track

from tp_walk.blind_base import BlindBase, BlindBaseFit
from tp_walk.errors import WalkError
from tp_walk.head import MarkovHead
from tp_walk.quantize import quantize_rows, scale_dots, split_planes
from tp_walk.results import Column, ResultTable, environment
from tp_walk.shard import Shard
from tp_walk.text import text_head_directory

RESULT = Path(__file__).parent / "results" / "int8_quality.json"
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = ("bf16", "int8", *FLOATS)
GAMMA, CHUNK, RESAMPLES, SEED = 7, 50, 2000, 5
# Rows of Gaussian weights: enough for three digits of an error.
GAUSSIAN_ROWS, RANK = 32_768, 256
ERROR_TOKENS = 512

# u `[batch, r]` bf16 → the bias `[batch, rows]` float32.
Bias = Callable[[torch.Tensor], torch.Tensor]


def bias_of(w2: torch.Tensor, form: str) -> tuple[torch.Tensor, Bias]:
    """W2 `[rows, r]` as the format keeps it, in float32, and its bias as a plan computes it."""
    if form == "bf16":
        exact = w2.float()
        return exact, lambda u: u.float() @ exact.T
    rows, scales = quantize_rows(w2)
    if form in FLOATS:
        kept = (w2.float() / scales[:, None]).to(FLOATS[form]).float() * scales[:, None]
        return kept, lambda u: u.float() @ kept.T
    steps = rows.float()

    def integer_bias(u: torch.Tensor) -> torch.Tensor:
        hi, lo, u_scales = split_planes(u)
        # Exact: a plane's dots are below 127 · 128 · r, which float32 holds for r ≤ 512.
        high, low = (plane.float() @ steps.T for plane in (hi, lo))
        return scale_dots((256 * high.int() + low.int()), u_scales, scales)

    return steps * scales[:, None], integer_bias


def errors(w2: torch.Tensor, u: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Relative Frobenius errors of W2 and of the bias after u `[n, r]`, by format."""
    right, right_bias = w2.double(), u.double() @ w2.double().T
    found = {}
    for form in FORMATS[1:]:
        kept, bias = bias_of(w2, form)
        off, bias_off = (kept.double() - right).norm(), (bias(u).double() - right_bias).norm()
        found[form] = float(off / right.norm()), float(bias_off / right_bias.norm())
    return found


@dataclass(frozen=True)
class Text:
    """Held-out text for a head. used: ids with rows that aren't zero. places: (document, position) of each anchor."""

    head: MarkovHead
    base: BlindBase
    used: torch.Tensor
    documents: list[torch.Tensor]
    places: list[tuple[int, int]]

    @classmethod
    def at_random(cls, directory: Path, blocks: int) -> Text:
        head, fit = MarkovHead.from_checkpoint(directory), BlindBaseFit.read(directory)
        used = head.w2_rows(0, head.vocab_size).any(1).nonzero()[:, 0]
        base = BlindBase(fit, Shard(0, head.vocab_size), torch.device("cpu"))
        ends = np.cumsum([len(document) - GAMMA for document in fit.held_out])
        picks = np.random.default_rng(SEED).choice(int(ends[-1]), blocks, replace=False)
        which = np.searchsorted(ends, picks, side="right")
        begins = np.concatenate(([0], ends))[which]
        places = list(zip(which.tolist(), (picks - begins).tolist(), strict=True))
        return cls(head, base, used, fit.held_out, places)

    def anchors(self) -> torch.Tensor:
        return torch.stack([self.documents[document][position] for document, position in self.places])

    def continuations(self) -> torch.Tensor:
        after = (self.documents[d][position + 1 : position + 1 + GAMMA] for d, position in self.places)
        return torch.stack(list(after))

    def drafts(self, temperature: float) -> dict[str, torch.Tensor]:
        """`[blocks, gamma]` ids by format, at a temperature (0: greedy) and with the same noise."""
        w2 = self.head.w2_rows(0, self.head.vocab_size)[self.used]
        biases = {form: bias_of(w2, form)[1] for form in FORMATS}
        drafts: dict[str, list[torch.Tensor]] = {form: [] for form in FORMATS}
        generator = torch.Generator().manual_seed(SEED)
        name = f"T = {temperature:g}"
        every = self.anchors()
        for first in track(range(0, len(every), CHUNK), name, transient=True):
            anchors = every[first : first + CHUNK]
            base = self.base.logits(anchors, GAMMA)[..., self.used].float()
            noise = torch.zeros(())
            if temperature > 0:
                noise = -torch.empty_like(base).exponential_(generator=generator).log_()
            for form, bias in biases.items():
                previous, tokens = anchors, []
                for step in range(GAMMA):
                    # The rounding of engines: bias and sum to bf16.
                    values = (base[:, step] + bias(self.head.w1[previous]).bfloat16().float()).bfloat16().float()
                    if temperature > 0:
                        values = values / temperature + noise[:, step]
                    previous = self.used[values.argmax(-1)]
                    tokens.append(previous)
                drafts[form].append(torch.stack(tokens, 1))
        return {form: torch.cat(parts) for form, parts in drafts.items()}


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean of the blocks' values, and the middle 95 % of the means of blocks drawn again with replacement."""
    draws = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def kept_text(text: Text, temperature: float) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By format: share of tokens that bf16 drafts too (%), accepted tokens a block, and accepted less bf16's."""
    drafts, right = text.drafts(temperature), text.continuations()
    accepted = {form: (draft == right).cumprod(1).sum(1).double().numpy() for form, draft in drafts.items()}
    return {
        form: {
            "equal": interval(100 * (draft == drafts["bf16"]).double().mean(1).numpy()),
            "accepted": interval(accepted[form]),
            "accepted_less_bf16": interval(accepted[form] - accepted["bf16"]),
        }
        for form, draft in drafts.items()
    }


def with_interval(found: tuple[float, float, float], digits: int) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{mean} ({low} to {high})"


def measure(directory: Path, blocks: int) -> ResultTable:
    """All of it, as one table.

    Raises:
        WalkError: there is no text head in the directory.
    """
    text = Text.at_random(directory, blocks)
    generator = torch.Generator().manual_seed(SEED)
    gaussian, gaussian_u = (torch.randn(n, RANK, generator=generator).bfloat16() for n in (GAUSSIAN_ROWS, ERROR_TOKENS))
    of_weights = {
        "text head": errors(
            text.head.w2_rows(0, text.head.vocab_size)[text.used], text.head.w1[text.anchors()[:ERROR_TOKENS]]
        ),
        "Gaussian": errors(gaussian, gaussian_u),
    }
    rows: list[dict[str, object]] = [
        {
            "weights": weights,
            "format": form,
            "w2_error_percent": 100 * w2_error,
            "bias_error_percent": 100 * bias_error,
            "w2_error_over_int8": w2_error / found["int8"][0],
        }
        for weights, found in of_weights.items()
        for form, (w2_error, bias_error) in found.items()
    ]
    rows.insert(0, {"weights": "text head", "format": "bf16"})
    for temperature, mode in ((0.0, "greedy"), (1.0, "sampled")):
        for form, found in kept_text(text, temperature).items():
            row = next(row for row in rows if row["weights"] == "text head" and row["format"] == form)
            for name, (mean, low, high) in found.items():
                row |= {f"{mode}_{name}": mean, f"{mode}_{name}_low": low, f"{mode}_{name}_high": high}
            row[f"{mode}_equal_text"] = with_interval(found["equal"], 2)
            row[f"{mode}_accepted_text"] = with_interval(found["accepted"], 3)
            row[f"{mode}_less_text"] = with_interval(found["accepted_less_bf16"], 4)
    description = BlindBaseFit.read(directory).description
    return ResultTable(
        title="8-bit weights: error, and drafts on held-out text",
        method=f"Relative Frobenius errors; every format has the row scales max|row| / 127. Bias: after {ERROR_TOKENS} "
        f"tokens of the text, or Gaussian u. Drafts: {blocks} blocks of γ = {GAMMA} on a CPU, in text held out of "
        f"{description}; in brackets 95 % of {RESAMPLES} bootstrap means over blocks. Gaussian: {GAUSSIAN_ROWS} rows.",
        environment=environment(),
        columns=[
            Column("weights", "weights"),
            Column("format", "format"),
            Column("w2_error_percent", "error of W2, %", 3),
            Column("w2_error_over_int8", "over int8's", 2),
            Column("bias_error_percent", "error of the bias, %", 3),
            Column("greedy_equal_text", "tokens as bf16, greedy, %"),
            Column("greedy_accepted_text", "accepted, greedy"),
            Column("sampled_equal_text", "tokens as bf16, T = 1, %"),
            Column("sampled_accepted_text", "accepted, T = 1"),
        ],
        rows=rows,
    )


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--blocks", default=4000, show_default=True, type=click.IntRange(100), help="Blocks drafted.")
@click.option("--head", type=click.Path(path_type=Path), help="Directory of experiments/text_head.py; its default.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File to write.")
def main(blocks: int, head: Path | None, out: Path) -> None:
    try:
        table = measure(head or text_head_directory(), blocks)
    except WalkError as error:
        raise click.ClickException(f"{error}; run experiments/text_head.py first") from error
    table.write(out)
    click.echo(table.to_markdown())


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What do 8 bits cost? Errors of W2 and of the bias in int8, e4m3 and e5m2, and what becomes of drafts on real text.

    python experiments/text_head.py && python experiments/int8_quality.py

All three formats have the row scales of plan int8, max|row| / 127. The drafts are those of held_out.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from held_out import GAMMA, RESAMPLES, SEED, Bias, HeldOutText, command, interval, with_interval

from tp_walk.quantize import quantize_rows, scale_dots, split_planes
from tp_walk.results import Column, ResultTable, environment

RESULT = Path(__file__).parent / "results" / "int8_quality.json"
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = ("bf16", "int8", *FLOATS)
# Rows of Gaussian weights: enough for three digits of an error.
GAUSSIAN_ROWS, RANK = 32_768, 256
ERROR_TOKENS = 512


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


def kept_text(text: HeldOutText, temperature: float) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By format: share of tokens that bf16 drafts too (%), accepted tokens a block, and accepted less bf16's."""
    drafts = text.drafts({form: bias_of(text.w2, form)[1] for form in FORMATS}, temperature)
    accepted = {form: text.accepted(draft) for form, draft in drafts.items()}
    return {
        form: {
            "equal": interval(100 * (draft.tokens == drafts["bf16"].tokens).double().mean(1).numpy()),
            "accepted": interval(accepted[form]),
            "accepted_less_bf16": interval(accepted[form] - accepted["bf16"]),
        }
        for form, draft in drafts.items()
    }


def measure(directory: Path, blocks: int) -> ResultTable:
    """All of it, as one table.

    Raises:
        WalkError: there is no text head in the directory.
    """
    text = HeldOutText.at_random(directory, blocks)
    generator = torch.Generator().manual_seed(SEED)
    gaussian, gaussian_u = (torch.randn(n, RANK, generator=generator).bfloat16() for n in (GAUSSIAN_ROWS, ERROR_TOKENS))
    of_weights = {
        "text head": errors(text.w2, text.head.w1[text.anchors()[:ERROR_TOKENS]]),
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
    return ResultTable(
        title="8-bit weights: error, and drafts on held-out text",
        method=f"Relative Frobenius errors; every format has the row scales max|row| / 127. Bias: after {ERROR_TOKENS} "
        f"tokens of the text, or Gaussian u. Drafts: {blocks} blocks of γ = {GAMMA} on a CPU, in text held out of "
        f"{text.description}; in brackets 95 % of {RESAMPLES} bootstrap means over blocks. Gaussian weights have "
        f"{GAUSSIAN_ROWS} rows.",
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


if __name__ == "__main__":
    command(measure, RESULT, __doc__)()

"""The comparison of 8-bit formats: their arithmetic, the errors and the table."""

from __future__ import annotations

from pathlib import Path

import int8_quality
import pytest
import text_head
import torch
from held_out import GAMMA
from int8_quality import FORMATS, bias_of, errors

from tp_walk.quantize import quantize_rows, scale_dots, split_planes


def weights(rows: int, rank: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_int8_bias_is_the_plans() -> None:
    w2, u = weights(40, 512), weights(6, 512, seed=1)
    rows, scales = quantize_rows(w2)
    hi, lo, u_scales = split_planes(u)
    acc = (256 * hi.long() + lo.long()) @ rows.long().T
    assert torch.equal(bias_of(w2, "int8")[1](u), scale_dots(acc.int(), u_scales, scales))


def test_formats_round_to_what_they_hold() -> None:
    w2 = torch.tensor([[127.0, 2.0, 9.0, -0.25]]).bfloat16()  # the scale is 1
    held = {
        "bf16": [127.0, 2.0, 9.0, -0.25],
        "int8": [127.0, 2.0, 9.0, 0.0],
        "e4m3": [128.0, 2.0, 9.0, -0.25],
        "e5m2": [128.0, 2.0, 8.0, -0.25],
    }
    assert {form: bias_of(w2, form)[0][0].tolist() for form in FORMATS} == held


@pytest.mark.parametrize("form", FORMATS[1:])
def test_errors_are_relative_frobenius(form: str) -> None:
    w2, u = weights(50), weights(7, seed=2)
    kept, bias = bias_of(w2, form)
    w2_error, bias_error = errors(w2, u)[form]
    off = (kept.double() - w2.double()).square().sum() / w2.double().square().sum()
    assert w2_error == pytest.approx(float(off.sqrt()), rel=1e-9)
    right = u.double() @ w2.double().T
    off = (bias(u).double() - right).square().sum() / right.square().sum()
    assert bias_error == pytest.approx(float(off.sqrt()), rel=1e-9)
    # e4m3 keeps 3 bits of a mantissa, e5m2 2: at most 1/16 and 1/8 off, but for the smallest.
    assert 0 < w2_error < {"int8": 0.02, "e4m3": 1 / 16, "e5m2": 1 / 8}[form]


def test_table_of_a_small_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten eleven twelve\n" * 150)
    text_head.fit_text_head([text], tmp_path, 8, GAMMA, lambda stage: None)
    monkeypatch.setattr(int8_quality, "GAUSSIAN_ROWS", 64)
    table = int8_quality.measure(tmp_path, 60)
    assert [(row["weights"], row["format"]) for row in table.rows] == [
        *[("text head", form) for form in FORMATS],
        *[("Gaussian", form) for form in FORMATS[1:]],
    ]
    first, second = table.rows[:2]
    assert first["greedy_equal"] == 100.0
    assert first["greedy_accepted"] > 0.9 * GAMMA
    assert second["greedy_accepted_less_bf16"] == second["greedy_accepted"] - first["greedy_accepted"]
    assert "text.txt" in table.method
    assert str(tmp_path) not in table.to_markdown()

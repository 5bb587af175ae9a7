"""Quantisation against the definition in numpy float32 and Python integers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tp_walk.quantize import quantize_rows, scale_dots, split_planes

F32 = np.float32
VALUES = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = hnp.arrays(F32, (3, 7), elements=VALUES)


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values).bfloat16()


@given(ROWS)
def test_rows_follow_the_definition(values: np.ndarray) -> None:
    rows = bf16(values)
    quantized, scales = quantize_rows(rows)
    assert quantized.dtype == torch.int8
    for row, q, scale in zip(rows.float().numpy(), quantized.numpy(), scales.numpy(), strict=True):
        largest = np.abs(row).max()
        assert scale == (largest / F32(127) if largest else F32(1))
        assert (q == np.rint(row / scale)).all()
        assert np.abs(q.astype(int)).max() <= 127


@given(ROWS)
def test_planes_follow_the_definition(values: np.ndarray) -> None:
    u = bf16(values)
    high, low, scales = split_planes(u)
    assert high.dtype == low.dtype == torch.int8
    for row, hi, lo, scale in zip(u.float().numpy(), high.numpy(), low.numpy(), scales.numpy(), strict=True):
        largest = np.abs(row).max()
        assert scale == (largest / F32(32512) if largest else F32(1))
        t = 256 * hi.astype(int) + lo
        assert (hi == t + 128 >> 8).all()
        if largest == 0 or largest > 2.0**-120:
            assert (t == np.rint(row / scale)).all()


def test_zero_rows_have_scale_one() -> None:
    zero = torch.zeros(1, 4).bfloat16()
    assert quantize_rows(zero)[1].tolist() == [1.0]
    high, low, scale = split_planes(zero)
    assert not high.any()
    assert not low.any()
    assert scale.tolist() == [1.0]


def test_ties_go_to_even() -> None:
    # The scale is 1, so the quotients are the values themselves.
    quantized, _ = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]).bfloat16())
    assert quantized.tolist() == [[127, 0, 2, 2, 0, -2]]
    high, low, _ = split_planes(torch.tensor([[32512.0, 0.5, 1.5, 127.5, -128.5, 128.0]]))
    assert (256 * high.int() + low.int()).tolist() == [[32512, 0, 2, 128, -128, 128]]
    assert low.tolist() == [[0, 0, 2, -128, -128, -128]]


def test_a_scale_that_rounds_in_the_denormals_leaves_no_plane() -> None:
    # 2^-133 / 32512 is 2.02 of float32's smallest steps: rounded to 2, t would be 32768, and hi 128.
    high, low, _ = split_planes(torch.tensor([[2.0**-133, -(2.0**-133)]]).bfloat16())
    assert (256 * high.int() + low.int()).tolist() == [[32639, -32639]]


def test_the_largest_sums_stay_exact_in_float32() -> None:
    # What the reference's plane products lean on, at r = 512: |q| = 127, and -128 in the low plane.
    low = torch.full((512,), -128.0)
    q = torch.full((512,), 127.0)
    assert abs(float(low @ q)) == 512 * 128 * 127 < 2**24


def test_dots_are_scaled_by_two_products_in_order() -> None:
    rng = np.random.default_rng(0)
    acc = rng.integers(-(2**31), 2**31, (3, 400)).astype(np.int32)
    u_scales, row_scales = rng.random(3).astype(F32), rng.random(400).astype(F32)
    got = scale_dots(torch.tensor(acc), torch.tensor(u_scales), torch.tensor(row_scales)).numpy()
    right = (acc.astype(F32) * u_scales[:, None]).astype(F32) * row_scales
    assert (got == right).all()
    assert (got != acc.astype(F32) * (u_scales[:, None] * row_scales)).any()

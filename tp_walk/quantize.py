"""W2 → int8 rows with a scale each; u = W1[prev] → two int8 planes with one scale. Definitions of DESIGN's int8 dot."""

from __future__ import annotations

import torch

# Beyond this rank a sum of r products of a row and 256·hi + lo can leave int32.
MAX_INT8_RANK = 512

# t is split into hi = (t + 128) >> 8 and lo; hi is an int8 up to here. Only where max|u| / 32512 rounds in fp32's
# denormals can t come out larger.
_MAX_T = 127 * 256 + 127


def _scales(values: torch.Tensor, steps: float) -> torch.Tensor:
    """max|row| / steps in float32 for each row of `[..., r]`; 1 for a zero row."""
    # A divisor on the device: by a Python number, CUDA multiplies with the reciprocal, which isn't IEEE division.
    scale = values.abs().amax(dim=-1) / torch.full((), steps, device=values.device)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_rows(w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of W2 `[V, r]` (finite, bf16 or float32) → int8 `[V, r]` and float32 scales `[V]`.

    scale = max|row| / 127 (1 for a zero row) and q = row / scale to the nearest even integer, by IEEE fp32 division.
    """
    rows = w2.float()
    scales = _scales(rows, 127.0)
    return (rows / scales[:, None]).round().to(torch.int8), scales


def split_planes(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u `[..., r]` (finite, bf16 or float32) → planes hi, lo, int8 `[..., r]`, and float32 scales `[...]`.

    scale = max|u| / 32512 (1 for a zero u), t = u / scale to the nearest even integer; hi = (t + 128) >> 8 and
    lo = t − 256·hi, so u ≈ scale · (256·hi + lo).
    """
    u = u.float()
    scales = _scales(u, 32512.0)
    t = (u / scales[..., None]).round().clamp(-_MAX_T, _MAX_T).to(torch.int32)
    hi = t + 128 >> 8
    return hi.to(torch.int8), (t - 256 * hi).to(torch.int8), scales


def scale_dots(acc: torch.Tensor, u_scales: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
    """Integer dots `[batch, V]` int32, u's scales `[batch]` and the rows' `[V]` → the float32 bias `[batch, V]`.

    (float32(acc) · u_scale) · row_scale: two fp32 products in this order, the same bits on every device.
    """
    return acc.float() * u_scales[:, None] * row_scales

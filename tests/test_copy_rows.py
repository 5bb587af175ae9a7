"""csrc/copy_rows.cuh, run on the host: every element of every row arrives in its place, and nothing lies beside it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_build import build, needs_compiler

from tp_walk.kernels import WalkParams
from tp_walk.spread import SpreadParams, spread_macros, step_stride

pytestmark = needs_compiler

UNTOUCHED = 0xEE

HARNESS = """
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
unsigned __float_as_uint(float value);
template <typename T> inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> inline T max(T a, T b) { return a > b ? a : b; }
#include "copy_rows.cuh"
extern "C" void copy(const tpw::WalkParams* p, const tpw::SpreadParams* spread, int valid, int owner, int warps) {
    for (int warp = 0; warp < warps; ++warp)
        for (int lane = 0; lane < tpw::kWarpSize; ++lane) tpw::copy_rows(*p, *spread, valid, owner, warp, warps, lane);
}
"""


@pytest.fixture(scope="module", params=[2, 4], ids=["bf16", "fp32"])
def element(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.dtype, ctypes.CDLL]:
    """The elements' dtype, and the copy of them. A misaligned access ends the process."""
    macros = spread_macros(2, 64, base_fp32=request.param == 4)
    options = ["-O1", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    library = build(tmp_path_factory.mktemp("copy_rows"), HARNESS, macros, options)
    return np.dtype(f"u{request.param}"), library


def aligned(num_bytes: int, shift: int = 0) -> np.ndarray:
    """Bytes that begin `shift` beyond a multiple of 16."""
    spare = np.full(num_bytes + 32, UNTOUCHED, dtype=np.uint8)
    start = -spare.ctypes.data % 16 + shift
    return spare[start : start + num_bytes]


@pytest.mark.parametrize("shares_rows", [False, True], ids=["all rows to every rank", "each its share"])
@pytest.mark.parametrize("seed", range(60))
def test_rows_arrive_whole(element: tuple[np.dtype, ctypes.CDLL], shares_rows: bool, seed: int) -> None:
    dtype, library = element
    rng = np.random.default_rng(seed)
    world, batch, gamma = int(rng.integers(1, 9)), int(rng.integers(1, 10)), int(rng.integers(1, 4))
    vocab_size, valid = int(rng.integers(1, 2500)), int(rng.integers(0, batch + 1))
    shares = world if shares_rows else 1
    # Starts are multiples of 4; a shard may be empty.
    cuts = [0, *sorted(int(cut) // 4 * 4 for cut in rng.integers(0, vocab_size + 1, world - 1)), vocab_size]
    rows = rng.integers(0, 1 << 8 * dtype.itemsize, (batch, gamma, vocab_size), dtype=dtype)
    line_bytes = step_stride(vocab_size) * dtype.itemsize
    buffers = [aligned(-(-batch // shares) * gamma * line_bytes) for _ in range(world)]

    for rank in range(world):
        width = cuts[rank + 1] - cuts[rank]
        if width == 0:
            continue
        step = width + int(rng.integers(0, 9))
        row = gamma * step + int(rng.integers(0, 5))
        source = aligned(batch * row * dtype.itemsize, int(rng.integers(0, 8)) * dtype.itemsize % 16).view(dtype)
        for given in range(batch):
            for k in range(gamma):
                at = given * row + k * step
                source[at : at + width] = rows[given, k, cuts[rank] : cuts[rank + 1]]
        params = WalkParams(
            base_logits=source.ctypes.data, base_stride_row=row, base_stride_step=step, gamma=gamma, shares=shares
        )
        spread = SpreadParams(step_stride=step_stride(vocab_size), shard_start=cuts[rank], shard_width=width)
        for owner, buffer in enumerate(buffers):
            spread.buffers[owner] = buffer.ctypes.data
        for owner in range(world):
            library.copy(ctypes.byref(params), ctypes.byref(spread), valid, owner, int(rng.integers(1, 5)))

    for owner, buffer in enumerate(buffers):
        lines = buffer.view(dtype).reshape(-1, gamma, step_stride(vocab_size))
        right = np.full_like(lines, int.from_bytes(bytes([UNTOUCHED] * dtype.itemsize), "little"))
        of_owner = range(owner, valid, shares) if shares > 1 else range(valid)
        for row_of_share, given in enumerate(of_owner):
            right[row_of_share, :, :vocab_size] = rows[given]
        np.testing.assert_array_equal(lines, right)

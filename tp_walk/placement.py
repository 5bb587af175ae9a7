"""Where a kernel keeps each row of W2: registers, shared memory, or streamed. Arithmetic alone, the same on every machine.

The host half of the constants and of `Smem` in csrc/cta.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_walk.config import Rounding
from tp_walk.errors import PlanUnavailableError

WARP_SIZE = 32
TILE_ROWS = 16
FRAGMENT_BYTES = 16
COLUMNS = 8
MAX_GRID = 160  # slots that one warp polls: kSlotsPerLane * 32 in csrc/exchange.cuh
CONTROL_BYTES = 112
ROW_STATE_BYTES = 32


# 8 warps have 255 registers a thread. Holding W2 in 160 of them leaves 95 for the dot products, which want them for loads
# in flight. 12 warps of 168 registers, 128 of them W2, hold as much, but a step's dot products took 3,400 cycles (H200,
# batch 1): every load waited for the MMA before it.
WARPS = 8
REG_FRAGMENTS = 40  # 16 bytes a lane: the W2 operand of one MMA


@dataclass(frozen=True)
class Placement:
    """How one specialisation of the walk kernel lays out its rows.

    int8: the plan's element is int8 (else bf16). markov_rank: r, 256 or 512. column_groups: groups of 8 MMA columns that a
    pass multiplies. grid: CTAs. tiles_per_cta: 16-row tiles of W2 that a CTA owns; each warp keeps `reg_tiles` of them in
    registers, but for the last `tail_steps` k steps of the last one; those and `smem_tiles` in all stay in shared memory, and
    the rest is streamed each step.
    base_stage_bytes: of one request's staged base logits. shared_bytes: dynamic shared memory of a CTA.
    """

    int8: bool
    markov_rank: int
    column_groups: int
    grid: int
    tiles_per_cta: int
    reg_tiles: int
    tail_steps: int
    smem_tiles: int
    base_stage_bytes: int
    shared_bytes: int

    @property
    def k_steps(self) -> int:
        """MMAs that a row's dot product takes."""
        return self.markov_rank // (32 if self.int8 else 16)

    @property
    def streamed_tiles(self) -> int:
        """Tiles of a CTA that are read again each step."""
        return max(0, self.tiles_per_cta - self.reg_tiles * WARPS - self.smem_tiles)

    @property
    def fragment_bytes(self) -> int:
        """Device bytes of this rank's W2 in fragment order, padded to whole CTAs."""
        return self.grid * self.tiles_per_cta * self.k_steps * WARP_SIZE * FRAGMENT_BYTES


def requests_of(int8: bool, column_groups: int) -> int:
    """Requests that a pass multiplies: one a column, or in int8 one for the two planes of u in two columns."""
    return column_groups * (COLUMNS // 2 if int8 else COLUMNS)


def place(
    *,
    int8: bool,
    markov_rank: int,
    rows: int,
    max_batch: int,
    num_sms: int,
    shared_limit: int,
    sampled: bool,
    base_bytes: int,
    rounding: Rounding,
    column_groups: int = 1,
) -> Placement:
    """Chooses a placement.

    Args:
        rows: of W2 on this rank; 0 is fine (the rank takes part with one empty CTA).
        shared_limit: bytes of dynamic shared memory that a CTA may have (232,448 on Hopper).
        sampled: the kernel keeps a pass's noise in shared memory.
        base_bytes: of a base logit, 2 or 4.

    Raises:
        PlanUnavailableError: an r that the kernels don't hold, or no room for the staging buffers.
    """
    if markov_rank not in (256, 512):
        raise PlanUnavailableError(
            f"the kernels hold markov_rank 256 and 512, not {markov_rank}; plan reference runs it"
        )
    k_steps = markov_rank // (32 if int8 else 16)
    requests = requests_of(int8, column_groups)
    tiles = max(1, -(-rows // TILE_ROWS))
    tiles_per_cta = -(-tiles // min(num_sms, MAX_GRID))
    grid = -(-tiles // tiles_per_cta)
    reg_tiles = min(-(-REG_FRAGMENTS // k_steps), -(-tiles_per_cta // WARPS))
    tail_steps = max(0, reg_tiles * k_steps - REG_FRAGMENTS)

    cta_rows = max(tiles_per_cta, reg_tiles * WARPS) * TILE_ROWS
    tile_bytes = k_steps * WARP_SIZE * FRAGMENT_BYTES
    # 16 bytes more, for a row that starts inside a 16-byte piece; they also spread the requests over the banks.
    base_stage_bytes = cta_rows * base_bytes + 16
    staging = (
        WARPS * tail_steps * WARP_SIZE * FRAGMENT_BYTES
        + column_groups * COLUMNS * (markov_rank * (1 if int8 else 2) + 32)
        + requests * (8 * WARPS + 2) * (16 if sampled else 8 if rounding == "none" else 4)
        + 2 * requests * base_stage_bytes
        + (requests * cta_rows * 4 if sampled else 0)
        + (cta_rows * 4 if int8 else 0)
        + CONTROL_BYTES
        + max_batch * ROW_STATE_BYTES
    )
    if staging > shared_limit:
        raise PlanUnavailableError(
            f"{rows} rows of W2 on {num_sms} SMs need {staging} bytes of staging buffers each, of {shared_limit}; "
            f"split W2 over more GPUs, or use plan reference"
        )
    smem_tiles = min(max(0, tiles_per_cta - reg_tiles * WARPS), (shared_limit - staging) // tile_bytes)
    return Placement(
        int8=int8,
        markov_rank=markov_rank,
        column_groups=column_groups,
        grid=grid,
        tiles_per_cta=tiles_per_cta,
        reg_tiles=reg_tiles,
        tail_steps=tail_steps,
        smem_tiles=smem_tiles,
        base_stage_bytes=base_stage_bytes,
        shared_bytes=staging + smem_tiles * tile_bytes,
    )

"""Where a kernel keeps each row of W2: registers, shared memory, or streamed. Arithmetic alone, the same on every machine.

The host half of the constants at the top of csrc/walk.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_walk.errors import PlanUnavailableError

WARPS = 12
WARP_SIZE = 32
TILE_ROWS = 16
FRAGMENT_BYTES = 16
COLUMNS = 8
MAX_CTAS = 160  # slots that one warp polls: kSlotsPerLane * 32 in csrc/exchange.cuh
# 128 of a thread's 168 registers hold W2: 384 rows of a CTA at r = 256 in bf16.
REGISTER_FRAGMENTS = 32
CONTROL_BYTES = 96
_KEY_STRIDE = WARPS * 8 + 2


@dataclass(frozen=True)
class Placement:
    """How one specialisation of the walk kernel lays out its rows.

    int8: the plan's element is int8 (else bf16). markov_rank: r, 256 or 512. grid: CTAs. tiles_per_cta: 16-row tiles of
    W2 that a CTA owns; each warp keeps `reg_tiles` of them in registers and multiplies `fused_tiles` out of shared memory
    along with those; `smem_tiles` in all stay in shared memory, the rest is streamed each step.
    """

    int8: bool
    markov_rank: int
    grid: int
    tiles_per_cta: int
    reg_tiles: int
    fused_tiles: int
    smem_tiles: int
    base_stage_words: int
    shared_bytes: int

    @property
    def k_steps(self) -> int:
        """MMAs that a row's dot product takes."""
        return self.markov_rank // (32 if self.int8 else 16)

    @property
    def requests(self) -> int:
        """Requests that one pass multiplies: the columns of an MMA, shared by two planes of u in int8."""
        return 4 if self.int8 else 8

    @property
    def streamed_tiles(self) -> int:
        """Tiles of a CTA that are read again each step."""
        return max(0, self.tiles_per_cta - self.reg_tiles * WARPS - self.smem_tiles)

    @property
    def fragment_bytes(self) -> int:
        """Device bytes of this rank's W2 in fragment order, padded to whole CTAs."""
        return self.grid * self.tiles_per_cta * self.k_steps * WARP_SIZE * FRAGMENT_BYTES


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
    requests = 4 if int8 else 8
    tiles = max(1, -(-rows // TILE_ROWS))
    num_ctas = min(num_sms, MAX_CTAS)
    tiles_per_cta = -(-tiles // num_ctas)
    grid = -(-tiles // tiles_per_cta)
    most_reg_tiles = REGISTER_FRAGMENTS // k_steps
    reg_tiles = 1
    while reg_tiles < most_reg_tiles and reg_tiles * WARPS < tiles_per_cta:
        reg_tiles *= 2

    cta_rows = tiles_per_cta * TILE_ROWS
    tile_bytes = k_steps * WARP_SIZE * FRAGMENT_BYTES
    # One word more for a row that starts in the middle of a word, then a pad that spreads requests over the banks.
    base_stage_words = -(-cta_rows * base_bytes // 4) + 4
    staging = (
        COLUMNS * (markov_rank * (1 if int8 else 2) + 32)
        + requests * _KEY_STRIDE * 8
        + 2 * requests * base_stage_words * 4
        + (requests * cta_rows * 4 if sampled else 0)
        + (cta_rows * 4 if int8 else 0)
        + CONTROL_BYTES
        + -(-max_batch // 4) * 16
    )
    if staging > shared_limit:
        raise PlanUnavailableError(
            f"{rows} rows of W2 on {num_ctas} SMs need {staging} bytes of staging buffers each, of {shared_limit}; "
            f"split W2 over more GPUs, or use plan reference"
        )
    smem_tiles = min(max(0, tiles_per_cta - reg_tiles * WARPS), (shared_limit - staging) // tile_bytes)
    fused_tiles = max(1, reg_tiles // 2)
    if reg_tiles < most_reg_tiles or smem_tiles < fused_tiles * WARPS:
        fused_tiles = 0
    return Placement(
        int8=int8,
        markov_rank=markov_rank,
        grid=grid,
        tiles_per_cta=tiles_per_cta,
        reg_tiles=reg_tiles,
        fused_tiles=fused_tiles,
        smem_tiles=smem_tiles,
        base_stage_words=base_stage_words,
        shared_bytes=staging + smem_tiles * tile_bytes,
    )

"""Where a kernel keeps each row of W2: registers, shared memory, or streamed. Arithmetic alone, alike on every machine.

The host half of the constants and of `Smem` in csrc/cta.cuh.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tp_walk.config import Rounding
from tp_walk.errors import PlanUnavailableError

WARP_SIZE = 32
TILE_ROWS = 16
FRAGMENT_BYTES = 16
COLUMNS = 8
LINE_BYTES = 128  # all banks of shared memory
MAX_GRID = 160  # slots that one warp polls: kSlotsPerLane * 32 in csrc/exchange.cuh
CONTROL_BYTES = 256
ROW_STATE_BYTES = 32

# 8 warps hold W2 and multiply, 4 do all else; warp groups of 4 share the SM's 65,536 registers by setmaxnreg. W2 takes
# 128 of a multiply warp's 200. More of it in registers left the assembler too few for the dot products: it spilled W2,
# whose first load then waited, or finished one tile after the other, so that every MMA waited for the one before.
# In sampled kernels of tp_bf16 service warps have more to keep. 64 requests with local logits (γ = 7, V = 75,968, one
# H200) took 167.0 µs with 200 and 104, 164.1 with 192 and 120, and 182.9 with 184 and 136, when dot products wait for
# their operands, as greedy ones do with 192.
MULTIPLY_WARPS = 8
SERVICE_WARPS = 4
WARPGROUP_WARPS = 4
MULTIPLY_REGISTERS, SERVICE_REGISTERS = 200, 104
SAMPLED_REGISTERS = 192, 120
REG_FRAGMENTS = 32  # 16 bytes a lane: the W2 operand of one MMA

# What is streamed comes by chunks of so many MMAs' operands of W2, each warp's through slots of its own. Two of 4 KB
# keep 64 KB of an SM's reads under way. More of them hold more while the warps wait for u, but what they take isn't
# resident: no fewer bytes are left to read then. Where slots would serve no more than a tile a warp, tiles are loaded
# without any: at V = 163,840, 11 tiles by slots instead of 3 cost 64 sampled requests on two GPUs 264 µs, not 228.
CHUNK_STEPS = 8
STREAM_SLOTS = 2
MBARRIER_BYTES = 8
STREAM_SLOT_BYTES = MULTIPLY_WARPS * (CHUNK_STEPS * WARP_SIZE * FRAGMENT_BYTES + MBARRIER_BYTES)


@dataclass(frozen=True)
class ColumnUse:
    """What the columns of a pass's MMAs are used for. groups: of 8 columns. narrow: every other column stays empty.
    single: the kernel is for one request, and has no code for more; in int8, the columns of four requests are shared
    out among four pairs of tiles.
    """

    groups: int
    narrow: bool = False
    single: bool = False


# Those for small batches first. With a request in every other column a lane has one request to finish instead of two;
# int8 has a second plane of u in the other column anyway. Code that a single request doesn't run would lie between what
# it does run, and all of it comes from DRAM when a block begins: so it has a kernel of its own.
BF16_COLUMNS = (ColumnUse(1, narrow=True, single=True), ColumnUse(1, narrow=True), ColumnUse(1), ColumnUse(2))
INT8_COLUMNS = (ColumnUse(1, single=True), ColumnUse(1), ColumnUse(2))


@dataclass(frozen=True)
class Placement:
    """How one specialisation of the walk kernel lays out its rows.

    int8: the plan's element is int8 (else bf16). sampled: the kernel draws noise. markov_rank: r, 256 or 512.
    columns: of a pass. grid: CTAs.
    tiles_per_cta: 16-row tiles of W2 that a CTA owns; each multiply warp keeps `reg_tiles` of them in registers,
    `smem_tiles` in all stay in shared memory, and the rest is streamed each pass, through `stream_slots` slots of
    shared memory for each multiply warp, or without any. by_warpgroups: its products are wgmma's, of four warps
    together. base_stage_bytes: of one request's staged base logits. shared_bytes: dynamic shared memory of a CTA.
    """

    int8: bool
    sampled: bool
    markov_rank: int
    columns: ColumnUse
    grid: int
    tiles_per_cta: int
    reg_tiles: int
    smem_tiles: int
    stream_slots: int
    by_warpgroups: bool
    base_stage_bytes: int
    shared_bytes: int

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of a multiply warp, and of a service warp."""
        # With one tile a warp in registers the assembler finds no allocation for some of two groups.
        if self.sampled and not self.int8 and not self.stream_slots and self.reg_tiles == 2:
            return SAMPLED_REGISTERS
        return MULTIPLY_REGISTERS, SERVICE_REGISTERS

    @property
    def k_steps(self) -> int:
        """MMAs that a row's dot product takes."""
        return self.markov_rank // (32 if self.int8 else 16)

    @property
    def streamed_tiles(self) -> int:
        """Tiles of a CTA that are read again each pass."""
        return max(0, self.tiles_per_cta - self.reg_tiles * MULTIPLY_WARPS - self.smem_tiles)

    @property
    def fragment_bytes(self) -> int:
        """Device bytes of this rank's W2 in fragment order, padded to whole CTAs."""
        return self.grid * self.tiles_per_cta * self.k_steps * WARP_SIZE * FRAGMENT_BYTES


def requests_of(int8: bool, columns: ColumnUse) -> int:
    """Requests that a pass has columns for: one each, or one for two (narrow; in int8 for the two planes of u)."""
    return columns.groups * (COLUMNS // 2 if int8 or columns.narrow else COLUMNS)


def column_uses(int8: bool, max_batch: int, sampled: bool) -> list[ColumnUse]:
    """Those that batches of up to max_batch want, each for larger batches than the one before.

    Narrow columns pay for sampled requests alone: 2 and 4 took 56.5 and 58.8 µs in them, 8 in whole ones 69.3. Greedy
    it was 51.0, 52.6 and 50.1 (γ = 7, V = 151,936 on two H200s).
    """
    uses = [use for use in (INT8_COLUMNS if int8 else BF16_COLUMNS) if sampled or use.single or not use.narrow]
    enough = next((i for i, use in enumerate(uses) if serves(int8, use) >= max_batch), len(uses) - 1)
    return uses[: enough + 1]


def serves(int8: bool, columns: ColumnUse) -> int:
    """The largest batch for this kernel where one for larger batches is at hand."""
    return 1 if columns.single else requests_of(int8, columns)


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
    columns: ColumnUse,
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
    requests = requests_of(int8, columns)
    tiles = max(1, -(-rows // TILE_ROWS))
    tiles_per_cta = -(-tiles // min(num_sms, MAX_GRID))
    grid = -(-tiles // tiles_per_cta)
    # No more than every warp has: the kernel takes two register tiles for a pair, whose rows a tile without a partner
    # would share with other lanes.
    reg_tiles = min(REG_FRAGMENTS // k_steps, max(1, tiles_per_cta // MULTIPLY_WARPS))

    staged_tiles = max(tiles_per_cta, reg_tiles * MULTIPLY_WARPS)
    cta_rows, rounds = staged_tiles * TILE_ROWS, -(-staged_tiles // (2 * MULTIPLY_WARPS))
    tile_bytes = k_steps * WARP_SIZE * FRAGMENT_BYTES
    # 16 bytes more, for a row that starts inside a 16-byte piece, and what spreads a warp's requests over the banks.
    lane_requests = 1 if int8 or columns.narrow else 2
    base_stage_bytes = cta_rows * base_bytes + 16
    base_stage_bytes += (32 // lane_requests - base_stage_bytes) % LINE_BYTES
    # What each of a warp's row groups, or each warp, leaves of a request: kBestEntries of `Best`, and a pad of two.
    best_entry = 12 if sampled else 8 if rounding == "none" else 4
    best_bytes = (MULTIPLY_WARPS * (8 if best_entry == 4 or requests <= 4 else 1) + 2) * best_entry
    column_bytes = markov_rank * (1 if int8 else 2)
    staging = (
        2 * columns.groups * COLUMNS * (column_bytes + 32)
        + 2 * requests * base_stage_bytes
        + (rounds * lane_requests * MULTIPLY_WARPS * WARP_SIZE * 16 if sampled and columns.groups == 1 else 0)
        + 2 * requests * best_bytes
        + (cta_rows * 4 if int8 else 0)
        + CONTROL_BYTES
        + max_batch * ROW_STATE_BYTES
    )
    if staging > shared_limit:
        raise PlanUnavailableError(
            f"{rows} rows of W2 on {num_sms} SMs need {staging} bytes of staging buffers each, of {shared_limit}; "
            f"split W2 over more GPUs, or use plan reference"
        )
    room, beyond = shared_limit - staging, max(0, tiles_per_cta - reg_tiles * MULTIPLY_WARPS)
    slot_bytes = STREAM_SLOTS * STREAM_SLOT_BYTES
    by_slots = beyond - room // tile_bytes > MULTIPLY_WARPS and room >= slot_bytes
    smem_tiles = min(beyond, (room - slot_bytes * by_slots) // tile_bytes)
    shared_bytes = staging + smem_tiles * tile_bytes + slot_bytes * by_slots
    by_warpgroups = False
    if columns.groups == 2 and not sampled and smem_tiles == beyond:
        # u as core matrices, 16 bytes of 8 columns and a pad each: kUBytes in csrc/dot.cuh. A warpgroup multiplies four
        # tiles of shared memory also where not all of them are there.
        more = column_bytes // 16 * (COLUMNS * 16 + 16) - COLUMNS * (column_bytes + 32)
        whole = -(-smem_tiles // WARPGROUP_WARPS) * WARPGROUP_WARPS
        wanted = max(shared_bytes + 2 * columns.groups * more, whole * tile_bytes)
        if by_warpgroups := wanted <= shared_limit:
            shared_bytes = wanted
    return Placement(
        int8=int8,
        sampled=sampled,
        markov_rank=markov_rank,
        columns=columns,
        grid=grid,
        tiles_per_cta=tiles_per_cta,
        reg_tiles=reg_tiles,
        smem_tiles=smem_tiles,
        stream_slots=STREAM_SLOTS * by_slots,
        by_warpgroups=by_warpgroups,
        base_stage_bytes=base_stage_bytes,
        shared_bytes=shared_bytes,
    )


def row_order(tiles_per_cta: int) -> list[int]:
    """Which row of the CTA is row i of its tiles, taken in order; the device half is `Round` in csrc/cta.cuh.

    A lane holds rows g and g + 8 of a tile. Tiles 2j and 2j + 1 of a warp (w + 8·2j and w + 8·(2j + 1) of the CTA) are
    its pair of round j, 32 rows of which a lane has four in turn; a tile without a partner is 16 rows, two a lane.
    """
    order = []
    for tile in range(tiles_per_cta):
        slot, warp = divmod(tile, MULTIPLY_WARPS)
        first_tile = slot // 2 * 2 * MULTIPLY_WARPS
        pairs = min(max(tiles_per_cta - first_tile - MULTIPLY_WARPS, 0), MULTIPLY_WARPS)
        start = (first_tile + warp + min(warp, pairs)) * TILE_ROWS
        for half, lane_group in itertools.product((0, 1), range(8)):
            each = 4 if warp < pairs else 2
            order.append(start + each * lane_group + slot % 2 * 2 + half)
    return order

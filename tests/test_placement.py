"""Where rows of W2 lie within a CTA: every row in one place, and what a lane needs of them side by side."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from host_build import build, needs_compiler

from tp_walk import jit, kernels
from tp_walk.placement import (
    BF16_COLUMNS,
    INT8_COLUMNS,
    MULTIPLY_WARPS,
    STREAM_SLOT_BYTES,
    STREAM_SLOTS,
    TILE_ROWS,
    WARPGROUP_WARPS,
    ColumnUse,
    Placement,
    place,
    row_order,
)
from tp_walk.precompile import HOPPER

# Register tiles, shared and streamed ones; whole rounds, and rounds in which some or all warps' tiles have no partner.
TILES = [1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 36, 72]


def lane_rows(tiles: int, tile: int, lane_group: int) -> tuple[int, int]:
    """Rows g and g + 8 of a tile, as rows of the CTA."""
    order = row_order(tiles)
    return order[tile * TILE_ROWS + lane_group], order[tile * TILE_ROWS + lane_group + 8]


@pytest.mark.parametrize("tiles", TILES)
def test_every_row_has_one_place(tiles: int) -> None:
    assert sorted(row_order(tiles)) == list(range(tiles * TILE_ROWS))


@pytest.mark.parametrize("tiles", TILES)
def test_a_lanes_rows_are_consecutive(tiles: int) -> None:
    """Two of a tile, and four of a pair, of which one draw of noise has all."""
    for tile in range(tiles):
        slot, partner = tile // MULTIPLY_WARPS, tile + MULTIPLY_WARPS
        for group in range(8):
            first, second = lane_rows(tiles, tile, group)
            assert second == first + 1
            assert first % 2 == 0
            if slot % 2 == 0 and partner < tiles:
                assert first % 4 == 0
                assert lane_rows(tiles, partner, group) == (first + 2, first + 3)


def placed_in_one_cta(tiles: int, columns: ColumnUse, int8: bool = False, markov_rank: int = 256) -> Placement:
    return place(
        int8=int8,
        markov_rank=markov_rank,
        rows=tiles * TILE_ROWS,
        max_batch=64,
        num_sms=1,
        shared_limit=HOPPER.shared_limit,
        sampled=False,
        base_bytes=2,
        rounding="engine",
        columns=columns,
    )


@pytest.mark.parametrize(("int8", "markov_rank"), [(False, 256), (False, 512), (True, 256), (True, 512)])
def test_a_register_tile_beyond_the_first_is_every_warps(int8: bool, markov_rank: int) -> None:
    """The kernel pairs register tiles without a look at the CTA's tiles."""
    for tiles, columns in itertools.product(range(1, 81), INT8_COLUMNS if int8 else BF16_COLUMNS):
        placed = placed_in_one_cta(tiles, columns, int8, markov_rank)
        assert placed.tiles_per_cta == tiles
        assert placed.reg_tiles == 1 or placed.reg_tiles * MULTIPLY_WARPS <= tiles


def greedy(rows: int, int8: bool, markov_rank: int = 256, sampled: bool = False) -> Placement:
    """Of two groups of columns, on an H200."""
    return place(
        int8=int8,
        markov_rank=markov_rank,
        rows=rows,
        max_batch=64,
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
        sampled=sampled,
        base_bytes=2,
        rounding="engine",
        columns=ColumnUse(2),
    )


@pytest.mark.parametrize(("int8", "markov_rank"), [(False, 256), (False, 512), (True, 256), (True, 512)])
def test_warpgroups_have_all_of_w2_on_the_chip_and_room_for_whole_ones(int8: bool, markov_rank: int) -> None:
    found = {True: 0, False: 0}
    for rows in range(1, 270_000, 1009):
        placed = greedy(rows, int8, markov_rank)
        found[placed.by_warpgroups] += 1
        assert placed.shared_bytes <= HOPPER.shared_limit
        if placed.by_warpgroups:
            assert placed.streamed_tiles == 0
            tile_bytes = placed.k_steps * 32 * 16
            assert -(-placed.smem_tiles // WARPGROUP_WARPS) * WARPGROUP_WARPS * tile_bytes <= placed.shared_bytes
    assert min(found.values()) > 0


def test_who_multiplies_by_warpgroups() -> None:
    assert greedy(75_968, int8=False).by_warpgroups
    assert greedy(151_936, int8=True).by_warpgroups
    assert not greedy(75_968, int8=False, sampled=True).by_warpgroups
    assert not greedy(248_320, int8=True).by_warpgroups, "tiles are streamed"
    assert not any(placed_in_one_cta(36, columns).by_warpgroups for columns in BF16_COLUMNS[:3])


DEVICE = """
template <typename T> inline T min(T a, T b) {{ return a < b ? a : b; }}
template <typename T> inline T max(T a, T b) {{ return a > b ? a : b; }}
static int kTilesPerCta;  // of the kernel a constant
struct Cta {{ int lane, warp; }};
constexpr int kMultiplyWarps = {warps}, kTileRows = {tile_rows}, kRoundTiles = 2 * kMultiplyWarps;
{code}
extern "C" int first_row(int tiles, int warp, int slot, int lane) {{
    kTilesPerCta = tiles;
    return tile_row({{lane, warp}}, slot);
}}
"""


@needs_compiler
def test_the_device_finds_the_same_rows(tmp_path: Path) -> None:
    source = (jit.csrc_dir() / "cta.cuh").read_text()
    code = source[source.index("struct Round {") : source.index("// Where groups take turns:")]
    library = build(tmp_path, DEVICE.format(warps=MULTIPLY_WARPS, tile_rows=TILE_ROWS, code=code), {})
    first_row = library.first_row
    first_row.argtypes = [ctypes.c_int] * 4
    for tiles in TILES:
        for tile in range(tiles):
            slot, warp = divmod(tile, MULTIPLY_WARPS)
            for lane in range(32):
                assert first_row(tiles, warp, slot, lane) == lane_rows(tiles, tile, lane // 4)[0]


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_fragments_hold_the_rows_in_that_order(int8: bool) -> None:
    rows = 1000  # not a whole number of tiles
    (one, *_) = kernels.specialisations(
        int8=int8,
        markov_rank=256,
        rows=rows,
        world_size=1,
        max_batch=4,
        rounding="engine",
        num_sms=5,
        shared_limit=HOPPER.shared_limit,
    )
    placement, dtype = one.placement, torch.int8 if int8 else torch.bfloat16
    w2 = torch.arange(rows * 256).remainder(251).sub(125).view(rows, 256).to(dtype)
    words = kernels.to_fragments(w2, placement)
    assert words.shape == (placement.grid * placement.tiles_per_cta, placement.k_steps, 32, 4)
    halves = placement.k_steps, 2, 4, 4 // dtype.itemsize  # of a row: k step, half of its k range, j, elements
    padded = torch.zeros(words.shape[0] * TILE_ROWS, 256, dtype=dtype)
    padded[:rows] = w2
    assert placement.tiles_per_cta > MULTIPLY_WARPS, "some tiles have partners"
    for tile in range(words.shape[0]):
        cta, tile_of_cta = divmod(tile, placement.tiles_per_cta)
        for group in range(8):
            for number, row in enumerate(lane_rows(placement.tiles_per_cta, tile_of_cta, group)):
                right = padded[cta * placement.tiles_per_cta * TILE_ROWS + row].view(halves)
                # Registers a0 and a2 are of row g, a1 and a3 of row g + 8; a0 and a1 of the first half.
                held = words[tile, :, 4 * group : 4 * group + 4, number::2].contiguous().view(dtype)
                held = held.view(placement.k_steps, 4, 2, 4 // dtype.itemsize).transpose(1, 2)
                assert torch.equal(held, right)


def test_tiles_without_room_come_by_slots_unless_they_are_few() -> None:
    """Slots take the room of resident tiles: for a tile a warp, or fewer, that doesn't pay."""
    seen = set()
    for tiles in range(1, 81):
        placed = placed_in_one_cta(tiles, BF16_COLUMNS[0])
        assert placed.shared_bytes <= HOPPER.shared_limit
        slots = placed.stream_slots * STREAM_SLOT_BYTES
        # What would be streamed if there were no slots.
        few = placed.streamed_tiles - slots // (placed.k_steps * 512) <= MULTIPLY_WARPS
        assert (placed.stream_slots > 0) == (placed.streamed_tiles > 0 and not few)
        seen.add((placed.streamed_tiles > 0, placed.stream_slots))
    assert seen == {(False, 0), (True, 0), (True, STREAM_SLOTS)}

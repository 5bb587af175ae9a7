"""The host half of csrc/walk.cu: what a launch is given, and the specialisations."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

import torch

from tp_walk.config import Rounding
from tp_walk.errors import PlanUnavailableError
from tp_walk.mailbox import MAX_WORLD_SIZE, MailboxLayout
from tp_walk.placement import (
    CHUNK_STEPS,
    CONTROL_BYTES,
    MAX_GRID,
    MULTIPLY_WARPS,
    SERVICE_WARPS,
    TILE_ROWS,
    WARP_SIZE,
    ColumnUse,
    Placement,
    column_uses,
    place,
    row_order,
    serves,
)
from tp_walk.quantize import split_planes
from tp_walk.status import status_defines

ROUNDING_CODES: dict[Rounding, int] = {"engine": 0, "once": 1, "none": 2}
LOGITS_CODES = {"none": 0, "local": 1, "full": 2}
TP_WORLD_SIZES = (1, 2, 4, 8)  # csrc/exchange.cuh reduces ranks by butterflies
MAX_VOCAB_SIZE = 1 << 20  # ids that csrc/candidate.cuh has bits for
THREADS = (MULTIPLY_WARPS + SERVICE_WARPS) * WARP_SIZE
_PLANE_CHUNK = 16_384  # rows of W1 whose fp32 intermediates are held at once

_P, _I64, _U64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int32


class WalkParams(ctypes.Structure):
    """Field for field `tpw::WalkParams` of csrc/walk_params.cuh, which says what each one means."""

    _fields_ = [
        ("w2_fragments", _P),
        ("row_scales", _P),
        ("u_rows", _P),
        ("u_scales", _P),
        ("d2t", _P),
        ("mailboxes", _P * MAX_WORLD_SIZE),
        ("status", _P),
        ("startup_deadline_ns", _U64),
        ("steady_deadline_ns", _U64),
        ("vocab_size", _I64),
        ("target_vocab_size", _I64),
        ("shard_start", _I32),
        ("shard_width", _I32),
        ("rank", _I32),
        ("base_logits", _P),
        ("base_stride_row", _I64),
        ("base_stride_step", _I64),
        ("anchors", _P),
        ("anchors_stride", _I64),
        ("temperatures", _P),
        ("temperatures_stride", _I64),
        ("key_pointer", _P),
        ("rows", _P),
        ("offset_pointer", _P),
        ("key", _U64),
        ("offset", _U64),
        ("key_stride", _I64),
        ("rows_stride", _I64),
        ("offset_stride", _I64),
        ("tokens", _P),
        ("tokens_stride_row", _I64),
        ("tokens_stride_step", _I64),
        ("logits", _P * MAX_WORLD_SIZE),
        ("logits_stride_row", _I64),
        ("logits_stride_step", _I64),
        ("lse", _P),
        ("num_valid", _P),
        ("launch_fields", _U64),
        ("batch", _I32),
        ("gamma", _I32),
        ("anchors_are_int32", _I32),
        ("logits_sampled_rows_only", _I32),
        ("shares", _I32),
        ("is_opened", _I32),
        ("base_aligned", _I32),
        ("batch_rows", _P),
        ("first_step", _P),
    ]


def walk_macros(
    placement: Placement, layout: MailboxLayout, rounding: Rounding, *, base_fp32: bool, sampled: bool, logits: str
) -> dict[str, int]:
    """What one specialisation of csrc/walk.cu is compiled with."""
    macros = layout.defines() | status_defines()
    macros |= {
        "TPW_INT8": int(placement.int8),
        "TPW_AGREEING_RANKS": 1 if placement.int8 else layout.world_size,  # where each holds all of W2, none waits
        "TPW_RANK": placement.markov_rank,
        "TPW_TILES_PER_CTA": placement.tiles_per_cta,
        "TPW_REG_TILES": placement.reg_tiles,
        "TPW_SMEM_TILES": placement.smem_tiles,
        "TPW_STREAM_SLOTS": placement.stream_slots,
        "TPW_CHUNK_STEPS": CHUNK_STEPS,
        "TPW_BY_WARPGROUPS": int(placement.by_warpgroups),
        "TPW_BASE_STAGE_BYTES": placement.base_stage_bytes,
        "TPW_MULTIPLY_WARPS": MULTIPLY_WARPS,
        "TPW_MULTIPLY_REGISTERS": placement.registers[0],
        "TPW_SERVICE_WARPS": SERVICE_WARPS,
        "TPW_SERVICE_REGISTERS": placement.registers[1],
        "TPW_COLUMN_GROUPS": placement.columns.groups,
        "TPW_NARROW": int(placement.columns.narrow),
        "TPW_SINGLE": int(placement.columns.single),
        "TPW_ROUNDING": ROUNDING_CODES[rounding],
        "TPW_BASE_FP32": int(base_fp32),
        "TPW_SAMPLED": int(sampled),
        "TPW_LOGITS": LOGITS_CODES[logits],
        "TPW_CONTROL_BYTES": CONTROL_BYTES,
        "TPW_MAX_GRID": MAX_GRID,
        "TPW_PARAMS_BYTES": ctypes.sizeof(WalkParams),
    }
    return macros


@dataclass(frozen=True)
class Specialisation:
    """One cubin of csrc/walk.cu, and how its launches place W2.

    base_fp32: base logits are fp32, not bf16. sampled: temperatures are given. logits: "none"; "local" if this rank's
    columns are written to one place, or only their log-sum-exp is wanted; "full" if they are written to every rank's
    memory. columns: what a pass multiplies; larger batches take several passes.
    """

    base_fp32: bool
    sampled: bool
    logits: str
    columns: ColumnUse
    placement: Placement
    macros: dict[str, int]

    @property
    def serves(self) -> int:
        """The largest batch that it is for; the last of a kind walks larger ones too, in several passes."""
        return serves(self.placement.int8, self.columns)


def specialisations(
    *,
    int8: bool,
    markov_rank: int,
    rows: int,
    world_size: int,
    max_batch: int,
    rounding: Rounding,
    num_sms: int,
    shared_limit: int,
) -> list[Specialisation]:
    """Every one that a walk of a runtime may want: the list to compile ahead of time, and to load at set-up.

    rows: of W2, on the rank that has most. The others are as in `place` and `MailboxLayout`. Raises as `place`.
    """
    found = []
    modes = ("none", "local", "full") if world_size > 1 and not int8 else ("none", "local")
    for base_fp32, sampled, logits in itertools.product((False, True), (False, True), modes):
        if base_fp32 and rounding != "none":
            continue
        if rounding == "none" and not base_fp32 and keeps_logits(sampled, logits):
            continue
        placed = functools.partial(
            place,
            int8=int8,
            markov_rank=markov_rank,
            rows=rows,
            max_batch=max_batch,
            num_sms=num_sms,
            shared_limit=shared_limit,
            sampled=sampled,
            base_bytes=4 if base_fp32 else 2,
            rounding=rounding,
        )
        for smaller, columns in itertools.pairwise((None, *column_uses(int8, max_batch, sampled))):
            assert columns is not None
            try:
                placement = placed(columns=columns)
            except PlanUnavailableError:
                if smaller is None:
                    raise
                if not smaller.single:
                    break  # no room to stage so many requests at once: large batches take more passes
                # The kernel of one request serves no others: those by passes of as many as it has room for.
                columns = ColumnUse(1, narrow=True)
                placement = placed(columns=columns)
            layout = MailboxLayout(world_size, max_batch, placement.grid)
            macros = walk_macros(placement, layout, rounding, base_fp32=base_fp32, sampled=sampled, logits=logits)
            found.append(Specialisation(base_fp32, sampled, logits, columns, placement, macros))
    return found


def keeps_logits(sampled: bool, logits: str) -> bool:
    """A kernel that needs a logit later keeps it where its base logit was staged: an fp32 logit wants fp32 there."""
    return sampled or logits != "none"


def to_fragments(rows: torch.Tensor, placement: Placement) -> torch.Tensor:
    """W2's rows in the order in which MMA lanes hold them.

    Within a CTA the rows are in `placement.row_order`.

    rows: `[n, r]` bf16 or int8, contiguous. Returns int32 `[grid * tiles_per_cta, k steps, 32, 4]`, zero where there
    is no row. Lane 4g + j of a tile's k step holds, of rows g and g + 8, the j-th 4 bytes of both halves of the step's
    k range (PTX ISA, matrix fragments of mma.m16n8k16 and mma.m16n8k32).
    """
    tiles = placement.grid * placement.tiles_per_cta
    padded = torch.zeros(tiles * TILE_ROWS, placement.markov_rank, dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]] = rows
    order = torch.tensor(row_order(placement.tiles_per_cta), device=rows.device)
    padded = padded.view(placement.grid, -1, placement.markov_rank)[:, order]
    return fragment_order(padded.reshape(-1, placement.markov_rank), placement.k_steps)


def fragment_order(rows: torch.Tensor, k_steps: int) -> torch.Tensor:
    """Whole tiles in the order of MMA lanes, rows as they come: see `to_fragments`."""
    tiles = rows.shape[0] // TILE_ROWS
    words = rows.view(torch.int32).view(tiles, 2, 8, k_steps, 2, 4)  # tile, half of rows, g, step, half of k, j
    return words.permute(0, 3, 2, 5, 4, 1).reshape(tiles, k_steps, 32, 4).contiguous()


def to_plane_rows(w1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 `[V, r]` bf16 → its rows' planes hi and lo as int8 `[V, 2, r]` and their scales `[V]` fp32.

    Elements lie in the order in which the lanes of mma.m16n8k32 take them from a column of B: of each 32, the words of
    4 elements 0, 4, 1, 5, 2, 6, 3, 7.
    """
    k = torch.arange(w1.shape[1], device=w1.device)
    places = k // 32 * 32 + k % 16 // 4 * 8 + k % 32 // 16 * 4 + k % 4
    rows = torch.empty(w1.shape[0], 2, w1.shape[1], dtype=torch.int8, device=w1.device)
    scales = torch.empty(w1.shape[0], dtype=torch.float32, device=w1.device)
    for start in range(0, w1.shape[0], _PLANE_CHUNK):
        part = slice(start, start + _PLANE_CHUNK)
        hi, lo, scales[part] = split_planes(w1[part])
        rows[part, 0, places], rows[part, 1, places] = hi, lo
    return rows, scales

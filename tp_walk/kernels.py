"""The host half of csrc/walk.cu: what a launch is given, the specialisations, and the plans that run them."""

from __future__ import annotations

import bisect
import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tp_walk import jit, peer_logits
from tp_walk.config import Rounding
from tp_walk.errors import KernelError, PlanUnavailableError
from tp_walk.launch_order import launch_order
from tp_walk.mailbox import MAX_WORLD_SIZE, MailboxLayout, pack_header
from tp_walk.peer_logits import RankBuffers
from tp_walk.peers import PeerMailboxes
from tp_walk.placement import (
    BF16_COLUMNS,
    CONTROL_BYTES,
    INT8_COLUMNS,
    MAX_GRID,
    MULTIPLY_REGISTERS,
    MULTIPLY_WARPS,
    SERVICE_REGISTERS,
    SERVICE_WARPS,
    TILE_ROWS,
    WARP_SIZE,
    ColumnUse,
    Placement,
    place,
    requests_of,
)
from tp_walk.plan import PLAN_NAMES, ExecutorContext, WalkInputs
from tp_walk.quantize import quantize_rows
from tp_walk.status import status_defines

ROUNDING_CODES: dict[Rounding, int] = {"engine": 0, "once": 1, "none": 2}
LOGITS_CODES = {"none": 0, "local": 1, "full": 2}
THREADS = (MULTIPLY_WARPS + SERVICE_WARPS) * WARP_SIZE

_P, _I64, _U64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int32


class WalkParams(ctypes.Structure):
    """Field for field `tpw::WalkParams` of csrc/walk_params.cuh, which says what each one means."""

    _fields_ = [
        ("w2_fragments", _P),
        ("row_scales", _P),
        ("w1", _P),
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
        ("tiles_per_cta", _I32),
        ("smem_tiles", _I32),
        ("base_stage_bytes", _I32),
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
    ]


def walk_macros(
    placement: Placement, layout: MailboxLayout, rounding: Rounding, *, base_fp32: bool, sampled: bool, logits: str
) -> dict[str, int]:
    """What one specialisation of csrc/walk.cu is compiled with."""
    macros = layout.defines() | status_defines()
    macros |= {
        "TPW_INT8": int(placement.int8),
        "TPW_RANK": placement.markov_rank,
        "TPW_REG_TILES": placement.reg_tiles,
        "TPW_MULTIPLY_WARPS": MULTIPLY_WARPS,
        "TPW_MULTIPLY_REGISTERS": MULTIPLY_REGISTERS,
        "TPW_SERVICE_WARPS": SERVICE_WARPS,
        "TPW_SERVICE_REGISTERS": SERVICE_REGISTERS,
        "TPW_COLUMN_GROUPS": placement.columns.groups,
        "TPW_NARROW": int(placement.columns.narrow),
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

    rows: of W2 on this rank. The others are as in `place` and `MailboxLayout`. Raises PlanUnavailableError as `place`.
    """
    found = []
    modes = ("none", "local", "full") if world_size > 1 else ("none", "local")
    for base_fp32, sampled, logits, columns in itertools.product(
        (False, True), (False, True), modes, column_uses(int8, max_batch)
    ):
        if base_fp32 and rounding != "none":
            continue
        if rounding == "none" and not base_fp32 and _keeps_logits(sampled, logits):
            continue
        placement = place(
            int8=int8,
            markov_rank=markov_rank,
            rows=rows,
            max_batch=max_batch,
            num_sms=num_sms,
            shared_limit=shared_limit,
            sampled=sampled,
            base_bytes=4 if base_fp32 else 2,
            rounding=rounding,
            columns=columns,
        )
        layout = MailboxLayout(world_size, max_batch, placement.grid)
        macros = walk_macros(placement, layout, rounding, base_fp32=base_fp32, sampled=sampled, logits=logits)
        found.append(Specialisation(base_fp32, sampled, logits, columns, placement, macros))
    return found


def column_uses(int8: bool, max_batch: int) -> list[ColumnUse]:
    """Those that batches of up to max_batch want, each serving larger batches than the one before."""
    uses = INT8_COLUMNS if int8 else BF16_COLUMNS
    enough = next((i for i, use in enumerate(uses) if requests_of(int8, use) >= max_batch), len(uses) - 1)
    return list(uses[: enough + 1])


def _keeps_logits(sampled: bool, logits: str) -> bool:
    """A kernel that needs a logit later keeps it where its base logit was staged: an fp32 logit wants fp32 there."""
    return sampled or logits != "none"


def to_fragments(rows: torch.Tensor, placement: Placement) -> torch.Tensor:
    """W2's rows in the order in which MMA lanes hold them.

    rows: `[n, r]` bf16 or int8, contiguous. Returns int32 `[grid * tiles_per_cta, k steps, 32, 4]`, zero where there
    is no row. Lane 4g + j of a tile's k step holds, of rows g and g + 8, the j-th 4 bytes of both halves of the step's
    k range (PTX ISA, matrix fragments of mma.m16n8k16 and mma.m16n8k32).
    """
    tiles = placement.grid * placement.tiles_per_cta
    padded = torch.zeros(tiles * TILE_ROWS, placement.markov_rank, dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]] = rows
    words = padded.view(torch.int32).view(
        tiles, 2, 8, placement.k_steps, 2, 4
    )  # tile, half of rows, g, step, half of k, j
    return words.permute(0, 3, 2, 5, 4, 1).reshape(tiles, placement.k_steps, 32, 4).contiguous()


class _Launch:
    """One specialisation, loaded, with its launch configuration filled in once."""

    def __init__(self, kernel: jit.CompiledKernel, placement: Placement, num_sms: int) -> None:
        from cuda.bindings import driver

        self.placement = placement
        self._driver = driver
        self._function = kernel.load(placement.shared_bytes)
        _check_co_resident(self._function, kernel, placement, num_sms)
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = placement.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes = placement.shared_bytes
        # Cooperative: a grid that can't be co-resident is refused instead of waiting for CTAs that never start.
        config.attrs = [cooperative]
        config.numAttrs = 1
        self._config = config

    def __call__(self, arguments: int, stream: int) -> None:
        self._config.hStream = stream
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, arguments, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(
                f"launching the walk ({self._config.gridDimX} CTAs, {self._config.sharedMemBytes} bytes of shared "
                f"memory each) failed: {status.name}"
            )


def _check_co_resident(function: Any, kernel: jit.CompiledKernel, placement: Placement, num_sms: int) -> None:
    from cuda.bindings import driver

    status, ctas = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, THREADS, placement.shared_bytes)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the walk's occupancy isn't known: {status.name}")
    if placement.grid > ctas * num_sms:
        raise PlanUnavailableError(
            f"the walk's {placement.grid} CTAs wait for each other, and this GPU holds only {ctas * num_sms} of them "
            f"at once: {num_sms} SMs, {kernel.resources.registers} registers a thread and {placement.shared_bytes} "
            "bytes of shared memory a CTA"
        )


def _strided(tensor: torch.Tensor | None) -> tuple[int | None, int]:
    """Address, and element stride of a `[batch]` tensor; 0 for one element that serves all rows."""
    if tensor is None:
        return None, 0
    return tensor.data_ptr(), 0 if tensor.numel() == 1 else tensor.stride(0)


def stored_rows(inputs: WalkInputs) -> torch.Tensor:
    """`[batch]` bool: the rows whose logits a walk writes."""
    rows = torch.arange(inputs.tokens.shape[0], device=inputs.tokens.device)
    stored = rows >= 0 if inputs.num_valid is None else rows < inputs.num_valid
    if inputs.logits_rows == "sampled":
        stored &= False if inputs.temperatures is None else inputs.temperatures > 0
    return stored


def keep_rows(inputs: WalkInputs, logits: torch.Tensor) -> None:
    """Copies into logits_out the rows of `logits` that a walk writes."""
    out = inputs.logits_out
    assert out is not None
    if inputs.num_valid is None and inputs.logits_rows == "all":
        out.copy_(logits)
    else:
        torch.where(stored_rows(inputs)[:, None, None], logits, out, out=out)


class KernelExecutor:
    """Runs csrc/walk.cu: the part that the plans share. A subclass says how W2 is held and over which ranks."""

    name: str
    int8: bool

    def __init__(
        self, context: ExecutorContext, *, world_size: int, rank: int, shard_start: int, shard_width: int
    ) -> None:
        self._context = context
        if context.device.type != "cuda":
            raise PlanUnavailableError(f"plan {self.name} needs a CUDA device, not {context.device}")
        properties = torch.cuda.get_device_properties(context.device)
        if properties.major < 9:
            raise PlanUnavailableError(
                f"plan {self.name} needs a Hopper GPU or later; {properties.name} is compute capability "
                f"{properties.major}.{properties.minor}"
            )
        self._world_size = world_size
        self._shard_width = shard_width
        self._specialisations = specialisations(
            int8=self.int8,
            markov_rank=context.shape.markov_rank,
            rows=shard_width,
            world_size=world_size,
            max_batch=context.max_batch,
            rounding=context.rounding,
            num_sms=properties.multi_processor_count,
            shared_limit=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        # The placements differ in what they stage, not in where a row of W2 is found.
        self._placement = self._specialisations[0].placement
        self._columns = column_uses(self.int8, context.max_batch)
        self._fits = [requests_of(self.int8, use) for use in self._columns]
        self._layout = MailboxLayout(world_size, context.max_batch, self._placement.grid)
        self._mailboxes = (
            PeerMailboxes(context.group, self._layout, context.device)
            if world_size > 1
            else PeerMailboxes(None, self._layout, context.device)
        )
        self._load(context)
        params = WalkParams()
        params.w2_fragments = self._fragments.data_ptr()
        params.row_scales = None if self._row_scales is None else self._row_scales.data_ptr()
        params.w1 = context.w1.data_ptr()
        params.d2t = None if context.d2t is None else context.d2t.data_ptr()
        for source, address in enumerate(self._mailboxes.addresses):
            params.mailboxes[source] = address
        params.status = self._mailboxes.status_address
        params.startup_deadline_ns = int(context.deadline.startup_s * 1e9)
        params.steady_deadline_ns = int(context.deadline.steady_s * 1e9)
        params.vocab_size = context.shape.vocab_size
        params.target_vocab_size = context.w1.shape[0]
        params.shard_start = shard_start
        params.shard_width = shard_width
        params.rank = rank
        self._params = params
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._arguments_address = ctypes.addressof(self._arguments)
        self._plan_code = PLAN_NAMES.index(self.name)
        self._order = launch_order(context.device)
        # All of them now: a first launch inside a capture, or beside a spinning kernel, must not have to load code.
        self._launches = {
            (one.base_fp32, one.sampled, one.logits, one.columns): _Launch(
                jit.compile_kernel("walk.cu", "walk", one.macros), one.placement, properties.multi_processor_count
            )
            for one in self._specialisations
        }

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's rows of W2 on the device, as the plan holds them, and their scales."""
        raise NotImplementedError

    def _load(self, context: ExecutorContext) -> None:
        rows, self._row_scales = self._rows(context)
        self._fragments = to_fragments(rows, self._placement)

    def memory_bytes(self) -> int:
        scales = 0 if self._row_scales is None else self._row_scales.nbytes
        return self._fragments.nbytes + scales + self._layout.num_bytes

    def walk(self, inputs: WalkInputs) -> None:
        if inputs.logits == "full" and self._world_size > 1:
            self._walk_full(inputs)
        else:
            self._walk(inputs)
        # Last: the ranks of a failed walk must still meet in every collective, or none could be reset.
        self.check()

    def _walk_full(self, inputs: WalkInputs) -> None:
        """Full logits of a sharded plan: written by all ranks' kernels, or gathered afterwards."""
        context, out = self._context, inputs.logits_out
        assert out is not None  # WalkRuntime makes it
        buffers = context.peer_logits
        if peer_logits.full_logits_by(out.shape[0]) == "collective":
            own = out.new_empty(*out.shape[:2], self._shard_width)
            self._walk(inputs._replace(logits="local", logits_out=own))
            widths = [shard.width for shard in context.shards]
            keep_rows(inputs, context.group.all_gather_columns(own, widths, context.deadline.steady_s))
            return
        on_ranks = buffers.find(out)
        if on_ranks is not None:
            self._walk(inputs, on_ranks)
            return
        staged, on_ranks = buffers.staging((context.max_batch, context.max_gamma, out.shape[2]), out)
        self._walk(inputs._replace(logits_out=staged), on_ranks)
        keep_rows(inputs, staged)
        # The next walk, on whatever stream, lets the peers write there again.
        self._order.after(torch.cuda.current_stream(context.device))

    def _walk(self, inputs: WalkInputs, on_ranks: RankBuffers | None = None) -> None:
        """One launch. on_ranks: where logits_out lies on every rank, if all ranks write there."""
        base = inputs.base_logits
        sampled = inputs.temperatures is not None
        logits = "none" if inputs.logits == "none" and inputs.lse_out is None else "local"
        if on_ranks is not None:
            logits = "full"
        if self._context.rounding == "none" and _keeps_logits(sampled, logits):
            base = base.float()
        columns = self._columns[bisect.bisect_left(self._fits, base.shape[0], hi=len(self._fits) - 1)]
        launch = self._launches[base.dtype == torch.float32, sampled, logits, columns]
        placement = launch.placement
        p = self._params
        p.tiles_per_cta = placement.tiles_per_cta
        p.smem_tiles = placement.smem_tiles
        p.base_stage_bytes = placement.base_stage_bytes
        p.base_logits = base.data_ptr() + (p.shard_start * base.element_size() if inputs.base_is_full else 0)
        p.base_stride_row, p.base_stride_step = base.stride(0), base.stride(1)
        p.anchors, p.anchors_stride = inputs.anchors.data_ptr(), inputs.anchors.stride(0)
        p.anchors_are_int32 = inputs.anchors.dtype == torch.int32
        p.temperatures = None
        if inputs.temperatures is not None and inputs.noise is not None:
            noise = inputs.noise
            p.temperatures, p.temperatures_stride = inputs.temperatures.data_ptr(), inputs.temperatures.stride(0)
            p.key_pointer, p.key_stride = _strided(noise.key) if isinstance(noise.key, torch.Tensor) else (None, 0)
            p.key = 0 if isinstance(noise.key, torch.Tensor) else noise.key & (1 << 64) - 1
            p.offset_pointer, p.offset_stride = (
                _strided(noise.offset) if isinstance(noise.offset, torch.Tensor) else (None, 0)
            )
            p.offset = 0 if isinstance(noise.offset, torch.Tensor) else noise.offset & (1 << 64) - 1
            p.rows, p.rows_stride = _strided(noise.rows)
        else:
            p.key_pointer = p.offset_pointer = p.rows = None
            p.key = p.offset = 0
        p.tokens = inputs.tokens.data_ptr()
        p.tokens_stride_row, p.tokens_stride_step = inputs.tokens.stride(0), inputs.tokens.stride(1)
        p.logits[0] = None
        if inputs.logits_out is not None:
            p.logits[0] = inputs.logits_out.data_ptr()
            if on_ranks is not None:
                for rank, address in enumerate(on_ranks.addresses):
                    p.logits[rank] = address + p.shard_start * inputs.logits_out.element_size()
            p.logits_stride_row, p.logits_stride_step = inputs.logits_out.stride(0), inputs.logits_out.stride(1)
        p.lse = None if inputs.lse_out is None else inputs.lse_out.data_ptr()
        p.num_valid = None if inputs.num_valid is None else inputs.num_valid.data_ptr()
        p.batch, p.gamma = base.shape[0], base.shape[1]
        p.logits_sampled_rows_only = inputs.logits_rows == "sampled"
        (p.launch_fields, *_) = pack_header(
            {
                "batch": p.batch,
                "gamma": p.gamma,
                "plan": self._plan_code,
                "rounding": ROUNDING_CODES[self._context.rounding],
                "logits": LOGITS_CODES[inputs.logits],
                "logits_rows": p.logits_sampled_rows_only,
                "sampled": int(sampled),
                "lse": int(inputs.lse_out is not None),
                "logits_buffer": 0 if on_ranks is None else on_ranks.number,
            }
        )
        stream = torch.cuda.current_stream(self._context.device)
        self._order.before(stream)
        launch(self._arguments_address, stream.cuda_stream)
        self._order.after(stream)

    def check(self) -> None:
        self._mailboxes.check()

    def clamped_anchor(self) -> tuple[int, int] | None:
        status = self._mailboxes.status()
        return (status.clamped_block, status.clamped_row) if status.clamped_block else None

    def reset(self) -> None:
        self._mailboxes.reset()

    def reload(self, context: ExecutorContext) -> None:
        rows, scales = self._rows(context)
        self._fragments.copy_(to_fragments(rows, self._placement))
        if self._row_scales is not None and scales is not None:
            self._row_scales.copy_(scales)

    def close(self) -> None:
        self._mailboxes.close()


class TpBf16Executor(KernelExecutor):
    """Plan `tp_bf16`: each rank holds its own rows of W2."""

    name = "tp_bf16"
    int8 = False

    def __init__(self, context: ExecutorContext) -> None:
        if context.shape.world_size not in (1, 2, 4, 8):
            raise PlanUnavailableError(f"plan tp_bf16 runs at world size 1, 2, 4 and 8, not {context.shape.world_size}")
        super().__init__(
            context,
            world_size=context.shape.world_size,
            rank=context.group.rank,
            shard_start=context.shard.start,
            shard_width=context.shard.stop - context.shard.start,
        )

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        return context.head.w2_rows(context.shard.start, context.shard.stop).to(context.device).contiguous(), None


class Int8Executor(KernelExecutor):
    """Plan `int8`: every rank holds all of W2 as int8 and walks the whole batch."""

    name = "int8"
    int8 = True

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context, world_size=1, rank=0, shard_start=0, shard_width=context.shape.vocab_size)

    def walk(self, inputs: WalkInputs) -> None:
        """The walk of one GPU on every rank. Base logits that lie sharded are gathered first: a collective."""
        context = self._context
        if not inputs.base_is_full:
            local = inputs.base_logits[..., : context.shard.width]
            widths = [shard.width for shard in context.shards]
            base = context.group.all_gather_columns(local, widths, context.deadline.steady_s)
            inputs = inputs._replace(base_logits=base, base_is_full=True)
        if inputs.logits != "local" or inputs.logits_out is None or context.shape.world_size == 1:
            super().walk(inputs)
            return
        # The kernel stores whole rows; of those that it stored, this rank keeps its own columns.
        batch, gamma = inputs.tokens.shape
        whole = inputs.logits_out.new_empty(batch, gamma, context.shape.vocab_size)
        super().walk(inputs._replace(logits="full", logits_out=whole))
        own = whole[..., context.shard.start : context.shard.stop]
        keep_rows(inputs, own)

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        return quantize_rows(context.head.w2_rows(0, context.shape.vocab_size).to(context.device))

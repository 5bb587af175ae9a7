"""Base logits that lie sharded, sent by each rank to those who walk their rows: the host half of csrc/spread.cu."""

from __future__ import annotations

import ctypes

import torch

from tp_walk import jit
from tp_walk.config import Rounding, settings
from tp_walk.kernels import LOGITS_CODES, WalkParams
from tp_walk.launches import Launch
from tp_walk.mailbox import MAX_CTAS, MAX_WORLD_SIZE, MailboxLayout
from tp_walk.peer_memory import PeerBuffer
from tp_walk.placement import MAX_GRID, WARP_SIZE
from tp_walk.plan import ExecutorContext
from tp_walk.status import status_defines

# Of a CTA. With four 16-byte loads a lane they keep 32 KB an SM in flight: more than any link to a peer takes.
SPREAD_WARPS = 16
PIECE_BYTES = 16


class SpreadParams(ctypes.Structure):
    """Field for field `tpw::SpreadParams` of csrc/copy_rows.cuh, which says what each one means."""

    _fields_ = [
        ("buffers", ctypes.c_void_p * MAX_WORLD_SIZE),
        ("step_stride", ctypes.c_int64),
        ("shard_start", ctypes.c_int32),
        ("shard_width", ctypes.c_int32),
    ]


def spread_macros(world_size: int, max_batch: int, *, base_fp32: bool) -> dict[str, int]:
    """What one specialisation of csrc/spread.cu is compiled with."""
    return (
        MailboxLayout(world_size, max_batch, MAX_CTAS).defines()
        | status_defines()
        | {
            "TPW_AGREEING_RANKS": 1,
            "TPW_BASE_FP32": int(base_fp32),
            "TPW_LOGITS": LOGITS_CODES["none"],
            "TPW_MAX_GRID": MAX_GRID,
            "TPW_PARAMS_BYTES": ctypes.sizeof(WalkParams),
            "TPW_SPREAD_PARAMS_BYTES": ctypes.sizeof(SpreadParams),
            "TPW_SPREAD_WARPS": SPREAD_WARPS,
        }
    )


def base_dtypes(rounding: Rounding) -> tuple[torch.dtype, ...]:
    """Of the base logits that walks with this rounding read."""
    return (torch.bfloat16, torch.float32) if rounding == "none" else (torch.bfloat16,)


def step_stride(vocab_size: int) -> int:
    """Elements from one step's row to the next in a buffer: V, padded to whole pieces of either dtype."""
    return -(-vocab_size // (PIECE_BYTES // 2)) * (PIECE_BYTES // 2)


def buffer_bytes(vocab_size: int, max_batch: int, max_gamma: int, shares: int, rounding: Rounding) -> int:
    """Of a rank's buffer: `[rows of its share, gamma, step_stride]` of the widest dtype."""
    rows = -(-max_batch // shares)
    return rows * max_gamma * step_stride(vocab_size) * max(dtype.itemsize for dtype in base_dtypes(rounding))


class Spread:
    """A buffer for whole rows on every rank, and the launch that fills all of them. Collective: construction, `close`.

    shares: ranks that the batch is split over: rank i gets the rows i, i + shares, …; 1: every rank gets all rows.

    Raises:
        As PeerBuffer, and as Launch; the same on every rank.
    """

    def __init__(self, context: ExecutorContext, *, shares: int) -> None:
        group = context.group
        num_sms = (
            torch.cuda.get_device_properties(context.device).multi_processor_count // settings().test_ranks_per_gpu
        )
        # A CTA waits for the CTAs of its number on all ranks, so that all must have as many.
        grid = min(MAX_CTAS, *group.all_gather_object(num_sms))

        def load() -> dict[tuple[torch.dtype, bool], Launch]:
            kernels = {
                dtype: jit.compile_kernel(
                    "spread.cu",
                    "spread",
                    spread_macros(group.world_size, context.max_batch, base_fp32=dtype == torch.float32),
                )
                for dtype in base_dtypes(context.rounding)
            }
            return {
                (dtype, is_full): Launch(
                    "the exchange of base logits",
                    kernel,
                    grid=1 if is_full else grid,
                    threads=SPREAD_WARPS * WARP_SIZE,
                    num_sms=num_sms,
                )
                for dtype, kernel in kernels.items()
                for is_full in (False, True)
            }

        self._launches = group.stage("kernels that exchange base logits", load)
        num_bytes = buffer_bytes(
            context.shape.vocab_size, context.max_batch, context.max_gamma, shares, context.rounding
        )
        self._buffer = PeerBuffer(group, num_bytes, context.device)
        self.num_bytes = self._buffer.num_bytes
        self._rank, self._shard = group.rank, context.shard
        self._params = params = SpreadParams()
        for rank, address in enumerate(self._buffer.addresses):
            params.buffers[rank] = address
        params.step_stride = step_stride(context.shape.vocab_size)
        params.shard_start = context.shard.start

    def __call__(self, walk: WalkParams, base: torch.Tensor, is_full: bool, stream: int) -> None:
        """Launches it. Afterwards `walk`, otherwise complete before, says where the walk finds the rows of its share.

        base: `[batch, gamma, ≥ columns]`, whole rows or this rank's columns. Whole rows stay where they are; then the
        launch only compares the ranks' headers.
        """
        element_bytes = base.element_size()
        walk.base_logits = base.data_ptr()
        walk.base_stride_row, walk.base_stride_step = base.stride(0), base.stride(1)
        walk.is_opened = False
        self._params.shard_width = 0 if is_full else self._shard.width
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(walk), ctypes.addressof(self._params))
        self._launches[base.dtype, is_full](ctypes.addressof(arguments), stream)
        walk.is_opened = True
        if not is_full:
            walk.base_logits = self._buffer.addresses[self._rank]
            walk.base_stride_row = base.shape[1] * self._params.step_stride
            walk.base_stride_step = self._params.step_stride
        elif walk.shares > 1:
            walk.base_logits = base.data_ptr() + self._rank * base.stride(0) * element_bytes
            walk.base_stride_row = base.stride(0) * walk.shares

    def close(self) -> None:
        """As PeerBuffer.close."""
        self._buffer.close()

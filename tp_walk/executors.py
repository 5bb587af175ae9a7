"""The plans that run csrc/walk.cu: what their launches are given."""

from __future__ import annotations

import ctypes

import torch

from tp_walk import jit, peer_logits
from tp_walk.config import Rounding, settings
from tp_walk.errors import PlanUnavailableError
from tp_walk.group import WalkGroup
from tp_walk.kernels import (
    LOGITS_CODES,
    MAX_VOCAB_SIZE,
    ROUNDING_CODES,
    THREADS,
    TP_WORLD_SIZES,
    Specialisation,
    WalkParams,
    keeps_logits,
    specialisations,
    to_fragments,
    to_plane_rows,
)
from tp_walk.launch_order import launch_order
from tp_walk.launches import Launch
from tp_walk.mailbox import MailboxLayout, pack_header
from tp_walk.peer_logits import RankBuffers
from tp_walk.peers import PeerMailboxes
from tp_walk.plan import PLAN_NAMES, ExecutorContext, WalkInputs
from tp_walk.shard import Shard


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


def describe_walk(
    p: WalkParams,
    inputs: WalkInputs,
    plan: str,
    rounding: Rounding,
    on_ranks: RankBuffers | None = None,
    base_code: int = 0,
) -> None:
    """Fills in all of a walk's arguments but base logits, and the fields that the ranks must agree on.

    on_ranks: where logits_out lies on every rank, if all ranks write there. base_code: of the plan, see `_base_code`.
    """
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
    p.batch, p.gamma = inputs.tokens.shape
    p.logits_sampled_rows_only = inputs.logits_rows == "sampled"
    (p.launch_fields, *_) = pack_header(
        {
            "batch": p.batch,
            "gamma": p.gamma,
            "plan": PLAN_NAMES.index(plan),
            "rounding": ROUNDING_CODES[rounding],
            "logits": LOGITS_CODES[inputs.logits],
            "logits_rows": p.logits_sampled_rows_only,
            "sampled": int(inputs.temperatures is not None),
            "lse": int(inputs.lse_out is not None),
            "logits_buffer": 0 if on_ranks is None else on_ranks.number,
            "base_logits": base_code,
        }
    )


def point_at_base(p: WalkParams, base: torch.Tensor, is_full: bool) -> None:
    """The kernel reads base logits where they are."""
    p.base_logits = base.data_ptr() + (p.shard_start * base.element_size() if is_full else 0)
    p.base_stride_row, p.base_stride_step = base.stride(0), base.stride(1)


def base_is_aligned(p: WalkParams, element_bytes: int) -> bool:
    """Whether base logits begin on the size of four, in every row and step. Those of an empty shard have no address."""
    strides = (p.base_stride_row | p.base_stride_step) * element_bytes
    places: int = (p.base_logits or 0) | strides
    return places % (4 * element_bytes) == 0


class KernelExecutor:
    """Runs csrc/walk.cu: the part that the plans share. A subclass says how W2 is held and over which ranks."""

    name: str
    int8: bool

    def __init__(self, context: ExecutorContext, *, ranks: int, shard: Shard, shares: int = 1) -> None:
        """ranks: that the plan's kernels exchange anything with: all of the context's, or 1. shard: the rows of W2 that
        this one holds. shares: ranks that the batch is split over.
        """
        self._context = context
        self._shard = shard
        self._agreeing = 1 if self.int8 else ranks  # on each token
        group = context.group if ranks > 1 else WalkGroup(None, context.device)
        self._launches = group.stage(f"kernels of plan {self.name}", lambda: self._prepare(ranks))
        grids = group.all_gather_object(self._placement.grid)
        if self._agreeing > 1 and len(set(grids)) > 1:
            raise PlanUnavailableError(
                f"the ranks' GPUs differ: by their SMs their kernels have {', '.join(map(str, grids))} CTAs; "
                f"plan {self.name} needs as many on each"
            )
        self._mailboxes = PeerMailboxes(group, self._layout, context.device)
        params = WalkParams()
        params.w2_fragments = self._fragments.data_ptr()
        params.row_scales = None if self._row_scales is None else self._row_scales.data_ptr()
        params.u_rows = self._u_rows.data_ptr()
        params.u_scales = None if self._u_scales is None else self._u_scales.data_ptr()
        params.d2t = None if context.d2t is None else context.d2t.data_ptr()
        for source, address in enumerate(self._mailboxes.addresses):
            params.mailboxes[source] = address
        params.status = self._mailboxes.status_address
        params.startup_deadline_ns = int(context.deadline.startup_s * 1e9)
        params.steady_deadline_ns = int(context.deadline.steady_s * 1e9)
        params.vocab_size = context.shape.vocab_size
        params.target_vocab_size = context.w1.shape[0]
        params.shard_start = shard.start
        params.shard_width = shard.width
        params.rank = group.rank
        params.shares = shares
        self._params = params
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._arguments_address = ctypes.addressof(self._arguments)
        self._order = launch_order(context.device)

    def _prepare(self, ranks: int) -> dict[tuple[bool, bool, str], list[tuple[Launch, Specialisation]]]:
        """All that a rank does alone: choices, weights, kernels.

        Returns launches by what a walk asks for, those for small batches first.
        """
        context = self._context
        if context.device.type != "cuda":
            raise PlanUnavailableError(f"plan {self.name} needs a CUDA device, not {context.device}")
        properties = torch.cuda.get_device_properties(context.device)
        if properties.major != 9:  # wgmma is of that generation alone
            raise PlanUnavailableError(
                f"plan {self.name} needs a Hopper GPU (compute capability 9.0); {properties.name} is "
                f"{properties.major}.{properties.minor}; plan reference runs on it"
            )
        if context.shape.vocab_size > MAX_VOCAB_SIZE:
            raise PlanUnavailableError(
                f"the kernels hold vocabularies of up to {MAX_VOCAB_SIZE} ids, not {context.shape.vocab_size}; plan "
                "reference runs it"
            )
        num_sms = properties.multi_processor_count // settings().test_ranks_per_gpu
        # As many CTAs on every rank, as posts lie side by side.
        widest = max(shard.width for shard in context.shards) if self._agreeing > 1 else self._shard.width
        found = specialisations(
            int8=self.int8,
            markov_rank=context.shape.markov_rank,
            rows=widest,
            world_size=ranks,
            max_batch=context.max_batch,
            rounding=context.rounding,
            num_sms=num_sms,
            shared_limit=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        # The placements differ in what they stage, not in where a row of W2 is found.
        self._placement = found[0].placement
        self._layout = MailboxLayout(ranks, context.max_batch, self._placement.grid)
        rows, self._row_scales = self._rows(context)
        self._fragments = to_fragments(rows, self._placement)
        self._u_rows = context.w1
        self._u_scales: torch.Tensor | None = None
        if self.int8:
            self._u_rows, self._u_scales = to_plane_rows(context.w1)
        # All kernels now: a first launch inside a capture, or beside a spinning kernel, must not have to load code.
        launches: dict[tuple[bool, bool, str], list[tuple[Launch, Specialisation]]] = {}
        for one in found:
            launch = Launch(
                "the walk",
                jit.compile_kernel("walk.cu", "walk", one.macros),
                grid=one.placement.grid,
                threads=THREADS,
                num_sms=num_sms,
                shared_bytes=one.placement.shared_bytes,
            )
            launches.setdefault((one.base_fp32, one.sampled, one.logits), []).append((launch, one))
        return launches

    @property
    def params(self) -> WalkParams:
        """What every launch is given; a walk fills in the rest."""
        return self._params

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's rows of W2 on the device, as the plan holds them, and their scales."""
        raise NotImplementedError

    def memory_bytes(self) -> int:
        own = [self._fragments, self._row_scales, self._u_scales, self._u_rows if self.int8 else None]
        return sum(tensor.nbytes for tensor in own if tensor is not None) + self._layout.num_bytes

    def walk(self, inputs: WalkInputs) -> None:
        if inputs.logits == "full" and self._agreeing > 1:
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
            own = out.new_empty(*out.shape[:2], self._shard.width)
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
        if self._context.rounding == "none" and keeps_logits(sampled, logits):
            base = base.float()
        p = self._params
        rows = -(-base.shape[0] // p.shares)
        launch, _ = self._chosen(base.dtype == torch.float32, sampled, logits, rows)
        describe_walk(
            p, inputs, self.name, self._context.rounding, on_ranks, self._base_code(base, inputs.base_is_full)
        )
        stream = torch.cuda.current_stream(self._context.device)
        self._order.before(stream)
        self._bring(base, inputs.base_is_full, stream.cuda_stream)
        p.base_aligned = base_is_aligned(p, base.element_size())
        launch(self._arguments_address, stream.cuda_stream)
        self._order.after(stream)

    def _chosen(self, base_fp32: bool, sampled: bool, logits: str, rows: int) -> tuple[Launch, Specialisation]:
        """What walks so many requests."""
        launches = self._launches[base_fp32, sampled, logits]
        return next((one for one in launches if one[1].serves >= rows), launches[-1])

    def _base_code(self, base: torch.Tensor, is_full: bool) -> int:
        """What the ranks must agree on of base logits: nothing, where each reads its own."""
        return 0

    def _bring(self, base: torch.Tensor, is_full: bool, stream: int) -> None:
        """Says where the walk reads base logits; before, launches what brings them there."""
        point_at_base(self._params, base, is_full)

    def check(self) -> None:
        self._mailboxes.check()

    def clamped_anchor(self) -> tuple[int, int] | None:
        status = self._mailboxes.status()
        return (status.clamped_block, status.clamped_row) if status.clamped_block else None

    def counts(self) -> dict[str, int]:
        return {}

    def reset(self) -> None:
        self._mailboxes.reset()

    def reload(self, context: ExecutorContext) -> None:
        rows, scales = self._rows(context)
        self._fragments.copy_(to_fragments(rows, self._placement))
        if self._row_scales is not None and scales is not None:
            self._row_scales.copy_(scales)
        if self._u_scales is not None:
            rows, scales = to_plane_rows(context.w1)
            self._u_rows.copy_(rows)
            self._u_scales.copy_(scales)

    def close(self) -> None:
        self._mailboxes.close()


class TpBf16Executor(KernelExecutor):
    """Plan `tp_bf16`: each rank holds its own rows of W2."""

    name = "tp_bf16"
    int8 = False

    def __init__(self, context: ExecutorContext) -> None:
        if context.shape.world_size not in TP_WORLD_SIZES:
            raise PlanUnavailableError(f"plan tp_bf16 runs at world size 1, 2, 4 and 8, not {context.shape.world_size}")
        super().__init__(context, ranks=context.shape.world_size, shard=context.shard)

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        return context.head.w2_rows(context.shard.start, context.shard.stop).to(context.device).contiguous(), None

"""Plan `certified` on GPUs: the host half of csrc/certify.cu and csrc/certify_bounds.cu. certify.py says why it is
exact.

A walk is two launches: the certified steps, and the walk kernel for what they left, as a rule nothing. Every rank holds
all of W2 beside its own rows in the walk kernel's order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch

from tp_walk import jit
from tp_walk.certified_reference import CertifiedReference
from tp_walk.config import Rounding, settings
from tp_walk.errors import KernelError, PlanUnavailableError
from tp_walk.executors import TpBf16Executor, describe_walk, point_at_base
from tp_walk.kernels import Specialisation, WalkParams, fragment_order, specialisations
from tp_walk.launch_order import launch_order
from tp_walk.launches import Launch
from tp_walk.mailbox import MAX_WORLD_SIZE, WORD_BYTES, MailboxLayout
from tp_walk.peer_memory import PeerBuffer
from tp_walk.peers import PeerMailboxes
from tp_walk.placement import TILE_ROWS, WARP_SIZE
from tp_walk.plan import ExecutorContext, PlanExecutor, WalkInputs

WARPS = 16
CHUNK_IDS = 16
CHASE_CONTROL_BYTES = 576
# Tokens that a step is likely to end with, for which the next one works out what follows them: at most, and by one CTA.
LIKELY, PART = 256, 16
# Of a request's step: token, likely ones, what follows those before, and four of its helper.
STEP_WORDS = 5 + 2 * LIKELY
HELPED_CTAS = 6  # for a step: where there are as many, one has its second tier ready
ENOUGH_CTAS = 4  # for a step: where there would be fewer, the ranks deal the requests out among themselves
# Rows of W2 that the CTA of a step keeps at hand: most steps score fewer than that (experiments/certified_share.py).
TIERS = (256, 128, 64)
# By the largest batch that they are for: chunks of a lane, and the most candidates of a unit. Small units keep longer
# lists in all, which cost a large batch time on the links. Three quarters of a list are sure to be taken; its length
# leaves few blocks to the walk, and each thread of the chase few words.
UNITS = ((8, 2, 38), (1 << 16, 4, 47))
MOST_THREAD_WORDS = 32  # of a step's candidates, in a thread's registers: csrc/chase_memory.cuh
BOUND_TOKENS = 64  # of a CTA
BOUND_THREADS = 256

# In the order of `Count` in csrc/certify_params.cuh.
COUNTS = ("blocks", "certified_blocks", "steps", "certified_steps", "candidates_scored", "fallbacks")

_P, _I32 = ctypes.c_void_p, ctypes.c_int32


class CertifyParams(ctypes.Structure):
    """Field for field `tpw::CertifyParams` of csrc/certify_params.cuh, which says what each one means."""

    _fields_ = [
        ("walk", WalkParams),
        ("w2", _P),
        ("bounds", _P),
        ("lists", _P * MAX_WORLD_SIZE),
        ("steps_offset", ctypes.c_uint64),
        ("fallback", _P),
        ("offsets", _P),
        ("counts", _P),
        ("units", _I32),
        ("list_words", _I32),
        ("owners", _I32),
        ("team", _I32),
        ("helpers", _I32),
        ("shard_starts", _I32 * MAX_WORLD_SIZE),
    ]


@dataclass(frozen=True)
class CertifySpecialisation:
    """One cubin of csrc/certify.cu.

    max_batch: the largest that it is for. base_fp32, sampled: as in `kernels.Specialisation`. units: a request's step
    has so many on each rank, unit_words: words that each sends. tier: rows of W2 at hand. grid, shared_bytes: of its
    launches.
    """

    max_batch: int
    base_fp32: bool
    sampled: bool
    units: int
    unit_words: int
    tier: int
    grid: int
    shared_bytes: int
    macros: dict[str, int]


def certify_specialisations(
    *,
    markov_rank: int,
    widths: list[int],
    max_batch: int,
    rounding: Rounding,
    num_sms: int,
    shared_limit: int,
) -> list[CertifySpecialisation]:
    """Every one that a walk of a runtime may want, those for small batches first.

    widths: of all ranks' shards. The others are as in `kernels.specialisations`.

    Raises:
        PlanUnavailableError: as `place`; or a vocabulary whose candidates have no room in shared memory.
    """
    world_size = len(widths)
    walks = specialisations(
        int8=False,
        markov_rank=markov_rank,
        rows=max(widths),
        world_size=world_size,
        max_batch=max_batch,
        rounding=rounding,
        num_sms=num_sms,
        shared_limit=shared_limit,
    )
    # Of each kind one: what a launch multiplies at once isn't this kernel's concern.
    kinds: dict[tuple[bool, bool], Specialisation] = {}
    for one in walks:
        if one.logits == "none":
            kinds.setdefault((one.base_fp32, one.sampled), one)
    found = []
    smallest = 0
    for limit, chunks, list_length in UNITS:
        if max_batch <= smallest:
            break
        smallest = limit
        units = -(-max(widths) // (chunks * WARP_SIZE * CHUNK_IDS)) or 1
        entries = world_size * units * list_length
        tier = next((tier for tier in TIERS if shared_bytes(tier, markov_rank) <= shared_limit), None)
        if tier is None:
            raise PlanUnavailableError(
                f"plan certified keeps {TIERS[-1]} rows of W2 in shared memory, and more: at rank {markov_rank} "
                f"{shared_bytes(TIERS[-1], markov_rank)} bytes, of {shared_limit}"
            )
        most = tier * (markov_rank * 2 + 16) // 4  # csrc/certify.cu keeps a number for each request in the rows' place
        if max_batch > most:
            raise PlanUnavailableError(f"plan certified serves {most} requests at most; max_batch is {max_batch}")
        for (base_fp32, sampled), one in kinds.items():
            in_word = 1 if base_fp32 else 2 if sampled else 3  # candidates: csrc/candidates.cuh
            unit_words = -(-(list_length + 1) // in_word)  # and what bounds the others
            words, most_words = world_size * units * unit_words, MOST_THREAD_WORDS * WARPS * WARP_SIZE
            if words > most_words:
                raise PlanUnavailableError(
                    f"plan certified gathers {most_words} words of candidates of a step; {world_size} ranks with "
                    f"{max(widths)} ids would send {words}"
                )
            macros = one.macros | {
                "TPW_LIST": list_length,
                "TPW_UNIT_WORDS": unit_words,
                "TPW_CHUNKS": chunks,
                "TPW_TIER": tier,
                "TPW_MAX_ENTRIES": entries,
                "TPW_CERTIFY_WARPS": WARPS,
                "TPW_CHASE_CONTROL_BYTES": CHASE_CONTROL_BYTES,
                "TPW_LIKELY": LIKELY,
                "TPW_PART": PART,
                "TPW_STEP_WORDS": STEP_WORDS,
                "TPW_CERTIFY_PARAMS_BYTES": ctypes.sizeof(CertifyParams),
            }
            size = shared_bytes(tier, markov_rank)
            found.append(
                CertifySpecialisation(limit, base_fp32, sampled, units, unit_words, tier, num_sms, size, macros)
            )
    return found


def shared_bytes(tier: int, markov_rank: int) -> int:
    """Of a CTA: `ChaseSmem` of csrc/chase_memory.cuh."""
    rows = tier * (markov_rank * 2 + 16) + PART * (markov_rank * 2 + 32)
    return rows + CHASE_CONTROL_BYTES + WARPS * (PART + LIKELY) * 8 + tier * 20


def shares(batch: int, gamma: int, world_size: int, kernel: CertifySpecialisation) -> tuple[int, int, int]:
    """How the work of a walk is shared out: ranks that deal the requests out among themselves (all, or 1: each takes
    all), CTAs that share a request's step, each with PART of its likely tokens, and those that have its second tier
    ready, one or none.

    Dealt out, a rank has fewer steps, and candidates go to one rank instead of all; in exchange tokens have to come
    back, which takes a hop. So it is done where one rank's CTAs would be short of a few for each step.

    A token without a transition costs 4 µs. On held-out text 1.0 tokens of a greedy block of 7 steps aren't among the
    best 32 by base logits, 0.4 not among 64, 0.15 not among 128, 0.01 not among 256. More than one part a CTA costs as
    much as it brings. One that the first tier doesn't decide took 10: with a helper a greedy block of 7 steps took
    26.1 µs instead of 27.7, at most 48 instead of 62 in 99 of 100 blocks, and one of 16 36.9 instead of 40.1 (means,
    one request on one H200), though 16 steps leave 7 CTAs a step for the likely tokens instead of 8.
    """
    owners = world_size if batch >= world_size and batch * gamma * ENOUGH_CTAS > kernel.grid else 1
    ctas = kernel.grid // (-(-batch // owners) * gamma)
    helpers = int(ctas >= HELPED_CTAS)
    return owners, max(1, min(kernel.tier // PART, ctas - helpers)), helpers


def bound_macros(markov_rank: int) -> dict[str, int]:
    """What csrc/certify_bounds.cu is compiled with."""
    of_walks = dict.fromkeys(("TPW_INT8", "TPW_NARROW", "TPW_SINGLE", "TPW_BY_WARPGROUPS"), 0)
    return of_walks | {"TPW_RANK": markov_rank, "TPW_TOKENS": BOUND_TOKENS}


def bound_fragments(w2: torch.Tensor) -> torch.Tensor:
    """All of W2, `[V, r]` bf16, in fragment order: `[tiles, k steps, 32, 4]` int32."""
    tiles = -(-w2.shape[0] // TILE_ROWS)
    # A row that is there twice changes no maximum; a row of zeros might.
    padded = torch.cat([w2, w2[-1:].expand(tiles * TILE_ROWS - w2.shape[0], -1)])
    return fragment_order(padded.contiguous(), w2.shape[1] // 16)


def bias_bounds(w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """B of every row of W1, `[tokens]` float32 (certify.py). w1: `[tokens, r]`, w2: `[V, r]`, both bf16 on one GPU."""
    from cuda.bindings import driver

    tokens, markov_rank = w1.shape
    bounds = torch.empty(tokens, device=w1.device)
    if not tokens:
        return bounds
    fragments = bound_fragments(w2)
    dynamic = BOUND_TOKENS * (markov_rank * 2 + 32)
    function = jit.compile_kernel("certify_bounds.cu", "certify_bounds", bound_macros(markov_rank)).load(dynamic)
    values = [fragments.data_ptr(), w1.data_ptr(), bounds.data_ptr(), len(fragments), tokens]
    kinds = [_P, _P, _P, _I32, _I32]
    grid = -(-tokens // BOUND_TOKENS)
    stream = torch.cuda.current_stream(w1.device)
    (status,) = driver.cuLaunchKernel(
        function, grid, 1, 1, BOUND_THREADS, 1, 1, dynamic, stream.cuda_stream, (tuple(values), tuple(kinds)), 0
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"launching certify_bounds ({grid} CTAs, {dynamic} bytes of shared memory) failed: {status}")
    stream.synchronize()  # the fragments go with this call
    return bounds


class _Fallback(TpBf16Executor):
    """The walk kernel for requests that weren't certified, from the first step that one of them failed at."""

    def take(self, rows: torch.Tensor, first_step: torch.Tensor) -> None:
        """rows: `[max batch]` int32 and first_step: int32, on the device: what each walk looks up from now on."""
        self._params.batch_rows = rows.data_ptr()
        self._params.first_step = first_step.data_ptr()

    def take_all(self) -> None:
        """Every request, from its first step on."""
        self._params.batch_rows = self._params.first_step = None


class CertifiedExecutor:
    """Plan `certified`. Walks that want logits or log-sum-exps are the dense walk, whose tokens are the same.

    Raises:
        PlanUnavailableError: the walk kernel can't run here, or the vocabulary is too large. Else as PeerBuffer.
    """

    name = "certified"

    def __init__(self, context: ExecutorContext) -> None:
        device = context.device
        self._context = context
        self._fallback = _Fallback(context)
        self._closing: list[Any] = [self._fallback]
        try:
            self._set_up(context, device)
        except BaseException:
            self.close()
            raise

    def _set_up(self, context: ExecutorContext, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        world_size = context.shape.world_size
        group = context.group if world_size > 1 else None
        own_grid = properties.multi_processor_count // settings().test_ranks_per_gpu
        grid = min(context.group.all_gather_object(own_grid))  # what `shares` goes by: alike on every rank
        chosen = certify_specialisations(
            markov_rank=context.shape.markov_rank,
            widths=[shard.width for shard in context.shards],
            max_batch=context.max_batch,
            rounding=context.rounding,
            num_sms=grid,
            shared_limit=properties.shared_memory_per_block_optin,
        )
        self._list_words = max(
            min(one.max_batch, context.max_batch) * context.max_gamma * world_size * one.units * one.unit_words
            for one in chosen
        )
        list_bytes = 2 * self._list_words * WORD_BYTES
        if list_bytes >= 1 << 32:
            raise PlanUnavailableError(
                f"the candidates of {context.max_batch} requests of {context.max_gamma} steps take {list_bytes} bytes, "
                "and 4 GB can be addressed; make the runtime with a smaller max_batch"
            )
        layout = MailboxLayout(world_size, context.max_batch, grid)
        self._mailboxes = PeerMailboxes(group, layout, device)
        self._closing.append(self._mailboxes)
        step_bytes = context.max_batch * context.max_gamma * STEP_WORDS * WORD_BYTES
        self._lists = PeerBuffer(group, list_bytes + step_bytes, device)
        self._closing.append(self._lists)

        self._w2 = torch.empty(context.shape.vocab_size, context.shape.markov_rank, dtype=torch.bfloat16, device=device)
        self._bounds = torch.empty(context.w1.shape[0], device=device)
        self._load(context)
        self._offsets = torch.zeros(context.max_batch, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        # `Fallback` of csrc/certify_params.cuh. Rows that no request has are looked up, though not walked.
        self._left = torch.zeros(2 + context.max_batch + WARP_SIZE, dtype=torch.int32, device=device)

        self._params = params = CertifyParams()
        params.walk = self._fallback.params
        for rank, address in enumerate(self._mailboxes.addresses):
            params.walk.mailboxes[rank] = address
        params.walk.status = self._mailboxes.status_address
        for rank, (address, shard) in enumerate(zip(self._lists.addresses, context.shards, strict=True)):
            params.lists[rank], params.shard_starts[rank] = address, shard.start
        params.steps_offset = list_bytes
        params.w2, params.bounds = self._w2.data_ptr(), self._bounds.data_ptr()
        params.fallback, params.offsets = self._left.data_ptr(), self._offsets.data_ptr()
        params.counts, params.list_words = self._counts.data_ptr(), self._list_words
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._order = launch_order(device)
        self._launches: dict[tuple[bool, bool], list[tuple[CertifySpecialisation, Launch]]] = {}

        def load_kernels() -> None:
            for one in chosen:
                kernel = jit.compile_kernel("certify.cu", "certify", one.macros)
                launch = Launch(
                    "plan certified",
                    kernel,
                    grid=one.grid,
                    threads=WARPS * WARP_SIZE,
                    num_sms=grid,
                    shared_bytes=one.shared_bytes,
                )
                self._launches.setdefault((one.base_fp32, one.sampled), []).append((one, launch))

        # Voted on: what fails on one rank must end this set-up on all of them, as closing takes them all.
        context.group.stage("loading of plan certified's kernels", load_kernels)

    def memory_bytes(self) -> int:
        tensors = (self._w2, self._bounds, self._offsets, self._counts, self._left)
        held = sum(tensor.nbytes for tensor in tensors)
        return self._fallback.memory_bytes() + self._mailboxes.num_bytes + self._lists.num_bytes + held

    def walk(self, inputs: WalkInputs) -> None:
        if inputs.logits != "none" or inputs.lse_out is not None:
            self._fallback.take_all()
            self._fallback.walk(inputs)
            return
        sampled = inputs.temperatures is not None
        if self._context.rounding == "none" and sampled:
            inputs = inputs._replace(base_logits=inputs.base_logits.float())
        base, p = inputs.base_logits, self._params
        launches = self._launches[base.dtype == torch.float32, sampled]
        chosen, launch = next(pair for pair in launches if pair[0].max_batch >= base.shape[0])
        p.units = chosen.units
        p.owners, p.team, p.helpers = shares(base.shape[0], base.shape[1], self._context.shape.world_size, chosen)
        describe_walk(p.walk, inputs, self.name, self._context.rounding)
        point_at_base(p.walk, base, inputs.base_is_full)
        stream = torch.cuda.current_stream(self._context.device)
        self._order.before(stream)
        launch(ctypes.addressof(self._arguments), stream.cuda_stream)
        self._order.after(stream)
        self._fallback.take(self._left[2:], self._left[1])
        self._fallback.walk(self._left_by(inputs))
        self.check()

    def check(self) -> None:
        self._mailboxes.check()
        self._fallback.check()

    def clamped_anchor(self) -> tuple[int, int] | None:
        status = self._mailboxes.status()
        return (status.clamped_block, status.clamped_row) if status.clamped_block else self._fallback.clamped_anchor()

    def counts(self) -> dict[str, int]:
        """Since construction, of walks without logits; a device read."""
        return dict(zip(COUNTS, self._counts.tolist(), strict=True))

    def reset(self) -> None:
        self._mailboxes.reset()
        self._fallback.reset()

    def reload(self, context: ExecutorContext) -> None:
        self._context = context
        context.group.stage("reload of plan certified's fallback", lambda: self._fallback.reload(context))
        self._load(context)

    def close(self) -> None:
        while self._closing:
            self._closing.pop().close()

    def _load(self, context: ExecutorContext) -> None:
        """W2, and the bounds: each rank finds those of its part of the tokens."""
        group, tokens = context.group, context.w1.shape[0]
        part = -(-tokens // group.world_size)
        first = min(group.rank * part, tokens)

        def load() -> torch.Tensor:
            self._w2.copy_(context.head.w2_rows(0, context.shape.vocab_size))
            return bias_bounds(context.w1[first : first + part], self._w2)

        own = group.stage("loading of plan certified's weights", load)
        padded = torch.nn.functional.pad(own, (0, part - own.numel()))
        self._bounds.copy_(group.all_gather(padded, context.deadline.startup_s).flatten()[:tokens])

    def _left_by(self, inputs: WalkInputs) -> WalkInputs:
        """What the second launch is given: as many rows as failed, and the noise that the first one used."""
        noise = inputs.noise
        if noise is not None and isinstance(noise.offset, torch.Tensor):
            noise = replace(noise, offset=self._offsets[: inputs.tokens.shape[0]])
        return inputs._replace(num_valid=self._left[0], noise=noise)


def certified(context: ExecutorContext) -> PlanExecutor:
    """The executor for the context's device: the kernels, or on the CPU the same algorithm in torch."""
    return CertifiedReference(context) if context.device.type == "cpu" else CertifiedExecutor(context)

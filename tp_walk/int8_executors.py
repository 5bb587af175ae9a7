"""The plans whose ranks hold all of W2 as int8: each walks the whole batch, or a share of it."""

from __future__ import annotations

import contextlib
import logging

import torch

from tp_walk.config import LogitsMode
from tp_walk.errors import PlanUnavailableError, WalkError
from tp_walk.executors import KernelExecutor, keep_rows, stored_rows
from tp_walk.mailbox import MAX_WORLD_SIZE
from tp_walk.plan import ExecutorContext, WalkInputs
from tp_walk.quantize import quantize_rows
from tp_walk.shard import Shard
from tp_walk.spread import Spread

logger = logging.getLogger(__name__)


class WholeRowsExecutor(KernelExecutor):
    """The part that both share. The walk needs whole rows of base logits; where they lie sharded, csrc/spread.cu brings
    them, in a launch of its own before the walk's: a captured walk is two kernel nodes then.
    """

    int8 = True
    _spread: Spread | None = None

    def _set_up(self, context: ExecutorContext, *, ranks: int, shares: int = 1) -> None:
        super().__init__(context, ranks=ranks, shard=Shard(0, context.shape.vocab_size), shares=shares)
        if ranks == 1:
            return
        try:
            self._spread = Spread(context, shares=shares)
        except BaseException:
            with contextlib.suppress(WalkError):  # what went wrong first is what to tell
                self._mailboxes.close()
            raise

    def memory_bytes(self) -> int:
        return super().memory_bytes() + (0 if self._spread is None else self._spread.num_bytes)

    def close(self) -> None:
        try:
            if self._spread is not None:
                self._spread.close()
        finally:
            super().close()

    def _base_code(self, base: torch.Tensor, is_full: bool) -> int:
        return int(is_full) | int(base.dtype == torch.float32) << 1

    def _rows(self, context: ExecutorContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        return quantize_rows(context.head.w2_rows(0, context.shape.vocab_size).to(context.device))


class Int8Executor(WholeRowsExecutor):
    """Plan `int8`: every rank walks the whole batch, alone once it has the base logits."""

    name = "int8"

    def __init__(self, context: ExecutorContext) -> None:
        if 1 < context.shape.world_size <= MAX_WORLD_SIZE:
            try:
                self._set_up(context, ranks=context.shape.world_size)
                return
            except PlanUnavailableError as error:
                # Raised alike on every rank. Whole base logits need no peer; sharded ones take a collective then.
                logger.info("plan int8 works without its peers' memory: %s", error)
        self._set_up(context, ranks=1)

    def walk(self, inputs: WalkInputs) -> None:
        """The walk of one GPU on every rank."""
        context = self._context
        if self._spread is None and not inputs.base_is_full:
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
        keep_rows(inputs, whole[..., context.shard.start : context.shard.stop])

    def _bring(self, base: torch.Tensor, is_full: bool, stream: int) -> None:
        if self._spread is None or is_full:
            self._params.is_opened = False
            super()._bring(base, is_full, stream)
        else:
            self._spread(self._params, base, is_full, stream)


class Int8SplitExecutor(WholeRowsExecutor):
    """Plan `int8_split`: of `world` ranks, rank i walks the requests i, i + world, …, and the ranks exchange tokens at
    the end. Two kernels a walk, whole base logits or not: the first one compares the ranks' headers, too.
    """

    name = "int8_split"

    def __init__(self, context: ExecutorContext) -> None:
        ranks = context.shape.world_size
        if not 1 < ranks <= MAX_WORLD_SIZE:
            raise PlanUnavailableError(
                f"plan int8_split splits the batch over 2 to {MAX_WORLD_SIZE} ranks, not {ranks}; plan int8 walks all "
                "of it on each"
            )
        self._set_up(context, ranks=ranks, shares=ranks)

    def walk(self, inputs: WalkInputs) -> None:
        if inputs.logits == "none" and inputs.lse_out is None:
            self._walk(inputs)
        else:
            self._walk_and_exchange(inputs)
        # Last: the ranks of a failed walk must still meet in every collective, or none could be reset.
        self.check()

    def _bring(self, base: torch.Tensor, is_full: bool, stream: int) -> None:
        assert self._spread is not None
        self._spread(self._params, base, is_full, stream)

    def _walk_and_exchange(self, inputs: WalkInputs) -> None:
        """What is reported of all rows: from whole rows of each rank's share, by collectives after the walk."""
        context = self._context
        batch, gamma = inputs.tokens.shape
        share = -(-batch // context.shape.world_size), gamma
        own = lse = None
        if inputs.logits_out is not None:
            own = inputs.logits_out.new_empty(*share, context.shape.vocab_size)
        if inputs.lse_out is not None:
            lse = inputs.lse_out.new_empty(share)
        logits: LogitsMode = "none" if own is None else "full"
        self._walk(inputs._replace(logits=logits, logits_rows="all", logits_out=own, lse_out=lse))
        if inputs.lse_out is not None and lse is not None:
            valid = stored_rows(inputs._replace(logits_rows="all"))
            inputs.lse_out.copy_(torch.where(valid[:, None], self._all_rows(lse, batch), inputs.lse_out))
        if own is not None:
            whole = self._all_rows(own, batch)
            keep_rows(
                inputs, whole if inputs.logits == "full" else whole[..., context.shard.start : context.shard.stop]
            )

    def _all_rows(self, share: torch.Tensor, batch: int) -> torch.Tensor:
        """`[batch, …]` from each rank's share of the rows. A collective."""
        shares = self._context.group.all_gather(share, self._context.deadline.steady_s)
        return shares.transpose(0, 1).flatten(0, 1)[:batch]

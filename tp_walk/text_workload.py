"""Walks of held-out text. What plan certified takes depends on the text, because that decides what its proofs cover;
all other plans take the same time on any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from tp_walk.blind_base import BlindBase, BlindBaseFit
from tp_walk.errors import WalkError, WalkInputError
from tp_walk.head import MarkovHead
from tp_walk.noise import Noise
from tp_walk.plan import WalkOutput
from tp_walk.runtime import WalkRuntime
from tp_walk.shard import Shard
from tp_walk.timing import CapturedWork
from tp_walk.workload import Ranks, Walk

_NOISE_KEY, _SEED = 0x5EED, 7
_MADE_TOGETHER = 64  # blocks whose base logits are made at once


@dataclass(frozen=True)
class TextBlocks:
    """head: bf16. fit: the base logits' parts, for the anchors of these blocks at least. anchors: `[blocks]` ids."""

    head: MarkovHead
    fit: BlindBaseFit
    anchors: torch.Tensor

    @classmethod
    def read(cls, directory: Path, blocks: int = 512) -> TextBlocks:
        """At random places of the text that was held out of the fits in a directory of experiments/text_head.py.

        Raises:
            CheckpointError: the directory lacks one of the two fits.
        """
        fit = BlindBaseFit.read(directory)
        text = torch.cat(fit.held_out)
        generator = torch.Generator().manual_seed(_SEED)
        anchors = text[torch.randint(len(text), (blocks,), generator=generator)]
        return cls(MarkovHead.from_checkpoint(directory), fit, anchors)

    def over(self, vocab_size: int) -> TextBlocks:
        """The same text where ids are others: those that the head knows lie evenly over another vocabulary. For timing
        vocabularies for which there is no head.

        Raises:
            WalkInputError: the vocabulary has fewer ids than the head knows.
        """
        old, gamma = self.head.vocab_size, self.fit.max_gamma
        if vocab_size == old:
            return self
        w2, counts = self.head.w2_rows(0, old), (self.fit.starts[1:] - self.fit.starts[:-1]).view(gamma, old)
        has_entries = (w2 != 0).any(dim=1) | (counts > 0).any(dim=0)
        known = torch.unique(torch.cat([has_entries.nonzero().flatten(), self.fit.ids.long(), self.anchors]))
        if len(known) > vocab_size:
            raise WalkInputError(f"{vocab_size} ids are too few: the head knows {len(known)}")
        places = torch.arange(len(known)) * vocab_size // len(known)
        new_id = torch.zeros(old, dtype=torch.int64)
        new_id[known] = places

        def moved(table: torch.Tensor, empty: float) -> torch.Tensor:
            rows = table.new_full((vocab_size, *table.shape[1:]), empty)
            rows[places] = table[known]
            return rows

        # Anchors are in the order of their ids before and after, so the entries keep theirs.
        starts = torch.zeros(gamma * vocab_size + 1, dtype=torch.int32)
        spread = counts.new_zeros(gamma, vocab_size)
        spread[:, places] = counts[:, known]
        starts[1:] = spread.flatten().cumsum(0)
        fit = replace(
            self.fit,
            background=moved(self.fit.background, float(self.fit.background.min())),
            starts=starts,
            ids=new_id[self.fit.ids.long()].int(),
        )
        return TextBlocks(MarkovHead(moved(self.head.w1, 0.0), moved(w2, 0.0)), fit, new_id[self.anchors])


class TextWorkload:
    """Plans of one runtime that all walk the same blocks, other ones at each iteration. Construction, `prepare`,
    `check` and `close` are collectives.

    plans: to hold. max_batch, max_gamma: of the walks to come. ranks: who walks.

    Attributes:
        runtime: which holds the plans. num_blocks: there are. base, anchors, temperatures: what the prepared walk is
        of.

    Raises:
        WalkError: the runtime couldn't be made; alike on every rank.
    """

    def __init__(self, blocks: TextBlocks, plans: list[str], *, max_batch: int, max_gamma: int, ranks: Ranks) -> None:
        self._device = ranks.device
        self.runtime = WalkRuntime(
            blocks.head, max_batch, max_gamma, group=ranks.fast_group, device=ranks.device, plans=plans
        )
        self.num_blocks = len(blocks.anchors)
        self._anchors = blocks.anchors.to(ranks.device)
        base = BlindBase(blocks.fit, Shard(0, blocks.head.vocab_size), ranks.device)
        # Of all blocks, made once: `[blocks, gamma, V]`.
        parts = torch.split(self._anchors, _MADE_TOGETHER)
        self._base = torch.cat([base.logits(part, max_gamma) for part in parts])
        self.base = self.anchors = self._base[:0]
        self.temperatures: torch.Tensor | None = None
        self._walk = Walk(1, max_gamma)
        self._picks = np.zeros((1, 1), dtype=np.int64)

    def prepare(self, walk: Walk) -> None:
        """What is captured from now on is this walk, of the blocks that `bring` brings."""
        self._walk = walk
        self.anchors = self._anchors[: walk.batch].clone()
        self.base = self._columns(self._base[: walk.batch, : walk.gamma]).clone()
        self.temperatures = torch.ones(walk.batch, device=self._device) if walk.sampled else None
        # All blocks in another order, again and again.
        order = np.random.default_rng(_SEED).permutation(self.num_blocks)
        self._picks = np.resize(order, (max(1, self.num_blocks // walk.batch), walk.batch))

    def bring(self, iteration: int) -> None:
        """Enqueues, on the current stream, the copies of iteration's blocks to where captured walks read theirs."""
        chosen = torch.from_numpy(self._picks[iteration % len(self._picks)]).to(self._device, non_blocking=True)
        self.base.copy_(self._columns(self._base[:, : self._walk.gamma])[chosen])
        torch.index_select(self._anchors, 0, chosen, out=self.anchors)

    def captured(self, plan: str) -> Callable[[], object]:
        """The prepared walk by a plan, as a CUDA graph; on the CPU as it is."""
        offset = torch.zeros(1, dtype=torch.int64, device=self._device)
        first = self._draft(plan, offset, None)
        logits = None if first.logits is None else torch.empty_like(first.logits)
        out = WalkOutput(torch.empty_like(first.tokens), logits)

        def walk() -> None:
            self._draft(plan, offset, out)

        walk()
        return CapturedWork(walk) if self._device.type == "cuda" else walk

    def check(self, plan: str, other: str, batches: int) -> None:
        """Raises WalkError unless two plans draft the same tokens in so many batches of the prepared walk, and find the
        same logits where it wants any.
        """
        for iteration in range(min(batches, len(self._picks))):
            self.bring(iteration)
            one, two = (self._draft(name, iteration, None) for name in (plan, other))
            if not torch.equal(one.tokens, two.tokens):
                raise WalkError(f"plans {plan} and {other} draft different tokens in batch {iteration} of the text")
            if one.logits is not None and two.logits is not None and not torch.equal(one.logits, two.logits):
                raise WalkError(f"plans {plan} and {other} find different logits in batch {iteration} of the text")

    def close(self) -> None:
        self.runtime.close()

    def __enter__(self) -> TextWorkload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draft(self, plan: str, offset: torch.Tensor | int, out: WalkOutput | None) -> WalkOutput:
        noise = None if self.temperatures is None else Noise(_NOISE_KEY, offset)
        logits = self._walk.logits
        return self.runtime.walk(self.base, self.anchors, self.temperatures, noise, plan, logits=logits, out=out)

    def _columns(self, base: torch.Tensor) -> torch.Tensor:
        if self._walk.layout == "full":
            return base
        return base[..., self.runtime.shard.start : self.runtime.shard.stop]

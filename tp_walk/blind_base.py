"""Base logits from a drafter that sees nothing but the anchor: what a walk has to repair.

`log U(x) + evidence_k(anchor, x)`, with U the unigram distribution of a corpus and the evidence for the token k + 1
places after the anchor, stored sparse. `experiments/text_head.py` fits it, together with a Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from tp_walk.checkpoint import opened
from tp_walk.errors import CheckpointError, WalkInputError
from tp_walk.files import write_whole
from tp_walk.shard import Shard

FILE_NAME = "blind_base.safetensors"
_NAMES = ("background", "starts", "ids", "evidence", "held_out", "held_out_starts")


@dataclass(frozen=True)
class BlindBaseFit:
    """What a fit stores.

    background: `[V]` float32, log U. starts: `[gamma * V + 1]` int32, where the entries of (k, anchor) = k * V + anchor
    begin. ids: `[entries]` int32, ascending within (k, anchor). evidence: `[entries]` float16, added to the background.
    held_out: token ids of the documents that weren't fitted to. description: of the corpus, for people.
    """

    background: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    evidence: torch.Tensor
    held_out: list[torch.Tensor]
    description: str

    @property
    def max_gamma(self) -> int:
        """The most steps that the base was fitted for."""
        return (len(self.starts) - 1) // len(self.background)

    def write(self, directory: Path) -> None:
        """Writes `blind_base.safetensors` into the directory; a reader never sees half of it."""
        lengths = torch.tensor([0] + [len(document) for document in self.held_out])
        tensors = {
            "background": self.background,
            "starts": self.starts,
            "ids": self.ids,
            "evidence": self.evidence,
            "held_out": torch.cat(self.held_out).int(),
            "held_out_starts": lengths.cumsum(0),
        }
        write_whole(directory / FILE_NAME, save(tensors, metadata={"description": self.description}))

    @classmethod
    def read(cls, directory: Path) -> BlindBaseFit:
        """Reads what `write` wrote.

        Raises:
            CheckpointError: the file is missing, truncated, or isn't such a file.
        """
        file = directory / FILE_NAME
        with opened(file) as handle:
            missing = set(_NAMES) - set(handle.keys())
            if missing:
                raise CheckpointError(f"{file}: tensor {min(missing)}: found none, expected a blind base's tensors")
            background, starts, ids, evidence, tokens, bounds = (handle.get_tensor(name) for name in _NAMES)
            description = (handle.metadata() or {}).get("description", "")
        if (len(starts) - 1) % len(background) or int(starts[-1]) != len(ids) or len(ids) != len(evidence):
            found = f"{len(starts)} entries that end at {int(starts[-1])}"
            expected = f"a multiple of {len(background)} plus one, ending at {len(ids)}"
            raise CheckpointError(f"{file}: tensor starts: found {found}, expected {expected}")
        held_out = [tokens[a:b].long() for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        return cls(background, starts, ids, evidence, held_out, description)


class BlindBase:
    """The base logits of some columns, on a device.

    Args:
        fit: what was fitted. shard: the columns, ids `[start, stop)`. device: where the logits are made.
    """

    def __init__(self, fit: BlindBaseFit, shard: Shard, device: torch.device) -> None:
        self.vocab_size, self.max_gamma = len(fit.background), fit.max_gamma
        self._background = fit.background[shard.start : shard.stop].bfloat16().to(device)
        inside = (fit.ids >= shard.start) & (fit.ids < shard.stop)
        kept_before = torch.zeros(len(inside) + 1, dtype=torch.int64)
        torch.cumsum(inside, 0, out=kept_before[1:])
        self._starts = kept_before[fit.starts.long()].to(device)
        ids = fit.ids[inside].long()
        self._logits = (fit.background[ids] + fit.evidence[inside]).bfloat16().to(device)
        self._columns = (ids - shard.start).to(device)

    def logits(self, anchors: torch.Tensor, gamma: int) -> torch.Tensor:
        """`[batch, gamma, shard width]` bfloat16, for `[batch]` int64 anchors on the device.

        Raises:
            WalkInputError: gamma is more than was fitted.
        """
        if gamma > self.max_gamma:
            raise WalkInputError(f"gamma is {gamma}; this blind base was fitted for {self.max_gamma} at most")
        rows = (anchors[:, None] + self.vocab_size * torch.arange(gamma, device=anchors.device)).flatten()
        first, count = self._starts[rows], self._starts[rows + 1] - self._starts[rows]
        row = torch.repeat_interleave(count)
        entry = torch.arange(len(row), device=row.device) + (first - (count.cumsum(0) - count))[row]
        base = self._background.repeat(len(rows), 1)
        base[row, self._columns[entry]] = self._logits[entry]
        return base.view(len(anchors), gamma, -1)

"""The weights of a Markov head: W1, W2 and the draft vocabulary's map, in memory or in a checkpoint.

How a checkpoint is laid out is `checkpoint`'s business, how W2 is split over ranks `shard`'s, how it is quantised
`quantize`'s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tp_walk.checkpoint import StoredTensor, find_head
from tp_walk.errors import WalkInputError
from tp_walk.files import write_whole


class MarkovHead:
    """A serial head whose logit bias after token p is `W2 @ W1[p]` (DSpark's vanilla Markov head).

    Args:
        w1: `[V_target or more, r]` bfloat16, looked up by the target id of the previous token.
        w2: `[V, r]` bfloat16, one row for each id that can be drafted.
        d2t: `[V]` int64, the target id of each drafted id; None where the two vocabularies are the same.
        block_size: γ that the head was fitted for, where it is known; a walk may use another.

    Raises:
        WalkInputError: a shape or dtype that doesn't fit, or a `d2t` entry outside `[0, rows of w1)`.
    """

    def __init__(
        self, w1: torch.Tensor, w2: torch.Tensor, d2t: torch.Tensor | None = None, *, block_size: int | None = None
    ) -> None:
        _check(w1, w2, d2t)
        self._w1: torch.Tensor | StoredTensor = w1
        self._w2: torch.Tensor | StoredTensor = w2
        self.d2t = d2t
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """V: rows of W2, which is the draft vocabulary's size where there is one."""
        return self._w2.shape[0]

    @property
    def target_vocab_size(self) -> int:
        """Rows of W1: ids that may be the previous token."""
        return self._w1.shape[0]

    @property
    def markov_rank(self) -> int:
        """r: columns of W1 and of W2."""
        return self._w2.shape[1]

    @property
    def w1(self) -> torch.Tensor:
        """`[target_vocab_size, r]` bfloat16; a checkpoint's is read at the first use and kept."""
        if isinstance(self._w1, StoredTensor):
            self._w1 = self._w1.rows(0, self.target_vocab_size).to(torch.bfloat16)
        return self._w1

    def tables_on(self, device: torch.device, *, copy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """W1 and d2t there, contiguous; if not `copy`, the head's own where they are so already."""
        d2t = None if self.d2t is None else self.d2t.to(device, copy=copy).contiguous()
        return self.w1.to(device, copy=copy).contiguous(), d2t

    def w2_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of W2, `[stop - start, r]` bfloat16.

        A checkpoint's rows are read from disk at each call and no others are, so a rank that asks for its shard alone
        never holds the rest.

        Raises:
            WalkInputError: the range isn't within `[0, vocab_size]`.
            CheckpointError: the file has gone or has changed since `from_checkpoint`.
        """
        if not 0 <= start <= stop <= self.vocab_size:
            raise WalkInputError(f"rows [{start}, {stop}) of W2 asked for; it has [0, {self.vocab_size})")
        if isinstance(self._w2, StoredTensor):
            return self._w2.rows(start, stop).to(torch.bfloat16)
        return self._w2[start:stop]

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str]) -> MarkovHead:
        """The head of a DSpark checkpoint; only headers, config.json and the draft vocabulary's map are read here.

        Args:
            path: a .safetensors file, or a directory of them with or without a `model.safetensors.index.json`. A
                config.json beside the weights is checked against them and gives `block_size` (γ).

        Float16 and float32 weights are converted to bfloat16, with a warning.

        Raises:
            CheckpointError: no such file; a file that is truncated or corrupt; a missing, doubled or misshapen tensor;
                an element type that can't be converted; a head type or a bias transform that a walk can't do. The
                message names the file, the tensor, what was found and what was expected.
        """
        stored = find_head(Path(path))
        # The constructor checks tensors in memory; these were checked from their headers, naming the file.
        head = cls.__new__(cls)
        head._w1, head._w2, head.d2t, head.block_size = stored.w1, stored.w2, stored.d2t, stored.block_size
        return head

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes `model.safetensors` and `config.json` into the directory `path`, which is made if need be.

        The map is stored as target − draft, as checkpoints have it.

        Raises:
            OSError: the directory can't be written to.
        """
        directory = Path(path)
        weights = {"markov_w1": self.w1, "markov_w2": self.w2_rows(0, self.vocab_size)}
        # Copies: safetensors refuses strided tensors, and two that share memory.
        tensors = {
            f"markov_head.{name}.weight": weight.cpu().clone(memory_format=torch.contiguous_format)
            for name, weight in weights.items()
        }
        config: dict[str, Any] = {
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            # W1 may have rows to spare; where ids aren't mapped, W2 tells the vocabulary's true size.
            "vocab_size": self.vocab_size if self.d2t is None else self.target_vocab_size,
        }
        if self.block_size is not None:
            config["block_size"] = self.block_size
        if self.d2t is not None:
            tensors["d2t"] = self.d2t.cpu() - torch.arange(self.vocab_size)
            config["draft_vocab_size"] = self.vocab_size
        write_whole(directory / "model.safetensors", save(tensors))
        write_whole(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _check(w1: torch.Tensor, w2: torch.Tensor, d2t: torch.Tensor | None) -> None:
    for name, weight in (("w1", w1), ("w2", w2)):
        if weight.ndim != 2 or 0 in weight.shape or weight.dtype != torch.bfloat16:
            found = f"{weight.dtype} {list(weight.shape)}"
            raise WalkInputError(f"{name} is {found}; it must be a torch.bfloat16 matrix with rows and columns")
    if w1.shape[1] != w2.shape[1]:
        raise WalkInputError(f"w1 has {w1.shape[1]} columns and w2 {w2.shape[1]}; both must have markov_rank")
    if d2t is None:
        if w1.shape[0] < w2.shape[0]:
            raise WalkInputError(f"w1 has {w1.shape[0]} rows, w2 {w2.shape[0]}; without d2t w1 needs as many or more")
        return
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (w2.shape[0],):
        found = f"{d2t.dtype} {list(d2t.shape)}"
        raise WalkInputError(f"d2t is {found}; it must be torch.int64 [{w2.shape[0]}], an id for each row of w2")
    low, high = int(d2t.min()), int(d2t.max())
    if low < 0 or high >= w1.shape[0]:
        raise WalkInputError(f"d2t has ids from {low} to {high}; target ids lie in [0, {w1.shape[0]}), the rows of w1")


def check_same_shapes(old: MarkovHead, new: MarkovHead) -> None:
    """Raises WalkInputError if `new` can't take the place of `old` in a runtime."""
    for name in ("vocab_size", "target_vocab_size", "markov_rank"):
        if getattr(new, name) != getattr(old, name):
            raise WalkInputError(
                f"the new head's {name} is {getattr(new, name)}, the old one's {getattr(old, name)}; they must be equal"
            )
    if (new.d2t is None) != (old.d2t is None):
        raise WalkInputError("one head has a d2t and the other has none; both or neither must")

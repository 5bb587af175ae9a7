"""The weights of a Markov head: W1, W2 and the draft vocabulary's map."""

from __future__ import annotations

import torch


class MarkovHead:
    """A serial head whose logit bias after token p is `W2 @ W1[p]`.

    Args:
        w1: `[V_target or more, r]` bfloat16, looked up by the target id of the previous token.
        w2: `[V, r]` bfloat16, one row for each id that can be drafted.
        d2t: `[V]` int64 target id of each drafted id, or None where the two vocabularies are the same.
    """

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor, d2t: torch.Tensor | None = None) -> None:
        self.w1 = w1
        self.d2t = d2t
        self._w2 = w2

    @property
    def vocab_size(self) -> int:
        """V: rows of W2."""
        return int(self._w2.shape[0])

    @property
    def target_vocab_size(self) -> int:
        """Ids that may be the previous token: rows of W1."""
        return int(self.w1.shape[0])

    @property
    def markov_rank(self) -> int:
        """r: columns of W1 and of W2."""
        return int(self._w2.shape[1])

    def w2_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of W2, `[stop - start, r]` bfloat16."""
        return self._w2[start:stop]

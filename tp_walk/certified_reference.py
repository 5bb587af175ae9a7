"""Plan `certified` in plain torch: the algorithm that the kernels run, with what decides a step kept to the
candidates.

It multiplies all rows all the same, as the definition does: the dots of a step give B of its previous token, those of
the candidates, and the dense step of the requests that aren't certified, all by the very same sum. On a GPU that would
be slow, and the kernels take its place (certified.py).
"""

from __future__ import annotations

from collections import Counter

import torch

from tp_walk.certify import bias_bound, from_ordered, keep_best, limit, selection_values
from tp_walk.plan import ExecutorContext
from tp_walk.reference import NO_KEY, Bf16Rows, Draw, Picker, ReferenceExecutor, best_key, ordered, walk_key

# Candidates that each rank keeps of a request's step; experiments/certified_share.py says what other lengths certify.
LIST_LENGTH = 1024


class CertifiedReference(ReferenceExecutor):
    """Requests are walked through their candidates until a step isn't certified, then densely.

    list_length: candidates that each rank keeps.
    """

    def __init__(self, context: ExecutorContext, list_length: int = LIST_LENGTH) -> None:
        super().__init__("certified", context, Bf16Rows(context))
        self._list_length = list_length
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def _picker(self, base: torch.Tensor, draw: Draw | None) -> Picker:
        context, group, timeout_s = self._context, self._context.group, self._timeout_s
        batch, gamma, _ = base.shape
        start, stop = context.shard.start, context.shard.stop
        ids = torch.arange(start, stop, device=context.device)
        sampled = torch.zeros(batch, dtype=torch.bool, device=context.device) if draw is None else draw.sampled
        temperatures = None if draw is None else draw.divisor

        # Everything that doesn't depend on a token, of all steps at once.
        scores, kept, taus = [], [], []
        for step in range(gamma):
            score = selection_values(base[:, step], temperatures, sampled, context.rounding)
            scores.append(score if draw is None else draw.score(score, step, start, stop))
            keep, tau = keep_best(scores[-1], self._list_length)
            kept.append(keep)
            taus.append(tau)
        tau = group.all_reduce_max(torch.stack(taus, dim=1), timeout_s)
        walking = torch.ones(batch, dtype=torch.bool, device=context.device)  # nothing has failed so far

        def pick(step: int, bias: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
            nonlocal walking
            bound = from_ordered(group.all_reduce_max(ordered(bias_bound(bias)), timeout_s))
            keys = walk_key(score, ids).masked_fill(~kept[step], NO_KEY)
            best = group.all_reduce_max(keys.amax(dim=1) if len(ids) else keys.new_full((batch,), NO_KEY), timeout_s)
            highest = limit(tau[:, step], bound, temperatures, sampled, context.rounding)
            certified = walking & ((best >> 32) > highest)
            dense = group.all_reduce_max(best_key(score, ids), timeout_s)
            # How many had to be scored: those that the best doesn't exclude.
            reach = limit(ordered(scores[step]), bound, temperatures, sampled, context.rounding)
            scored = (kept[step] & (reach >= (best >> 32)[:, None])).sum(dim=1)
            self._counts.update(
                steps=batch,
                certified_steps=int(certified.sum()),
                candidates_scored=int(group.all_gather(scored, timeout_s).sum(dim=0)[walking].sum()),
                fallbacks=int((walking & ~certified).sum()),
            )
            walking = certified
            if step == gamma - 1:
                self._counts.update(blocks=batch, certified_blocks=int(walking.sum()))
            return torch.where(certified, best, dense)

        return pick

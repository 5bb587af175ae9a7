"""What the main job does between walks: requests come and go, drafts are checked against the text, ranks stop together.

Everything here depends on the seed and on the drafted tokens alone, which are the same on every rank: the ranks keep
the same requests without talking about them.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch

from tp_walk.errors import WalkInputError
from tp_walk.group import WalkGroup
from tp_walk.shard import Shard

# How often the chosen token is among so many of the base's likeliest.
TOP_SIZES = (1, 4, 8, 16, 128, 512)

# Tokens that a request asks for, about how many rounds that takes, and the share of the slots kept busy on average.
_SHORTEST, _LONGEST, _ROUNDS, _LOAD = 8, 48, 20, 0.75


@dataclass
class Request:
    """A position in a text, served until `stop`. number: since the start of the job, by which its noise is drawn."""

    number: int
    text: list[int]
    position: int
    stop: int
    temperature: float

    @property
    def anchor(self) -> int:
        return self.text[self.position]

    def continuation(self, gamma: int) -> list[int]:
        """The text's own next tokens, which a draft is held to."""
        return self.text[self.position + 1 : self.position + 1 + gamma]


def accepted_length(draft: Sequence[int], continuation: Sequence[int]) -> int:
    """How many tokens of a draft, from its first on, are the text's own."""
    matches = 0
    for drafted, right in zip(draft, continuation, strict=True):
        if drafted != right:
            break
        matches += 1
    return matches


class ContinuousBatch:
    """The requests being served: each round some arrive, all running ones get a block, and the finished ones leave.

    Args:
        texts: token ids of documents; those of gamma tokens or fewer aren't served.
        max_batch: the most requests at a time. gamma: tokens drafted for each in a round.
        temperature: of all requests; None: greedy and T = 1 by turns. seed: of the arrivals. steady: every slot is
            busy at all times.

    Raises:
        WalkInputError: no text is long enough.
    """

    def __init__(
        self,
        texts: Sequence[torch.Tensor],
        max_batch: int,
        gamma: int,
        temperature: float | None,
        seed: int,
        steady: bool = False,
    ) -> None:
        self._texts = [text.tolist() for text in texts if len(text) > gamma]
        if not self._texts:
            raise WalkInputError(f"no text is longer than gamma = {gamma} tokens; give more text")
        # Each position is as likely to be served as any other.
        self._weights = [len(text) - gamma for text in self._texts]
        self._max_batch, self._gamma, self._temperature = max_batch, gamma, temperature
        self._random, self._steady = random.Random(seed), steady
        self._started = 0
        self._finished = 0
        self.running: list[Request] = []

    @property
    def finished(self) -> int:
        """Requests served to their end."""
        return self._finished

    def admit(self) -> list[Request]:
        """Lets requests arrive; returns those running, at least one."""
        free = self._max_batch - len(self.running)
        arrivals = free if self._steady else _poisson(self._random, _LOAD * self._max_batch / _ROUNDS)
        for _ in range(min(free, arrivals if self.running else max(1, arrivals))):
            self.running.append(self._arrival())
        return self.running

    def advance(self, drafts: Sequence[Sequence[int]]) -> list[int]:
        """Takes each running request's draft `[gamma]`; returns how much of it was accepted.

        A request goes on after the accepted tokens and one more, the token that a target model gives besides.
        """
        accepted = []
        for request, draft in zip(self.running, drafts, strict=True):
            accepted.append(accepted_length(draft, request.continuation(self._gamma)))
            request.position += accepted[-1] + 1
        before = len(self.running)
        self.running = [request for request in self.running if request.position <= request.stop]
        self._finished += before - len(self.running)
        return accepted

    def _arrival(self) -> Request:
        (text,) = self._random.choices(self._texts, self._weights)
        # The last position that has gamma tokens after it.
        last = len(text) - self._gamma - 1
        position = self._random.randint(0, last)
        stop = min(last, position + self._random.randint(_SHORTEST, _LONGEST))
        number = self._started
        self._started += 1
        temperature = float(number % 2) if self._temperature is None else self._temperature
        return Request(number, text, position, stop, temperature)


def _poisson(source: random.Random, mean: float) -> int:
    """A draw by inversion of the arrival times: Knuth, The Art of Computer Programming, vol. 2, 3.4.1."""
    count, product, limit = 0, source.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= source.random()
    return count


@dataclass
class Quality:
    """Sums over blocks. `matching` and `accepted`: of the walk, then of the base alone; `top`: by TOP_SIZES."""

    blocks: int = 0
    tokens: int = 0
    matching: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])
    top: list[int] = field(default_factory=lambda: [0] * len(TOP_SIZES))

    def report(self) -> dict[str, Any]:
        """Shares and means, for people and JSON."""
        return {
            "blocks": self.blocks,
            "matching_with_walk": self.matching[0] / self.tokens,
            "matching_without": self.matching[1] / self.tokens,
            "accepted_with_walk": self.accepted[0] / self.blocks,
            "accepted_without": self.accepted[1] / self.blocks,
            "chosen_in_top": {str(size): hits / self.tokens for size, hits in zip(TOP_SIZES, self.top, strict=True)},
        }


class QualityMeter:
    """Compares drafts with the text, and with what the base alone would have drafted. `observe` is a collective.

    Args:
        group: the ranks, with the CPU as its device. shard: the columns of base logits that this rank has.
        seed: of the noise by which the base alone is sampled, which is not the walk's.
    """

    def __init__(self, group: WalkGroup, shard: Shard, seed: int, timeout_s: float) -> None:
        self._group, self._shard, self._timeout_s = group, shard, timeout_s
        self._seed = seed + group.rank
        self._generator: torch.Generator | None = None
        self.by_temperature: dict[float, Quality] = {}

    def observe(
        self, base: torch.Tensor, tokens: torch.Tensor, continuations: torch.Tensor, temperatures: Sequence[float]
    ) -> None:
        """Takes a round: base `[batch, gamma, shard width]`, drafted tokens and the text's own, `[batch, gamma]` int64
        on the CPU."""
        alone, ranks = self._base_choices(base, tokens, temperatures)
        for row, temperature in enumerate(temperatures):
            quality = self.by_temperature.setdefault(temperature, Quality())
            right = continuations[row].tolist()
            quality.blocks += 1
            quality.tokens += len(right)
            for i, draft in enumerate((tokens[row].tolist(), alone[row].tolist())):
                quality.matching[i] += sum(a == b for a, b in zip(draft, right, strict=True))
                quality.accepted[i] += accepted_length(draft, right)
            for i, size in enumerate(TOP_SIZES):
                quality.top[i] += int((ranks[row] < size).sum())

    def _base_choices(
        self, base: torch.Tensor, tokens: torch.Tensor, temperatures: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each step's base logits alone choose, and how many ids they hold likelier than the drafted token.

        Both `[batch, gamma]` int64; ties go to the smaller id, as in a walk.
        """
        start, width = self._shard.start, self._shard.width
        values = base[..., :width].float()
        tokens = tokens.to(base.device)
        ids = torch.arange(start, start + width, device=base.device)
        best, choice = self._best(self._scores(values, temperatures), ids)
        own = (tokens >= start) & (tokens < start + width)
        place = (tokens - start).clamp(0, max(width - 1, 0))
        chosen = torch.full(tokens.shape, -math.inf, device=base.device)
        if width:
            chosen = torch.where(own, values.gather(-1, place[..., None])[..., 0], chosen)
        gathered = self._gather(torch.stack((best.double(), choice.double(), chosen.double())))
        winner = gathered[:, 0].argmax(0, keepdim=True)
        alone = gathered[:, 1].gather(0, winner)[0].long()
        chosen = gathered[:, 2].amax(0).float().to(base.device)
        likelier = (values > chosen[..., None]) | ((values == chosen[..., None]) & (ids < tokens[..., None]))
        return alone, self._gather(likelier.sum(-1)).sum(0)

    def _scores(self, values: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
        if not any(temperature > 0 for temperature in temperatures):
            return values
        if self._generator is None:
            self._generator = torch.Generator(values.device).manual_seed(self._seed)
        scores = values.clone()
        for row, temperature in enumerate(temperatures):
            if temperature > 0:
                noise = -torch.empty_like(values[row]).exponential_(generator=self._generator).log()
                scores[row] = values[row] / temperature + noise
        return scores

    @staticmethod
    def _best(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest score of each step and the smallest id that has it."""
        if not len(ids):
            none = torch.full(scores.shape[:-1], -math.inf, device=scores.device)
            return none, none
        best = scores.amax(-1)
        return best, torch.where(scores == best[..., None], ids, torch.iinfo(torch.int64).max).amin(-1)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(tensor.cpu(), self._timeout_s)


class StopSignal:
    """Turns SIGINT and SIGTERM into a request to stop, which ranks agree on between two blocks. A context manager."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self, group: WalkGroup, timeout_s: float, stop_here: bool = False) -> bool:
        """Whether any rank was signalled, or has `stop_here`; the same on every rank, as is `requested` then. A
        collective."""
        mine = 2 if self.requested else int(stop_here)
        most = int(group.all_reduce_max(torch.tensor([mine]), timeout_s))
        self.requested = most == 2
        return most > 0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values don't exceed (nearest rank); NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

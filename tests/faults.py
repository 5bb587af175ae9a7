"""What a rank of cpu_exchange may do at a fault."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from cpu_exchange import Walker

from tp_walk.mailbox import PHASE_BITS, make_key


def kill(walker: Walker) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(walker: Walker) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Sleep:
    seconds: float

    def __call__(self, walker: Walker) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class SendWrongKey:
    """The next publication holds another key for `destination`: a word corrupted on its way, tag intact."""

    destination: int
    token: int

    def __call__(self, walker: Walker) -> None:
        walker.skewed = self.destination, make_key(1e9, self.token)


@dataclass(frozen=True)
class LoseResult:
    """The result of row 0 that `source` has sent for this step, or its CTA 0's post, is overwritten with garbage before
    CTA 0 has seen it.
    """

    source: int
    step: int

    def __call__(self, walker: Walker) -> None:
        layout = walker.layout
        place = layout.result_word(walker.block, self.step, 0, self.source)
        if walker.posts:
            place = layout.post_word(walker.block, self.step, 0, self.source, 0)
        phase = (1 << PHASE_BITS) - 1
        while walker.segment.load_word(walker.rank, place)[1] & phase != self.step + 1:
            time.sleep(0.001)
        walker.segment.store_word(walker.rank, place, 0xDEAD, 0xBEEF00)

"""Measures the table by which plans are selected: every plan that can run here, by batch size, beside the torch walk.

Each plan is checked against its definition at every size before it is timed there, and what the layout of the base
logits costs a plan is inside its time. Plan certified is timed on text, if there is some, other blocks each time: its
mean is what to expect there, requests that it doesn't certify included. `plan_table` keeps the result, `selection` uses
it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tp_walk.config import WalkShape
from tp_walk.errors import WalkError
from tp_walk.group import WalkGroup
from tp_walk.plan import PLAN_NAMES
from tp_walk.plan_table import Layout, Mode, PlanTable, Row, Sample, load, software
from tp_walk.selection import machine_of
from tp_walk.text_workload import TextBlocks, TextWorkload
from tp_walk.timing import BlockTimer, Timing
from tp_walk.workload import Ranks, Walk, Workload

CERTIFIED, ITS_FALLBACK = "certified", "tp_bf16"
_CHECKED_BATCHES = 4  # of text, at each size


@dataclass(frozen=True)
class Request:
    """What to measure. out: files that rank 0 writes after each size, over whatever table of this machine they hold."""

    vocab_size: int
    markov_rank: int
    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    modes: tuple[Mode, ...]
    layouts: tuple[Layout, ...]
    iterations: int
    out: tuple[Path, ...]

    def walks(self, world_size: int) -> list[Walk]:
        """Every size once: the smallest, the largest and the middle batch first, so that a run that is broken off can
        be interpolated. A world of one has one layout."""
        layouts = self.layouts if world_size > 1 else ("full",)
        middle = self.batches[len(self.batches) // 2]
        walks = [
            Walk(batch, gamma, mode == "sampled", layout=layout)
            for layout in layouts
            for mode in self.modes
            for gamma in self.gammas
            for batch in self.batches
        ]
        return sorted(walks, key=lambda walk: walk.batch not in (min(self.batches), middle, max(self.batches)))


def measure(
    request: Request,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
    blocks: TextBlocks | None = None,
) -> PlanTable:
    """Measures on the ranks of `dist.group.WORLD` (gloo), or on this process alone; a collective.

    progress: told how many sizes are done, and of how many; on rank 0. should_stop: asked between sizes; when any
    rank's says so, what was measured until then is the result. blocks: of text for plan certified, of the request's
    shape; without, it is timed on random weights as the others are.

    Raises:
        WalkError: the ranks or their GPUs failed; alike on every rank. What was measured by then is in the files.
    """
    ranks = Ranks.of_this_run()
    group = WalkGroup(ranks.group, ranks.device)
    machine = machine_of(group, ranks.device, WalkShape(request.vocab_size, request.markov_rank, group.world_size))
    older = {path: load(path, machine) if group.rank == 0 else None for path in request.out}
    walks = request.walks(group.world_size)
    text = None if blocks is None else blocks.fit.description
    provenance = software() | {"text": text, "date": datetime.date.today().isoformat()}
    table = PlanTable(machine, provenance, [])
    with ExitStack() as resources:
        workload = resources.enter_context(
            Workload(
                request.vocab_size,
                request.markov_rank,
                max_batch=max(request.batches),
                max_gamma=max(request.gammas),
                ranks=ranks,
            )
        )
        on_text = None
        if blocks is not None and CERTIFIED not in workload.not_held:
            limits = {"max_batch": max(request.batches), "max_gamma": max(request.gammas)}
            on_text = resources.enter_context(TextWorkload(blocks, [ITS_FALLBACK, CERTIFIED], **limits, ranks=ranks))
        timer = resources.enter_context(BlockTimer(group, ranks.device))
        for done, walk in enumerate(walks, start=1):
            if any(group.all_gather_object(should_stop())):
                break
            row = _measure_size(walk, workload, on_text, timer, request.iterations)
            table = PlanTable(machine, provenance, sorted([*table.rows, row], key=lambda one: one.place))
            if group.rank == 0:
                for path in request.out:
                    table.merged_over(older[path]).write(path)
                progress(done, len(walks))
    return table


def _measure_size(
    walk: Walk, workload: Workload, on_text: TextWorkload | None, timer: BlockTimer, iterations: int
) -> Row:
    prepared = workload.prepare(walk)
    ready, refused, before = dict(prepared.ready), dict(prepared.refused), None
    if on_text is not None and CERTIFIED in ready:
        try:
            ready[CERTIFIED] = workload.group.stage(f"check of {CERTIFIED} on text", lambda: _certified(walk, on_text))
            before = on_text.bring
        except WalkError as error:
            del ready[CERTIFIED]
            refused[CERTIFIED] = str(error)
            on_text.runtime.reset()
    samples = {
        name: _sample(times, is_mean=name == CERTIFIED)
        for name, times in timer.samples(ready, iterations, before).items()
    }
    return Row(
        layout=walk.layout,
        mode="sampled" if walk.sampled else "greedy",
        gamma=walk.gamma,
        batch=walk.batch,
        plans={name: sample for name, sample in samples.items() if name in PLAN_NAMES},
        baseline={name: sample for name, sample in samples.items() if name not in PLAN_NAMES},
        refused=refused,
    )


def _certified(walk: Walk, on_text: TextWorkload) -> Callable[[], object]:
    on_text.prepare(walk)
    on_text.check(CERTIFIED, ITS_FALLBACK, _CHECKED_BATCHES)
    return on_text.captured(CERTIFIED)


def _sample(times: npt.NDArray[np.float64], is_mean: bool) -> Sample:
    timing = Timing.of(times)
    us = float(times.max(axis=0).mean()) if is_mean else timing.median_us
    return Sample(*(round(value, 2) for value in (us, timing.spread_us, timing.p99_us)))

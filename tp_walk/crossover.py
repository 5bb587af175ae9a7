"""Measures the table by which plans are selected: every plan that can run here, by batch size, beside the torch walk.

Each plan is checked against its definition at every size before it is timed there, and what the layout of the base
logits costs a plan is inside its time. `plan_table` keeps the result, `selection` uses it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tp_walk.config import WalkShape
from tp_walk.group import WalkGroup
from tp_walk.plan import PLAN_NAMES
from tp_walk.plan_table import Layout, Mode, PlanTable, Row, Sample, load, software
from tp_walk.selection import machine_of
from tp_walk.timing import BlockTimer, Timing
from tp_walk.workload import Ranks, Walk, Workload


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
) -> PlanTable:
    """Measures on the ranks of `dist.group.WORLD` (gloo), or on this process alone; a collective.

    progress: told how many sizes are done, and of how many; on rank 0. should_stop: asked between sizes; when any
    rank's says so, what was measured until then is the result.

    Raises:
        WalkError: the ranks or their GPUs failed; alike on every rank. What was measured by then is in the files.
    """
    ranks = Ranks.of_this_run()
    group = WalkGroup(ranks.group, ranks.device)
    machine = machine_of(group, ranks.device, WalkShape(request.vocab_size, request.markov_rank, group.world_size))
    older = {path: load(path, machine) if group.rank == 0 else None for path in request.out}
    walks = request.walks(group.world_size)
    provenance = software() | {"date": datetime.date.today().isoformat()}
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
        timer = resources.enter_context(BlockTimer(group, ranks.device))
        for done, walk in enumerate(walks, start=1):
            if any(group.all_gather_object(should_stop())):
                break
            row = _measure_size(walk, workload, timer, request.iterations)
            table = PlanTable(machine, provenance, sorted([*table.rows, row], key=lambda one: one.place))
            if group.rank == 0:
                for path in request.out:
                    table.merged_over(older[path]).write(path)
                progress(done, len(walks))
    return table


def _measure_size(walk: Walk, workload: Workload, timer: BlockTimer, iterations: int) -> Row:
    prepared = workload.prepare(walk)
    samples = {name: _sample(timing) for name, timing in timer.measure(prepared.ready, iterations).items()}
    return Row(
        layout=walk.layout,
        mode="sampled" if walk.sampled else "greedy",
        gamma=walk.gamma,
        batch=walk.batch,
        plans={name: sample for name, sample in samples.items() if name in PLAN_NAMES},
        baseline={name: sample for name, sample in samples.items() if name not in PLAN_NAMES},
        refused=prepared.refused,
    )


def _sample(timing: Timing) -> Sample:
    return Sample(*(round(us, 2) for us in (timing.median_us, timing.spread_us, timing.p99_us)))

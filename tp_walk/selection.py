"""Which plan a walk of a given size should take: from the measured table of this machine, else from the cost model.

A `Selector` is a pure function of a table and the plans at hand; `agree_on_selector` makes the same one on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import torch

from tp_walk.config import WalkShape
from tp_walk.cost_model import seed_us
from tp_walk.errors import PlanUnavailableError, WalkMismatch
from tp_walk.group import WalkGroup
from tp_walk.plan import EXECUTORS, PLAN_NAMES, REFERENCE_PLANS, SLOW_TO_REPORT, Plan
from tp_walk.plan_table import Layout, Machine, Mode, PlanTable, find_table, shipped_tables, software
from tp_walk.topology import Gpu, gpu_of, link_between

# From the worst to the best; a group is as well connected as the worst pair of its ranks.
_LINKS = ("unknown", "PCIe", "same GPU", "NVLink", "none")


class Selector:
    """Answers which plan to take, for one machine and shape of head.

    plans: those that can run, one at least. The definitions are chosen only where nothing else can run, and then the
        first: they are there to be right.
    notes: on the table, in words: see `notes_on`.
    """

    def __init__(self, machine: Machine, table: PlanTable | None, plans: Collection[str], notes: str = "") -> None:
        self.machine, self.table, self._notes = machine, table, notes
        self._plans = _choosable(plans)
        self._known: dict[tuple[int, int, bool, Layout], Plan] = {}

    def __call__(self, batch: int, gamma: int, sampled: bool, layout: Layout) -> Plan:
        """The plan with the smallest expected time. Fast for a size that it has been asked for before."""
        size = batch, gamma, sampled, layout
        plan = self._known.get(size)
        if plan is None:
            plan = self._known[size] = self._select(*size)
        return plan

    def times(self, batch: int, gamma: int, sampled: bool, layout: Layout) -> tuple[dict[str, float], str]:
        """Plan → expected µs for the plans of which something is known, and where that is from."""
        machine, mode = self.machine, _mode(sampled)
        if self.table is not None:
            estimate = self.table.estimate(layout, mode, gamma, batch, self._plans)
            if estimate is not None:
                then = self.table.provenance
                text = f"certified on {then.get('text') or 'random weights'}" if "certified" in estimate.us else ""
                parts = [f"measured {then.get('date')} on {machine}", estimate.how, text, self._notes]
                return dict(estimate.us), "; ".join(part for part in parts if part)
        seeds = {
            plan: seed_us(
                plan,
                vocab_size=machine.vocab_size,
                markov_rank=machine.markov_rank,
                world_size=machine.world_size,
                batch=batch,
                gamma=gamma,
                sampled=sampled,
                layout=layout,
            )
            for plan in self._plans
        }
        known = {plan: us for plan, us in seeds.items() if us is not None}
        return known, f"seed, from the hardware's limits; measure with: {machine.measuring_command}"

    def among(self, plans: Collection[str]) -> Selector:
        """The selector of the same table for other plans."""
        return Selector(self.machine, self.table, plans, self._notes)

    @cached_property
    def reporting(self) -> Selector:
        """The selector for walks that report logits or log-sum-exps."""
        quick = [plan for plan in self._plans if plan not in SLOW_TO_REPORT]
        return self.among(quick) if quick and len(quick) < len(self._plans) else self

    def digest(self) -> str:
        """A hash of all that decides."""
        table = "" if self.table is None else self.table.digest()
        return hashlib.sha256(repr((self.machine, table, self._plans)).encode()).hexdigest()[:16]

    def _select(self, batch: int, gamma: int, sampled: bool, layout: Layout) -> Plan:
        times, provenance = self.times(max(batch, 1), gamma, sampled, layout)
        if not times:
            return Plan(self._plans[0], provenance="nothing measured: the first plan that runs here")
        best, *others = sorted(times, key=times.__getitem__)
        return Plan(
            best,
            expected_us=times[best],
            runner_up=others[0] if others else None,
            margin=times[others[0]] / times[best] if others else None,
            provenance=provenance,
        )


def agree_on_selector(group: WalkGroup, device: torch.device, shape: WalkShape, plans: Collection[str]) -> Selector:
    """The selector of this group's machine, from rank 0's table. Collective.

    Raises:
        WalkMismatch: the ranks came to different selectors, on every rank. SetupError: a rank failed.
    """
    machine = machine_of(group, device, shape)
    needs_table = _choosable(plans)[0] not in REFERENCE_PLANS

    def look() -> tuple[PlanTable | None, str]:
        table = find_table(machine) if needs_table and group.rank == 0 else None
        return table, "" if table is None else notes_on(table)

    table, notes = group.all_gather_object(group.stage("look for a crossover table", look))[0]
    selector = Selector(machine, table, plans, notes)
    digests = group.all_gather_object(selector.digest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise WalkMismatch(
                f"ranks 0 and {rank} would select plans differently ({digests[0]}, {digest}): they must hold the same "
                "plans and run the same version of tp_walk"
            )
    return selector


def select_here(shape: WalkShape, batch: int, gamma: int, sampled: bool, layout: Layout | None) -> Plan:
    """What a runtime of this shape, on this process's GPU and others like it, would take.

    Raises:
        PlanUnavailableError: there is no GPU here.
    """
    machine = machine_here(shape)
    table = find_table(machine)
    selector = Selector(machine, table, EXECUTORS, "" if table is None else notes_on(table))
    return selector(batch, gamma, sampled, layout or ("sharded" if shape.world_size > 1 else "full"))


def machine_here(shape: WalkShape) -> Machine:
    """The machine of a group to come, of this host's GPUs.

    Raises:
        PlanUnavailableError: there is no GPU here.
    """
    if not torch.cuda.is_available():
        raise PlanUnavailableError("torch finds no CUDA device here")
    gpus = [gpu_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    own = gpus[torch.cuda.current_device()]
    link = _worst(_link(own, peer) for peer in gpus if peer != own) if len(gpus) > 1 else "unknown"
    return Machine(
        own.name, shape.world_size, link if shape.world_size > 1 else "none", shape.vocab_size, shape.markov_rank
    )


def machine_of(group: WalkGroup, device: torch.device, shape: WalkShape) -> Machine:
    """The machine that a group's ranks are on together. Collective."""
    own = group.stage("look at the GPU", lambda: gpu_of(device) if device.type == "cuda" else None)
    gpus = group.all_gather_object(own)

    def worst_link() -> str:
        peers = [gpu for rank, gpu in enumerate(gpus) if rank != group.rank]
        return _worst("unknown" if own is None or peer is None else _link(own, peer) for peer in peers)

    link = _worst(group.all_gather_object(group.stage("look at the links between GPUs", worst_link)))
    names = dict.fromkeys("CPU" if gpu is None else gpu.name for gpu in gpus)
    return Machine(" + ".join(names), group.world_size, link, shape.vocab_size, shape.markov_rank)


def origin(table: PlanTable) -> str:
    """Whose table it is, in words."""
    return "a table that comes with tp_walk" if table in shipped_tables() else "a table of your own"


def notes_on(table: PlanTable) -> str:
    """Whose table it is, and what of its software has changed since, in words."""
    return "; ".join(part for part in (origin(table), changes(table.provenance, software())) if part)


def changes(then: Mapping[str, str | None], now: Mapping[str, str | None]) -> str:
    """What of a table's software has changed since, in words; its date aside."""
    changed = [
        f"{name} {then.get(name)} → {value}" for name, value in now.items() if value not in (None, then.get(name))
    ]
    return f"since then: {', '.join(changed)}" if changed else ""


def _choosable(plans: Collection[str]) -> tuple[str, ...]:
    in_order = tuple(name for name in PLAN_NAMES if name in plans)
    return tuple(name for name in in_order if name not in REFERENCE_PLANS) or in_order[:1]


def _mode(sampled: bool) -> Mode:
    return "sampled" if sampled else "greedy"


def _link(own: Gpu, peer: Gpu) -> str:
    return link_between(own, peer).kind if own.host == peer.host else "unknown"


def _worst(links: Iterable[str]) -> str:
    return min(links, key=_LINKS.index, default="none")

"""What works on this machine and what doesn't: the examination behind `tp-walk doctor`.

Each plan is tried for real, by a small walk whose sums are exact in every plan's arithmetic, so that its tokens must be
the reference's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tp_walk.config import settings
from tp_walk.errors import PlanUnavailableError, WalkError
from tp_walk.group import WalkGroup
from tp_walk.head import MarkovHead
from tp_walk.pair_test import PairResult, check_pairs
from tp_walk.plan import PLAN_NAMES
from tp_walk.ranks import run_ranks
from tp_walk.results import Cell, environment
from tp_walk.runtime import WalkRuntime
from tp_walk.topology import Gpu, survey

VOCAB_SIZE, MARKOV_RANK, BATCH, GAMMA = 4096, 256, 4, 4


@dataclass(frozen=True)
class PlanReport:
    """state: "runs", "can't run here" or "broken": it ran, and failed or gave wrong tokens. reason: None if it runs."""

    state: str
    reason: str | None = None


@dataclass(frozen=True)
class RankReport:
    """What one rank sees.

    gpu: None without one. links: to each rank, in words. hops: the tested path to each other rank. obstacle: why the
    ranks can't exchange tokens, or None.
    """

    gpu: Gpu | None
    links: tuple[str, ...]
    hops: tuple[PairResult, ...]
    obstacle: str | None
    plans: Mapping[str, PlanReport]


@dataclass(frozen=True)
class Report:
    """The examination of a machine.

    environment: versions. missing: what a kernel would need and isn't there, each with what to do. ranks: one report
    each, in rank order.
    """

    environment: Mapping[str, Cell]
    missing: tuple[str, ...]
    ranks: tuple[RankReport, ...]

    @property
    def is_healthy(self) -> bool:
        """All that is here works, and some plan runs. A machine without a GPU is healthy: nothing is broken."""
        return all(
            rank.obstacle is None
            and all(plan.state != "broken" for plan in rank.plans.values())
            and any(plan.state == "runs" for plan in rank.plans.values())
            for rank in self.ranks
        )


def examine(world_size: int) -> Report:
    """Examines this machine with `world_size` ranks.

    Raises:
        WalkError: a rank died.
    """
    ranks = (_examine_rank(),) if world_size == 1 else run_ranks(world_size, _examine_rank)
    here = environment()
    return Report(here, tuple(_missing(here)), tuple(ranks))


def _missing(here: Mapping[str, Cell]) -> list[str]:
    missing = []
    if here["driver"] is None:
        missing.append("no NVIDIA driver answers: install one (for CUDA 13, of the 580 series or newer)")
    if here["CUDA"] is None:
        missing.append(f"torch {here['torch']} is built without CUDA: install a CUDA build")
    elif here["GPU"] is None:
        missing.append("torch sees no GPU: look at CUDA_VISIBLE_DEVICES, and at the container's --gpus")
    if here["NVRTC"] is None:
        missing.append("no NVRTC, or no cuda-core: install tp-walk[cu13], or [cu12]")
    return missing


def _examine_rank() -> RankReport:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    process_group = dist.group.WORLD if dist.is_initialized() else None
    gpu: Gpu | None = None
    links: tuple[str, ...] = ()
    hops: tuple[PairResult, ...] = ()
    obstacle: str | None = None
    if has_gpu:
        group = WalkGroup(process_group, device)
        try:
            topology = survey(group, device)
            gpu = topology.gpus[group.rank]
            links = tuple(str(link) for link in topology.links)
            hops = tuple(check_pairs(group, topology, device, again=True))
        except WalkError as error:
            obstacle = str(error)
    plans = {name: _try_plan(name, process_group, device) for name in PLAN_NAMES}
    return RankReport(gpu, links, hops, obstacle, plans)


def _try_plan(name: str, process_group: dist.ProcessGroup | None, device: torch.device) -> PlanReport:
    forced = settings().plan
    if forced not in (None, name):
        return PlanReport("can't run here", f"TP_WALK_PLAN forces {forced}")
    head, base_logits, anchors = _exact_problem(device)
    try:
        with WalkRuntime(head, BATCH, GAMMA, group=process_group, device=device, plans=[name]) as runtime:
            tokens = runtime.walk(base_logits, anchors, plan=name).tokens
            expected = runtime.walk(base_logits, anchors, plan="reference").tokens
            runtime.check()
    except PlanUnavailableError as error:
        return PlanReport("can't run here", str(error))
    except WalkError as error:
        return PlanReport("broken", str(error))
    if not torch.equal(tokens, expected):
        return PlanReport("broken", f"its tokens are {tokens.tolist()}, the reference's {expected.tolist()}")
    return PlanReport("runs")


def _exact_problem(device: torch.device) -> tuple[MarkovHead, torch.Tensor, torch.Tensor]:
    """A head, base logits and anchors on which bf16 and int8 arithmetic agree to the last bit.

    Rows are integers whose largest is ±127: int8 quantisation is exact, and so is every sum, below 2^24.
    """
    generator = torch.Generator().manual_seed(0)

    def rows() -> torch.Tensor:
        table = torch.randint(-127, 128, (VOCAB_SIZE, MARKOV_RANK), generator=generator)
        table[:, 0] = 127
        return table.bfloat16()

    head = MarkovHead(rows(), rows())
    base_logits = torch.randint(-127, 128, (BATCH, GAMMA, VOCAB_SIZE), generator=generator).mul(1 << 11).bfloat16()
    return head, base_logits.to(device), torch.arange(BATCH, device=device)

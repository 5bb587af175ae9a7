"""How many exchanges go right in a row? And would a broken exchange be noticed?

    python experiments/soak.py [--exchanges 20000000] [--delay-seconds 10] [--control-seconds 8] [--nproc 2]

Two ranks or more walk random blocks: batch, γ, plan, valid rows, greedy or sampled, eager or a graph's replay, the same
on every rank, whose hosts lag behind each other now and then. Every block's tokens are compared between ranks, and some
of each chunk with the definition. Then the same on builds that lack a rule of the protocol, which must be caught.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import click
import kernel_variants
import torch
import torch.distributed as dist
from kernel_variants import BROKEN
from rich.console import Console

from tp_walk import Deadline, MarkovHead, Noise, WalkError, WalkOutput, WalkRuntime
from tp_walk.group import WalkGroup
from tp_walk.pair_test import check_pairs
from tp_walk.precompile import compile_together, current_gpu
from tp_walk.ranks import run_ranks
from tp_walk.results import Column, ResultTable, environment
from tp_walk.topology import survey

RESULTS = Path(__file__).resolve().parent / "results" / "soak.json"

VOCAB_SIZE = 8192  # every SM has rows, and so few that a block is mostly exchange
MAX_BATCH, MAX_GAMMA = 64, 16
GRAPHS = 16
EAGER = 256  # other sizes in each chunk
CHUNK = 2048  # blocks between two comparisons
SAMPLE = 8  # blocks of a chunk that the definition walks, too
ANCHORS = 4  # so few that a stale word of an earlier block can carry a tag of this one

COLUMNS = (
    Column("build", "build"),
    Column("outcome", "outcome"),
    Column("exchanges", "exchanges"),
    Column("steps", "steps"),
    Column("blocks", "blocks"),
    Column("seconds", "seconds"),
    Column("hop_p50_us", "hop p50, µs", 2),
    Column("hop_p99_us", "p99", 2),
    Column("hop_max_us", "max", 2),
    Column("self_test_s", "self-test, s", 2),
)

METHOD = (
    "An exchange is one row's step, agreed on by all ranks: a block of γ steps makes γ for each valid row. Those of a "
    "step overlap; steps count each step once. Random batch, γ, valid rows, greedy and sampled, plan, eager and graph "
    f"replays; every block is compared between ranks, {SAMPLE} of {CHUNK} with the definition. The hops are those of "
    "the pair self-test, right after; its time includes set-up and votes. Builds that lack a rule end with the first "
    "thing noticed."
)


@dataclass(frozen=True)
class Task:
    """A build to soak, until it has made so many exchanges; after so many seconds at the latest. plans: those held;
    tp_bf16 is walked most.
    """

    build: str
    exchanges: float
    seconds: float
    plans: tuple[str, ...]
    deadline: Deadline

    @property
    def is_broken(self) -> bool:
        return self.build in BROKEN


@dataclass(frozen=True)
class Soaked:
    """What became of a build. noticed: the error or difference that ended it, "" if nothing did."""

    build: str
    outcome: str
    noticed: str
    exchanges: int
    steps: int
    blocks: int
    seconds: float
    hop_p50_us: float | None = None
    hop_p99_us: float | None = None
    hop_max_us: float | None = None
    self_test_s: float | None = None


class NoticedError(Exception):
    """A walk failed on some rank, or tokens differ between ranks or from the definition's. The same on every rank."""


class Walks:
    """A build's runtime, and inputs of every size: the same on all ranks."""

    def __init__(self, device: torch.device, plans: Sequence[str], deadline: Deadline) -> None:
        self.device = device
        self.generator = generator = torch.Generator(device).manual_seed(3)

        def table() -> torch.Tensor:
            values = torch.randn(VOCAB_SIZE, 256, device=device, generator=generator)
            return values.mul_(2.0).round_().clamp_(-4, 4).mul_(0.125).bfloat16()

        head = MarkovHead(table(), table())
        base = torch.randn(MAX_BATCH, MAX_GAMMA, VOCAB_SIZE, device=device, generator=generator)
        self.base = base.mul_(3.0).bfloat16()
        self.alone = WalkRuntime(head, MAX_BATCH, MAX_GAMMA, device=device, plans=["reference"])
        with kernel_variants.without_reports():
            self.runtime = WalkRuntime(
                head, MAX_BATCH, MAX_GAMMA, group=dist.group.WORLD, device=device, plans=plans, deadline=deadline
            )


class Block:
    """Walks of one size and plan. Half of the rows of a sampled one are greedy."""

    def __init__(self, walks: Walks, batch: int, gamma: int, plan: str, sampled: bool) -> None:
        self._walks, self.batch, self.gamma, self.plan = walks, batch, gamma, plan
        device = walks.device
        self.tokens = torch.zeros(batch, gamma, dtype=torch.int64, device=device)
        self._anchors = torch.zeros(batch, dtype=torch.int64, device=device)
        self._valid = torch.tensor(batch, dtype=torch.int32, device=device)
        self._offset = torch.zeros(1, dtype=torch.int64, device=device)
        self._temperatures = (torch.arange(batch, device=device) % 2).float() if sampled else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        self._walk(self._walks.runtime, self.plan, self.tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._walk(self._walks.runtime, self.plan, self.tokens)
        self._graph = graph

    def run(self, rng: random.Random) -> int:
        """Walks from new anchors; how many rows were valid."""
        valid = rng.choice([self.batch, self.batch, rng.randint(0, self.batch)])
        self._anchors.random_(ANCHORS, generator=self._walks.generator)
        self._valid.fill_(valid)
        self._offset.fill_(rng.randrange(1 << 33))
        if self._graph is None:
            self._walk(self._walks.runtime, self.plan, self.tokens)
        else:
            self._graph.replay()
        return valid

    def right(self) -> torch.Tensor:
        """What the definition makes of the last walk."""
        tokens = self.tokens.clone()  # inert rows stay as they are
        if self._temperatures is not None:
            self._offset.sub_(1)
        self._walk(self._walks.alone, "reference_int8" if self.plan == "int8" else "reference", tokens)
        return tokens

    def _walk(self, runtime: WalkRuntime, plan: str, tokens: torch.Tensor) -> None:
        noise = None if self._temperatures is None else Noise(7, self._offset)
        base, out = self._walks.base[: self.batch, : self.gamma], WalkOutput(tokens)
        runtime.walk(base, self._anchors, self._temperatures, noise, plan, num_valid=self._valid, out=out)


class Soak:
    """A build under load, on one rank."""

    def __init__(self, group: WalkGroup, task: Task) -> None:
        self._group, self._task = group, task
        self.exchanges = self.steps = self.blocks = 0
        self._rng = random.Random(1)  # the same on every rank
        self._own = random.Random(group.rank)  # not
        self._walks = Walks(group.device, task.plans, task.deadline)
        generator = torch.Generator(group.device).manual_seed(11)
        self._weights = torch.randint(
            -(2**62), 2**62, (MAX_BATCH * MAX_GAMMA,), device=group.device, generator=generator
        )

    def run(self) -> None:
        """Raises NoticedError."""
        graphs = [self._random_block() for _ in range(GRAPHS)]

        def capture() -> None:
            for block in graphs:
                block.capture()

        self._together(capture)
        began = time.monotonic()
        while self._group.all_gather_object(time.monotonic() - began < self._task.seconds)[0]:
            self._run_chunk(graphs)
            if self.exchanges >= self._task.exchanges:
                return

    def close(self) -> None:
        self._walks.runtime.close()

    def _random_block(self) -> Block:
        batch = self._rng.choice([1, self._rng.randint(1, 8), self._rng.randint(1, MAX_BATCH), MAX_BATCH])
        gamma = self._rng.choice([self._rng.randint(1, MAX_GAMMA), MAX_GAMMA])
        plan = self._task.plans[self._rng.random() < 0.1 and len(self._task.plans) > 1]
        return Block(self._walks, batch, gamma, plan, self._rng.random() < 0.5)

    def _together(self, walk: Callable[[], None]) -> None:
        """Some walks, waited for. All ranks go on, or all raise."""
        failure = ""
        try:
            walk()
            torch.cuda.synchronize(self._walks.device)
            self._walks.runtime.check()
        except WalkError as error:
            failure = f"{type(error).__name__}: {error}"
        torch.cuda.synchronize(self._walks.device)
        failures = [text for text in self._group.all_gather_object(failure) if text]
        if failures:
            raise NoticedError(failures[0])

    def _run_chunk(self, graphs: Sequence[Block]) -> None:
        hashes = torch.empty(CHUNK, dtype=torch.int64, device=self._walks.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self._walks.device)
        sample = set(self._rng.sample(range(CHUNK), SAMPLE))
        eager = [self._random_block() for _ in range(EAGER)]

        def walk() -> None:
            for number in range(CHUNK):
                block = self._rng.choice(graphs if self._rng.random() < 0.7 else eager)
                valid = block.run(self._rng)
                if block.plan == "tp_bf16":
                    self.exchanges += valid * block.gamma
                    self.steps += block.gamma if valid else 0
                self.blocks += 1
                tokens = block.tokens.flatten()
                torch.sum(tokens * self._weights[: len(tokens)], dim=0, out=hashes[number])
                if number in sample:
                    wrong.add_((block.right() != block.tokens).sum())
                if self._own.random() < 1 / 300:
                    time.sleep(self._own.random() * 2e-3)

        self._together(walk)
        by_rank = self._group.all_gather(torch.cat([hashes, wrong[None]]).cpu(), 60.0)
        if by_rank[:, -1].any():
            raise NoticedError(f"{by_rank[:, -1].tolist()} tokens of a chunk's sample differ from the definition's")
        different = (by_rank != by_rank[0]).any(0).sum()
        if different:
            raise NoticedError(f"the ranks' tokens differ in {int(different)} blocks of {CHUNK}")


def run_until_noticed(group: WalkGroup, task: Task) -> tuple[str, tuple[int, int, int]]:
    """What was noticed, or nothing; and exchanges, steps and blocks until then."""
    try:
        soaking = Soak(group, task)
    except WalkError as error:  # alike on every rank
        if not task.is_broken:
            raise
        return f"at set-up: {type(error).__name__}: {error}", (0, 0, 0)
    try:
        soaking.run()
        noticed = ""
    except NoticedError as error:
        noticed = str(error)
    soaking.close()
    return noticed, (soaking.exchanges, soaking.steps, soaking.blocks)


def soak(task: Task) -> Soaked:
    """A rank's part. Nothing that a broken build does may end the experiment."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = WalkGroup(dist.group.WORLD, device, timeout_s=60.0)
    kernel_variants.use(task.build)
    began = time.monotonic()
    noticed, counted = run_until_noticed(group, task)
    seconds = time.monotonic() - began
    kernel_variants.use("production")
    hops: tuple[float, ...] = ()
    if not task.is_broken:
        topology, began = survey(group, device), time.monotonic()
        hop = check_pairs(group, topology, device, again=True)[0]
        hops = hop.hop_p50_us, hop.hop_p99_us, hop.hop_max_us, time.monotonic() - began
    return Soaked(
        task.build,
        outcome(task, noticed, counted[0]),
        noticed,
        *counted,
        seconds,
        *hops,
    )


def outcome(task: Task, noticed: str, exchanges: int) -> str:
    """In capitals, where it isn't as it should be."""
    if task.is_broken:
        return "caught" if noticed else "NOT CAUGHT"
    if noticed:
        return "FAILED"
    return "all right" if exchanges >= task.exchanges or task.exchanges == inf else "TOO FEW"


def soak_all(tasks: Sequence[Task], out: Path) -> list[Soaked]:
    """On every rank; the first writes the table after each build."""
    done: list[Soaked] = []
    for task in tasks:
        done.append(soak(task))
        if dist.get_rank() == 0:
            title = f"Soak: exchanges between {dist.get_world_size()} GPUs"
            rows = [asdict(soaked) for soaked in done]
            ResultTable(title, METHOD, environment(), COLUMNS, rows).write(out)
            Console().print(f"{done[-1]}", soft_wrap=True, markup=False, highlight=False)
    return done


@click.command()
@click.option(
    "--exchanges", type=click.IntRange(0), default=20_000_000, show_default=True, help="Of the production build."
)
@click.option("--seconds", type=float, default=120.0, show_default=True, help="That they may take.")
@click.option("--delay-seconds", type=float, default=10.0, show_default=True, help="Of the one with random delays.")
@click.option("--control-seconds", type=float, default=8.0, show_default=True, help="Of each build without a rule.")
@click.option("--nproc", type=click.IntRange(2, 8), default=2, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS)
def main(exchanges: int, seconds: float, delay_seconds: float, control_seconds: float, nproc: int, out: Path) -> None:
    patient, hasty = Deadline(60.0, 5.0), Deadline(5.0, 1.0)  # a broken build may fail in its first walk
    tasks = [
        Task("production", exchanges, seconds, ("tp_bf16", "int8"), patient),
        Task("delays", inf, delay_seconds, ("tp_bf16",), patient),
        *(Task(name, inf, control_seconds, ("tp_bf16",), hasty) for name in BROKEN),
    ]
    tasks = [task for task in tasks if task.seconds > 0 and task.exchanges > 0]
    target = current_gpu()
    wanted = [
        kernel_variants.jobs([task.build], VOCAB_SIZE, nproc, task.plans, target, reports=False) for task in tasks
    ]
    compile_together(itertools.chain.from_iterable(wanted), target.arch)
    done = run_ranks(nproc, soak_all, tasks, out)[0]
    sys.exit(any(soaked.outcome.isupper() for soaked in done))


if __name__ == "__main__":
    main()

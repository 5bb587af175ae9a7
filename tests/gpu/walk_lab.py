"""Weights, inputs, runtimes and right answers of the GPU tests, kept in each rank's process from test to test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from golden import Shape
from oracle import Problem, make_problem

from tp_walk import Deadline, MarkovHead, Noise, WalkOutput, WalkRuntime, precompile
from tp_walk.config import Rounding

Weights = Literal["exact", "gauss"]

SMALL, QWEN3, QWEN35 = 2381, 151_936, 248_320
MAX_BATCH, MAX_GAMMA = 64, 16
# Both sides of every limit: of a pass (4 and 8 requests, or twice as many), of a warp's rows, of the batch.
BATCHES = (1, 2, 5, 8, 9, 16, 33, 64)

# A bug must end as an error, well within the limit that the ranks have for an answer.
DEADLINE = Deadline(startup_s=40.0, steady_s=10.0)

# Of successive requests: every kind of greedy and of sampled row.
TEMPERATURES = (0.0, 1.0, 0.7, -1.0, float("nan"), 1.3, 1e-7, 30.0, 0.05)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WORLDS = [1, pytest.param(2, marks=two_gpus)]
# Of a GPU alone. Only several ranks can split the batch.
PLANS = ("tp_bf16", "int8")
SPLIT_PLANS = (*PLANS, "int8_split")
PLANS_AND_WORLDS = [
    *((plan, 1) for plan in PLANS),
    *(pytest.param(plan, 2, marks=two_gpus) for plan in SPLIT_PLANS),
]


def plans_of(world: int) -> tuple[str, ...]:
    return PLANS if world == 1 else SPLIT_PLANS


# What kernels are compiled for ahead of the tests, besides the golden cases.
SHAPES = (
    Shape(SMALL, 256, MAX_BATCH, "engine"),
    Shape(SMALL, 256, MAX_BATCH, "once"),
    Shape(SMALL, 256, MAX_BATCH, "none"),
    Shape(1500, 512, MAX_BATCH, "engine"),
    Shape(QWEN3, 256, MAX_BATCH, "engine"),
    Shape(QWEN35, 256, MAX_BATCH, "engine"),
    # Of single tests: of a life, of the exchange of base logits, of plan certified, of equal logits, of the timer.
    Shape(SMALL, 256, 8, "engine"),
    Shape(SMALL, 256, 9, "engine"),
    Shape(SMALL, 256, 9, "none"),
    Shape(SMALL, 256, 33, "engine"),
    Shape(QWEN3, 256, 33, "engine"),
    Shape(4099, 256, MAX_BATCH, "engine"),
    Shape(4096, 256, 4, "engine"),
)


RANDOM_SEEDS = range(12)


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    return make_problem(
        seed,
        vocab=int(rng.integers(1, 700)),
        rank=256,
        batch=int(rng.integers(1, 12)),
        gamma=int(rng.integers(1, 5)),
        rounding=str(rng.choice(["engine", "once", "none"])),
        draft=bool(rng.integers(2)),
        sampled=seed % 4 > 0,
        specials=bool(rng.integers(2)),
    )


def random_shapes() -> set[Shape]:
    """Of the runtimes that walk them."""
    return {
        Shape(problem.w2.shape[0], 256, problem.base.shape[0], cast(Rounding, problem.rounding))
        for problem in map(random_problem, RANDOM_SEEDS)
    }


def compile_ahead(shapes: Iterable[Shape], worlds: Sequence[int], target: precompile.Target) -> None:
    """By all cores: a process compiles one kernel at a time, and ranks would do it in turn."""
    jobs = {
        (job.source, job.macros): job
        for shape in shapes
        for job in precompile.jobs(
            shape.vocab_size, shape.markov_rank, worlds, shape.max_batch, [shape.rounding], target
        )
    }
    precompile.compile_together(jobs.values(), target.arch)


class Inputs(NamedTuple):
    """Of the largest walk; a smaller one has the first of each.

    base: `[64, 16, V]` bf16. anchors: `[64]` int64. temperatures: `[64]`.
    """

    base: torch.Tensor
    anchors: torch.Tensor
    temperatures: torch.Tensor


def here() -> tuple[int, int, torch.device]:
    """This rank, how many there are, and its GPU, made the current one."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())  # a rank may see no GPU but its own
    torch.cuda.set_device(device)
    return rank, dist.get_world_size(), device


@cache
def head(weights: Weights, vocab_size: int) -> MarkovHead:
    """On the GPU. "exact": integers over 8, whose dot products are exact in fp32 in any order."""
    generator = generator_of(1)

    def table() -> torch.Tensor:
        values = torch.randn(vocab_size, 256, device=generator.device, generator=generator)
        if weights == "exact":
            values.mul_(2.0).round_().clamp_(-4, 4)
        return values.mul_(0.125 if weights == "exact" else 0.5).bfloat16()

    return MarkovHead(table(), table())


@cache
def inputs(vocab_size: int) -> Inputs:
    generator = generator_of(2)
    device = generator.device
    base = torch.empty(MAX_BATCH, MAX_GAMMA, vocab_size, dtype=torch.bfloat16, device=device)
    base.normal_(0.0, 3.0, generator=generator)
    anchors = torch.randint(vocab_size, (MAX_BATCH,), device=device, generator=generator)
    temperatures = torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(MAX_BATCH)], device=device)
    return Inputs(base, anchors, temperatures)


@cache
def lab(weights: Weights, vocab_size: int, world: int) -> Lab:
    return Lab(weights, vocab_size, world)


class Lab:
    """A runtime of all ranks together, or (world 1) of this rank alone, which holds all kernel plans."""

    def __init__(self, weights: Weights, vocab_size: int, world: int) -> None:
        self.weights, self.vocab_size = weights, vocab_size
        self.rank, _, self.device = here()
        self.head, self.inputs = head(weights, vocab_size), inputs(vocab_size)
        self.runtime = WalkRuntime(
            self.head,
            MAX_BATCH,
            MAX_GAMMA,
            group=dist.group.WORLD if world > 1 else None,
            device=self.device,
            plans=plans_of(world),
            deadline=DEADLINE,
        )

    @cached_property
    def alone(self) -> Lab:
        """The same of this rank alone."""
        return lab(self.weights, self.vocab_size, 1)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's columns."""
        return tensor[..., self.runtime.shard.start : self.runtime.shard.stop]

    def laid_out(self, base: torch.Tensor, layout: str) -> torch.Tensor:
        """Base logits whole, or this rank's columns with a padded tail that mustn't matter."""
        if layout == "full":
            return base
        own = self.columns(base)
        padded = own.new_full((*own.shape[:2], own.shape[2] + 11), float("nan"))
        padded[..., : own.shape[2]] = own
        return padded

    def walk(
        self, batch: int, gamma: int, plan: str, *, sampled: bool = False, layout: str = "full", **more: Any
    ) -> WalkOutput:
        """Walks the first `batch` requests and `gamma` steps of the inputs, sampled rows with Noise(5, 0)."""
        base = self.laid_out(self.inputs.base[:batch, :gamma], layout)
        temperatures, noise = (self.inputs.temperatures[:batch], Noise(5, 0)) if sampled else (None, None)
        return self.runtime.walk(base, self.inputs.anchors[:batch], temperatures, noise, plan, **more)

    @cache  # noqa: B019 - labs live as long as the process
    def right(self, plan: str, sampled: bool) -> torch.Tensor:
        """`[64, 16]` tokens of the definition, walked by this rank alone; those of smaller walks are the first."""
        return self.alone.walk(MAX_BATCH, MAX_GAMMA, definition(plan), sampled=sampled).tokens


def definition(plan: str) -> str:
    return "reference_int8" if plan.startswith("int8") else "reference"


def generator_of(seed: int) -> torch.Generator:
    _, _, device = here()
    return torch.Generator(device).manual_seed(seed)


def assert_same(got: torch.Tensor | None, expected: torch.Tensor, what: object) -> None:
    """Equal to the bit, or an error with the place of the first difference."""
    assert got is not None
    assert got.shape == expected.shape, what
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(got.dtype, got.dtype)
    differ = got.contiguous().view(bits) != expected.contiguous().view(bits)
    if differ.any():
        where = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {where}: {got[where].item()}, "
            f"right is {expected[where].item()}"
        )

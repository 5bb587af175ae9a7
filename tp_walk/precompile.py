"""The kernels that a runtime will want, known from its shape alone: for filling the cache before there is a GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tp_walk import certified, jit, kernels, pair_test, spread
from tp_walk.config import Rounding
from tp_walk.errors import PlanUnavailableError
from tp_walk.shard import shard_bounds


@dataclass(frozen=True)
class Target:
    """The GPU to compile for. shared_limit: bytes of dynamic shared memory that a CTA may ask for."""

    arch: str
    num_sms: int
    shared_limit: int


# CUDA C++ programming guide, table of technical specifications: 227 KB at compute capability 9.0; the SXM parts' SMs.
HOPPER = Target("sm_90a", 132, 227 << 10)


def current_gpu() -> Target:
    """This process's current GPU."""
    import torch

    properties: Any = torch.cuda.get_device_properties()
    return Target(jit.default_arch(), properties.multi_processor_count, properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class Job:
    """One cubin. purpose: which plan wants it, and for what."""

    purpose: str
    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]

    def compile(self, arch: str) -> jit.CompiledKernel:
        """Into the cache. Raises as `jit.compile_kernel`."""
        return jit.compile_kernel(self.source, self.entry, dict(self.macros), arch)


def jobs(
    vocab_size: int,
    markov_rank: int,
    world_sizes: Sequence[int],
    max_batch: int,
    roundings: Sequence[Rounding],
    target: Target = HOPPER,
) -> list[Job]:
    """Every cubin that runtimes of these shapes want, each once.

    Raises:
        PlanUnavailableError: no kernel of any plan serves one of the shapes; the message says why.
    """
    found: dict[tuple[str, tuple[tuple[str, int], ...]], Job] = {}
    for world_size in world_sizes:
        refusals: list[str] = []
        wanted = list(_walk_jobs(vocab_size, markov_rank, world_size, max_batch, roundings, target, refusals))
        if not wanted:
            raise PlanUnavailableError(f"no kernel at world size {world_size}: {'; '.join(dict.fromkeys(refusals))}")
        wanted += _certify_jobs(vocab_size, markov_rank, world_size, max_batch, roundings, target)
        if world_size > 1:
            wanted += _spread_jobs(world_size, max_batch, roundings)
            macros = tuple(pair_test.macros().items())
            wanted.append(Job(f"self-test of {world_size} ranks", "pair_test.cu", "pair_test", macros))
        for job in wanted:
            found.setdefault((job.source, job.macros), job)
    return list(found.values())


def compile_together(wanted: Iterable[Job], arch: str) -> None:
    """Into the cache, by as many processes as there are cores: within one, NVRTC compiles one kernel at a time.

    Raises as `jit.compile_kernel`.
    """
    wanted = list(wanted)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(os.cpu_count() or 1, len(wanted))), mp_context=spawn) as pool:
        list(pool.map(partial(_compile, arch=arch), wanted))


def _compile(job: Job, arch: str) -> None:
    job.compile(arch)


def _spread_jobs(world_size: int, max_batch: int, roundings: Sequence[Rounding]) -> Iterator[Job]:
    for dtype in dict.fromkeys(dtype for rounding in roundings for dtype in spread.base_dtypes(rounding)):
        base_fp32 = dtype.itemsize == 4
        macros = spread.spread_macros(world_size, max_batch, base_fp32=base_fp32)
        purpose = f"int8 and int8_split on {world_size}: exchange of {'fp32' if base_fp32 else 'bf16'} base"
        yield Job(purpose, "spread.cu", "spread", tuple(macros.items()))


def _walk_jobs(
    vocab_size: int,
    markov_rank: int,
    world_size: int,
    max_batch: int,
    roundings: Sequence[Rounding],
    target: Target,
    refusals: list[str],
) -> Iterator[Job]:
    for plan, int8, ranks, rows in _layouts(vocab_size, world_size):
        if not int8 and ranks not in kernels.TP_WORLD_SIZES:
            refusals.append(f"{plan} runs at world size 1, 2, 4 and 8")
            continue
        for rounding in roundings:
            try:
                specialisations = kernels.specialisations(
                    int8=int8,
                    markov_rank=markov_rank,
                    rows=rows,
                    world_size=ranks,
                    max_batch=max_batch,
                    rounding=rounding,
                    num_sms=target.num_sms,
                    shared_limit=target.shared_limit,
                )
            except PlanUnavailableError as error:
                refusals.append(f"{plan}: {error}")
                continue
            for one in specialisations:
                mode = f"{'sampled' if one.sampled else 'greedy'}, {'fp32' if one.base_fp32 else 'bf16'} base"
                purpose = f"{plan} on {world_size}: {rounding}, {mode}, logits {one.logits}"
                yield Job(purpose, "walk.cu", "walk", tuple(one.macros.items()))


def _certify_jobs(
    vocab_size: int, markov_rank: int, world_size: int, max_batch: int, roundings: Sequence[Rounding], target: Target
) -> Iterator[Job]:
    if world_size not in kernels.TP_WORLD_SIZES:
        return  # what it leaves, tp_bf16 walks
    purpose = f"certified on {world_size}"
    for rounding in roundings:
        try:
            specialisations = certified.certify_specialisations(
                markov_rank=markov_rank,
                widths=[shard.width for shard in shard_bounds(vocab_size, world_size)],
                max_batch=max_batch,
                rounding=rounding,
                num_sms=target.num_sms,
                shared_limit=target.shared_limit,
            )
        except PlanUnavailableError:
            return  # int8 may well run
        for one in specialisations:
            mode = f"{'sampled' if one.sampled else 'greedy'}, {'fp32' if one.base_fp32 else 'bf16'} base"
            yield Job(f"{purpose}: {rounding}, {mode}", "certify.cu", "certify", tuple(one.macros.items()))
    macros = tuple(certified.bound_macros(markov_rank).items())
    yield Job(f"{purpose}: bounds", "certify_bounds.cu", "certify_bounds", macros)


def _layouts(vocab_size: int, world_size: int) -> Iterator[tuple[str, bool, int, int]]:
    """Plan, int8, ranks that exchange, and the most rows of W2 that a rank holds."""
    yield "tp_bf16", False, world_size, max(shard.width for shard in shard_bounds(vocab_size, world_size))
    yield "int8", True, world_size, vocab_size  # int8_split's, too

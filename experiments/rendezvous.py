"""Which way for all CTAs to agree on a token is the fastest, and by how much?

    torchrun --nproc-per-node 2 experiments/rendezvous.py [experiments/results/rendezvous.json]

One CTA an SM, on one GPU and, with two ranks, on two: each step every CTA brings a 64-bit key and waits for the largest
of all. Nothing else is done, so that a step here is what the exchange alone costs a step of the walk; "aggregator" is
the walk's (csrc/exchange.cuh). rendezvous.cu holds all designs; each is verified at every step of every launch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_walk import jit
from tp_walk.errors import KernelError, WalkError
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MailboxLayout
from tp_walk.peer_memory import PeerBuffer, cuda_call
from tp_walk.results import Column, ResultTable, environment

SOURCE = Path(__file__).with_suffix(".cu")
RESULTS = Path(__file__).parent / "results" / "rendezvous.json"

STEPS, WARMUP, THREADS = 256, 16, 256
LAUNCHES, PASSES = 20, 2  # a pass times everything once: how far two differ tells what a difference means
ROWS = (1, 8)
MAILBOX_BYTES = 2 << 20
DEADLINE_NS = 250_000_000
SHARED_BYTES = 120 << 10  # more than half of an SM's: no two CTAs share one
POLL_OFFSET_CLOCKS = 150  # about half of a load's round trip to L2
WAITS = {1: "a member's key", 2: "a slot", 3: "a result", 4: "the leader's result", 5: "nothing: it got a wrong key"}

DEFAULTS = {
    "RDV_CLUSTER": 1,
    "RDV_PUSH": 0,
    "RDV_AGGREGATORS": 1,
    "RDV_AGGREGATOR_WARPS": 1,
    "RDV_COPIES": 1,
    "RDV_ATOMIC": 0,
    "RDV_ALL": 0,
    "RDV_DIRECT": 0,
    "RDV_RESULTS_SYS": 1,
    "RDV_STAGGER": 0,
}


@dataclass(frozen=True)
class Design:
    """`macros`: where it differs from `DEFAULTS`. `worlds`: the numbers of GPUs for which it is a design of its own."""

    name: str
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)
    worlds: tuple[int, ...] = (1, 2)

    @property
    def cluster(self) -> int:
        return self.macros.get("RDV_CLUSTER", 1)


def design(name: str, *, worlds: tuple[int, ...] = (1, 2), **macros: int) -> Design:
    return Design(name, {f"RDV_{macro.upper()}": value for macro, value in macros.items()}, worlds)


DESIGNS = (
    design("aggregator"),
    design("aggregator, staggered polls", stagger=POLL_OFFSET_CLOCKS),
    design("aggregator, results at gpu scope", results_sys=0, worlds=(1,)),
    design("aggregator, 2 copies", copies=2),
    design("aggregator, 4 copies", copies=4),
    design("aggregator, 8 copies", copies=8),
    design("aggregator of 5 warps", aggregator_warps=5),
    design("aggregator of 5 warps, staggered polls", aggregator_warps=5, stagger=POLL_OFFSET_CLOCKS),
    design("2 aggregators", aggregators=2, copies=2),
    design("4 aggregators", aggregators=4, copies=4),
    design("4 aggregators of 5 warps", aggregators=4, copies=4, aggregator_warps=5),
    design(
        "4 aggregators of 5 warps, staggered polls",
        aggregators=4,
        copies=4,
        aggregator_warps=5,
        stagger=POLL_OFFSET_CLOCKS,
    ),
    design("direct", direct=1, worlds=(2,)),
    design("direct, aggregator of 8 warps", direct=1, aggregator_warps=8, worlds=(2,)),
    design("direct, 4 aggregators of 8 warps", direct=1, aggregators=4, copies=4, aggregator_warps=8, worlds=(2,)),
    design("all poll all slots", all=1),
    *(
        built
        for size in (2, 4)
        for built in (
            design(f"clusters of {size}, aggregator", cluster=size, push=1),
            design(f"clusters of {size}, aggregator, members poll", cluster=size),
            design(f"clusters of {size}, leaders poll all slots", cluster=size, push=1, all=1),
            design(f"clusters of {size}, all poll all slots", cluster=size, all=1),
        )
    ),
    design("atomic max, last arriver publishes", atomic=1),
    design("atomic max, last arriver publishes, staggered polls", atomic=1, stagger=POLL_OFFSET_CLOCKS),
)


@dataclass(frozen=True)
class Case:
    """One kernel. ctas: the grid, on each of `world` GPUs."""

    design: Design
    world: int
    rows: int
    ctas: int

    def macros(self) -> dict[str, int]:
        own = {
            "RDV_ROWS": self.rows,
            "RDV_CTAS": self.ctas,
            "RDV_STEPS": STEPS,
            "RDV_WARMUP": WARMUP,
            "RDV_MAILBOX_BYTES": MAILBOX_BYTES,
        }
        return {**MailboxLayout(self.world, 1, 1).defines(), **DEFAULTS, **self.design.macros, **own}

    def compile(self, arch: str) -> jit.CompiledKernel:
        cubin = jit.compile_source(SOURCE.read_text(), SOURCE.name, self.macros(), arch)
        return jit.CompiledKernel("rendezvous", arch, cubin)

    def __str__(self) -> str:
        return f"{self.design.name} ({self.world} GPU, {self.rows} rows)"


def cases(worlds: Sequence[int], ctas: Mapping[int, int]) -> list[Case]:
    """ctas: the grid by cluster size."""
    return [
        Case(one, world, rows, ctas[one.cluster])
        for world in worlds
        for rows in ROWS
        for one in DESIGNS
        if world in one.worlds
    ]


def launch_config(ctas: int, cluster: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    if cluster == 1:  # a grid that can't be co-resident is refused; for clusters `grids` asks
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
    else:
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = SHARED_BYTES
    config.hStream = torch.cuda.current_stream().cuda_stream
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def grids(group: WalkGroup, arch: str) -> dict[int, int]:
    """CTAs by cluster size: one an SM, or fewer where the chip can't hold that many clusters at once."""
    from cuda.bindings import driver

    sms = torch.cuda.get_device_properties(group.device).multi_processor_count
    ctas = {1: sms}
    for size in sorted({one.cluster for one in DESIGNS} - {1}):
        kernel = Case(design("", cluster=size), 1, 1, sms // size * size).compile(arch).load(SHARED_BYTES)
        status, clusters = driver.cuOccupancyMaxActiveClusters(kernel, launch_config(sms // size * size, size))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"cuOccupancyMaxActiveClusters for clusters of {size} failed: {status.name}")
        ctas[size] = min(clusters, sms // size) * size
    everyone = group.all_gather_object(ctas)
    return {size: min(one[size] for one in everyone) for size in ctas}


class Bench:
    """Collective: all ranks time the same cases in the same order."""

    def __init__(self, group: WalkGroup) -> None:
        self.group = group
        self.buffer = PeerBuffer(group, MAILBOX_BYTES, group.device)
        self.elapsed = torch.zeros(LAUNCHES, dtype=torch.int64, device=group.device)

    def compile(self, all_cases: Sequence[Case], arch: str) -> dict[Case, jit.CompiledKernel]:
        """Each rank its share; then all load all of them, before anything spins."""
        rank, world = self.group.rank, self.group.world_size
        jit.nvrtc_version()  # imports cuda.core, whose first import by several threads at once fails

        def share() -> dict[str, jit.CompiledKernel]:
            mine = all_cases[rank::world]
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // world)) as pool:
                compiled = pool.map(lambda case: case.compile(arch), mine)
                return {str(case): kernel for case, kernel in zip(mine, compiled, strict=True)}

        shares = self.group.all_gather_object(self.group.stage("compilation", share))
        kernels = {name: kernel for one in shares for name, kernel in one.items()}
        self.group.stage("loading", lambda: [kernel.load(SHARED_BYTES) for kernel in kernels.values()])
        return {case: kernels[str(case)] for case in all_cases}

    def time(self, case: Case, kernel: jit.CompiledKernel) -> list[float]:
        """ns a step of each launch, the slowest rank's.

        Raises:
            KernelError: a launch failed on some rank, a wait ran out or a key was wrong; the same on every rank.
            WalkError: this rank's GPU, or another rank, is lost.
        """
        self._clear()
        error = None
        try:
            self._launch(case, kernel)
        except WalkError as refused:
            error = str(refused)
        cuda_call("cudaDeviceSynchronize")
        failure = ctypes.c_uint64()
        self._copy(ctypes.addressof(failure), self._own)
        if error is None and failure.value:
            code, row, step = failure.value & 0xFF, failure.value >> 8 & 0xFFFFFF, failure.value >> 32
            error = f"step {step}, row {row}: waited for {WAITS[code]}"
        everyone = self.group.all_gather_object((error, self.elapsed.tolist()))
        if any(one for one, _ in everyone):
            raise KernelError("; ".join(f"rank {rank}: {one}" for rank, (one, _) in enumerate(everyone) if one))
        return [max(ns) / STEPS for ns in zip(*(elapsed for _, elapsed in everyone), strict=True)]

    @property
    def _own(self) -> int:
        return self.buffer.addresses[self.group.rank]

    def _copy(self, destination: int, source: int) -> None:
        from cuda.bindings import runtime

        cuda_call("cudaMemcpy", destination, source, 8, runtime.cudaMemcpyKind.cudaMemcpyDefault)

    def _clear(self) -> None:
        """Of this rank's mailbox, while nobody runs."""
        self.group.barrier()
        cuda_call("cudaMemset", self._own, 0, MAILBOX_BYTES)
        cuda_call("cudaDeviceSynchronize")
        self.group.barrier()

    def _launch(self, case: Case, kernel: jit.CompiledKernel) -> None:
        from cuda.bindings import driver

        class Params(ctypes.Structure):
            _fields_ = [
                ("mailboxes", ctypes.c_uint64 * case.world),
                ("elapsed_ns", ctypes.c_uint64),
                ("first_step", ctypes.c_uint64),
                ("deadline_ns", ctypes.c_uint64),
                ("rank", ctypes.c_uint32),
                ("half", ctypes.c_uint32),
            ]

        alone = case.world == 1
        params = Params(rank=0 if alone else self.group.rank, deadline_ns=DEADLINE_NS)
        params.mailboxes[:] = [self._own] if alone else self.buffer.addresses
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function = kernel.load(SHARED_BYTES)
        config = launch_config(case.ctas, case.design.cluster)
        self.group.barrier()
        for launch in range(LAUNCHES):
            params.elapsed_ns = self.elapsed.data_ptr() + 8 * launch
            params.first_step = launch * (STEPS + WARMUP)
            params.half = launch % 2
            (status,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise KernelError(f"launch of {case.ctas} CTAs, clusters of {case.design.cluster}: {status.name}")


def detail(case: Case, passes: Sequence[Sequence[float]], error: str | None) -> dict[str, Any]:
    row = {"gpus": case.world, "rows": case.rows, "ctas": case.ctas, "error": error}
    if not passes:
        return row
    medians = [statistics.median(one) for one in passes]
    every = sorted(ns for one in passes for ns in one)
    return row | {
        "median_ns": statistics.median(every),
        "spread_ns": max(medians) - min(medians),
        "min_ns": every[0],
        "p90_ns": every[len(every) * 9 // 10],
    }


def table(details: Mapping[Case, Mapping[str, Any]]) -> ResultTable:
    """A line a design; all that was measured of it under the line's "cases"."""
    lines = []
    for one in DESIGNS:
        mine = {case: row for case, row in details.items() if case.design == one}
        cells = {
            f"{case.world}x{case.rows}": "failed" if row["error"] else row.get("median_ns")
            for case, row in mine.items()
        }
        lines.append(
            {
                "design": one.name,
                "macros": dict(one.macros),
                **cells,
                "spread_ns": max((row.get("spread_ns", 0.0) for row in mine.values()), default=None),
                "ctas": max((case.ctas for case in mine), default=None),
                "cases": list(mine.values()),
            }
        )
    shapes = dict.fromkeys((case.world, case.rows) for case in details)
    return ResultTable(
        title="Agreement of all CTAs on the largest key, ns a step",
        method=f"{STEPS} steps a launch after {WARMUP} untimed, by globaltimer; median of {LAUNCHES} launches in each "
        f"of {PASSES} passes over all designs, the slower rank's; spread: the most between the passes' medians. One "
        f"CTA of {THREADS} threads an SM, a warp a row; fewer CTAs where not all clusters fit at once. Every key "
        "verified.",
        environment=environment(),
        columns=[
            Column("design", "design"),
            *(
                Column(f"{gpus}x{rows}", f"{gpus} GPU{'s' * (gpus > 1)}, {rows} row{'s' * (rows > 1)}", 0)
                for gpus, rows in shapes
            ),
            Column("spread_ns", "spread", 0),
            Column("ctas", "CTAs a GPU"),
        ],
        rows=lines,
    )


def run(group: WalkGroup) -> ResultTable:
    arch = jit.default_arch()
    bench = Bench(group)
    all_cases = cases(sorted({1, group.world_size}), grids(group, arch))
    kernels = bench.compile(all_cases, arch)
    warm = torch.ones(8192, 8192, dtype=torch.bfloat16, device=group.device)
    for _ in range(200):  # the clocks rise
        warm @ warm
    passes: dict[Case, list[list[float]]] = {case: [] for case in all_cases}
    errors: dict[Case, str] = {}
    try:
        for case in all_cases * PASSES:
            if case in errors:
                continue
            try:
                passes[case].append(bench.time(case, kernels[case]))
            except KernelError as error:
                errors[case] = str(error)
                if group.rank == 0:
                    print(f"FAILED {case}: {error}", flush=True)
        bench.buffer.close()
    except WalkError as error:  # nothing more can be measured; what was is kept
        print(f"rank {group.rank} STOPPED at {case}: {error}", flush=True)
    return table({case: detail(case, passes[case], errors.get(case)) for case in all_cases})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="the JSON file to write")
    path = parser.parse_args(arguments).results
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 2:
        parser.error(f"designs are measured on one and two GPUs, not on {world}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context current, which the driver's calls need
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        measured = run(WalkGroup(dist.group.WORLD if world > 1 else None, device, timeout_s=120.0))
        if rank == 0:
            measured.write(path)
            print(measured.to_markdown())
        return 0
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

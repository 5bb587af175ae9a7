"""How long a block takes: the one stopwatch behind every figure of this project.

Each iteration, on a GPU: flush L2 by writing one buffer and then reading another, each larger than L2 (a write alone
leaves dirty lines behind, whose write-back the walk would pay for); hold every rank at a device-side gate; event, walk,
event, all enqueued before the gate opens. An iteration's time is that of the slowest rank. Candidates take turns, so
that a drift of clocks or of neighbours meets all of them alike.

csrc/gate.cu is the device half.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from tp_walk import jit
from tp_walk.errors import KernelError, WalkError, WalkTimeout
from tp_walk.group import WalkGroup
from tp_walk.mailbox import MAX_WORLD_SIZE, WORD_BYTES, MailboxLayout
from tp_walk.peer_memory import PeerBuffer, cuda_call
from tp_walk.status import status_defines

METHOD = (
    "Per iteration: L2 flushed by writing, then reading another 256 MB; all ranks held at a device-side gate; event, "
    "graph replay, event, enqueued before the gate opens. Times are medians over iterations of the slowest rank; "
    "candidates take turns."
)

# More than four times the L2 of any GPU up to Blackwell.
FLUSH_BYTES = 256 << 20

WARM_UP_ITERATIONS = 5

Candidate = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """A candidate's times in µs, each iteration counted as its slowest rank took it.

    median_us, p99_us; spread_us: from the first quartile to the third. iterations: how many were measured.
    """

    median_us: float
    p99_us: float
    spread_us: float
    iterations: int

    @classmethod
    def of(cls, samples: npt.NDArray[np.float64]) -> Timing:
        """samples: `[ranks, iterations]` µs."""
        slowest = samples.max(axis=0)
        first, median, third, p99 = np.percentile(slowest, [25, 50, 75, 99])
        return cls(float(median), float(p99), float(third - first), slowest.size)


class BlockTimer:
    """Times candidates against each other, on all ranks of a group together. Construction, `measure` and `close` are
    collectives.

    group: the ranks; its calls must not go through the GPU's stream (a gloo group doesn't). device: a CUDA device; on
    the CPU the ranks meet at a barrier of the group instead, for tests of what stands around the clock.
    gate_s: how long a GPU waits at the gate for its host and the other ranks before the measurement is given up.

    Raises:
        PlanUnavailableError: the ranks' GPUs can't map each other's memory. SetupError: any other failure of a rank.
    """

    def __init__(self, group: WalkGroup, device: torch.device, gate_s: float = 10.0) -> None:
        self._group = group
        self._device = device
        self._gate: _Gate | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Random, because memory that holds one value everywhere can be cheaper to move.
            self._written = torch.empty(FLUSH_BYTES // 4, device=device).uniform_()
            self._read = torch.empty(FLUSH_BYTES // 4, device=device).uniform_()
            self._sum = torch.empty((), device=device)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._gate = _Gate(group, device, gate_s)

    def measure(self, candidates: Mapping[str, Candidate], iterations: int = 200) -> dict[str, Timing]:
        """Times each candidate; arguments and errors as of `samples`."""
        samples = self.samples(candidates, iterations)
        return {name: Timing.of(times) for name, times in samples.items()}

    def samples(
        self, candidates: Mapping[str, Candidate], iterations: int, before: Callable[[int], object] | None = None
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Times each candidate: `[ranks, iterations]` µs.

        Args:
            candidates: name → what to time, given in the same order on every rank. On a GPU it enqueues work on the
                current stream and waits for nothing (`CapturedWork`); it has run before, so its code is loaded.
            iterations: of each candidate, after a few that don't count.
            before: enqueues, untimed, what iteration i is to work on; negative numbers are those that don't count.

        Raises:
            WalkError: a candidate failed, or a rank didn't come; alike on every rank.
        """

        def run() -> npt.NDArray[np.float64]:
            samples = np.empty((iterations, len(candidates)))
            numbered = list(enumerate(candidates.values()))
            for iteration in range(-WARM_UP_ITERATIONS, iterations):
                if before is not None:
                    with torch.cuda.stream(self._stream) if self._gate is not None else nullcontext():
                        before(iteration)
                first = iteration % len(numbered)
                for column, candidate in numbered[first:] + numbered[:first]:
                    elapsed_us = self._time(candidate)
                    if iteration >= 0:
                        samples[iteration, column] = elapsed_us
            return samples

        if not candidates:
            return {}
        self._group.barrier()
        samples = self._group.stage("timing", run)
        by_rank = np.stack(self._group.all_gather_object(samples))
        return {name: by_rank[:, :, column] for column, name in enumerate(candidates)}

    def empty_graph(self, threads: int) -> CapturedWork:
        """A graph of one kernel that does nothing: what launching a walk costs by itself. Cooperative, one CTA a SM,
        all of the shared memory that a CTA may have.

        threads: of a CTA.
        """
        if self._gate is None:
            raise WalkError(f"an empty graph needs a CUDA device, not {self._device}")
        from cuda.bindings.runtime import cudaDeviceAttr

        ctas, shared_bytes = (
            cuda_call("cudaDeviceGetAttribute", attribute, self._device.index)
            for attribute in (
                cudaDeviceAttr.cudaDevAttrMultiProcessorCount,
                cudaDeviceAttr.cudaDevAttrMaxSharedMemoryPerBlockOptin,
            )
        )
        launch = _Launch("empty", self._group.world_size, ctas, threads, None, shared_bytes)
        launch()
        return CapturedWork(launch)

    def close(self) -> None:
        """Idempotent."""
        if self._gate is not None:
            self._gate.close()

    def __enter__(self) -> BlockTimer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _time(self, candidate: Candidate) -> float:
        """µs of one run on this rank."""
        if self._gate is None:
            self._group.barrier()
            started = time.perf_counter()
            candidate()
            return (time.perf_counter() - started) * 1e6
        start, stop = self._events
        with torch.cuda.stream(self._stream):
            self._written.fill_(1.0)
            torch.sum(self._read, dim=0, out=self._sum)
            self._gate.enqueue()
            try:
                start.record()
                candidate()
                stop.record()
            finally:
                self._gate.open()
        stop.synchronize()
        self._gate.check()
        return float(start.elapsed_time(stop)) * 1e3


class CapturedWork:
    """`work`, which has run before, as a CUDA graph. A call launches it on the current stream.

    torch's own `replay` fills the seed and the offset of its generator first, by two more launches, whether the graph
    draws random numbers or not: they would stand between the events. Launched past it, a graph that draws from torch's
    generator draws the same each time.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._work = work  # holds the tensors that the graph reads and writes
        torch.cuda.synchronize()
        # By hand: torch.cuda.graph empties the allocator's cache first, and hundreds of graphs are made here.
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            # thread_local: NCCL's own threads may go on with their calls.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                self._graph.capture_end()
        self._executable = self._graph.raw_cuda_graph_exec()

    def __call__(self) -> None:
        cuda_call("cudaGraphLaunch", self._executable, torch.cuda.current_stream().cuda_stream)


class GateParams(ctypes.Structure):
    """Field for field `tpw::Gate` of csrc/gate.cu, which says what each one means."""

    _fields_ = [
        ("arrivals", ctypes.c_void_p * MAX_WORLD_SIZE),
        ("host", ctypes.c_void_p),
        ("pass_number", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
    ]


def gate_macros(world_size: int) -> dict[str, int]:
    """What csrc/gate.cu is compiled with."""
    macros = MailboxLayout(world_size, 1, 1).defines() | status_defines()
    return macros | {"TPW_GATE_RANKS": MAX_WORLD_SIZE, "TPW_GATE_BYTES": ctypes.sizeof(GateParams)}


class _Gate:
    """The device-side gate, and the two words of mapped host memory that it shares with this process."""

    def __init__(self, group: WalkGroup, device: torch.device, deadline_s: float) -> None:
        self._rank, self._world_size = group.rank, group.world_size
        self._params = params = GateParams()
        self._launch = group.stage(
            "loading of the gate", lambda: _Launch("gate", group.world_size, 1, group.world_size, params)
        )
        # Pinned memory is mapped, under the same address, wherever there is unified addressing.
        self._words = group.stage("allocation of the gate", lambda: torch.zeros(2, dtype=torch.int64, pin_memory=True))
        self._go = ctypes.c_uint64.from_address(self._words.data_ptr())
        self._missing = ctypes.c_uint64.from_address(self._words.data_ptr() + 8)
        self._arrivals = PeerBuffer(group, group.world_size * WORD_BYTES, device)
        for rank, address in enumerate(self._arrivals.addresses):
            params.arrivals[rank] = address
        params.host = self._words.data_ptr()
        params.deadline_ns = int(deadline_s * 1e9)
        params.rank = group.rank
        self._deadline_s = deadline_s

    def enqueue(self) -> None:
        """Puts the gate on the current stream."""
        self._params.pass_number += 1
        self._launch()

    def open(self) -> None:
        """This rank's host has enqueued what stands behind the gate."""
        self._go.value = self._params.pass_number

    def check(self) -> None:
        """Raises WalkTimeout if a gate, complete by now, gave up."""
        missing = self._missing.value
        if missing:
            who = "this rank's host" if missing > self._world_size else f"the GPU of rank {missing - 1}"
            raise WalkTimeout(f"rank {self._rank} stood at the timing gate for {self._deadline_s} s: {who} didn't come")

    def close(self) -> None:
        self._arrivals.close()


class _Launch:
    """A kernel of csrc/gate.cu, loaded, with its launch configuration. A call enqueues it on the current stream."""

    def __init__(
        self,
        entry: str,
        world_size: int,
        grid: int,
        threads: int,
        arguments: ctypes.Structure | None = None,
        shared_bytes: int = 0,
    ) -> None:
        from cuda.bindings import driver

        self._arguments = arguments  # kept alive: a launch reads them by address
        self._driver = driver
        self._function = jit.compile_kernel("gate.cu", entry, gate_macros(world_size)).load(shared_bytes)
        # Cooperative, as the walk's own launches are: they take another path through the driver.
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.attrs, config.numAttrs = [cooperative], 1
        self._config = config
        self._pointers = (ctypes.c_void_p * 1)(None if arguments is None else ctypes.addressof(arguments))

    def __call__(self) -> None:
        self._config.hStream = torch.cuda.current_stream().cuda_stream
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(self._pointers), 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"launching a kernel of gate.cu failed: {status.name}")

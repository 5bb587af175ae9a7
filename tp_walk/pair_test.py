"""Self-test of the path between each pair of GPUs, before first use: the host half of csrc/pair_test.cu.

Each rank meets every other one, disjoint pairs at a time. A pair exchanges `PATTERNS` words each way with the stores
and loads that walks use, and a few thousand hops are timed. What passed isn't tested again until the host boots, or the
driver or the kernel changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tp_walk import jit
from tp_walk.config import settings
from tp_walk.errors import KernelError, PlanUnavailableError, WalkError
from tp_walk.files import write_whole
from tp_walk.group import WalkGroup
from tp_walk.mailbox import WORD_BYTES, MailboxLayout
from tp_walk.peer_memory import PeerBuffer
from tp_walk.status import status_defines
from tp_walk.topology import Topology

LANES = 1024
ROUNDS = 1024
PATTERNS = LANES * ROUNDS
HOPS = 4096
WARM_UP_HOPS = 512  # the first rounds hold the skew of the two launches, and clocks that are still low

# Both ranks leave a barrier at the same time: what remains is the skew of their hosts.
LIMIT_S = 10.0

_REGION_BYTES = 2 * LANES * WORD_BYTES


class PairReport(ctypes.Structure):
    """Field for field `tpw::PairReport`."""

    _fields_ = [
        ("code", ctypes.c_uint32),
        ("lane", ctypes.c_uint32),
        ("round", ctypes.c_uint32),
        ("claimed", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("verified", ctypes.c_uint64),
        ("elapsed_ns", ctypes.c_uint64),
        ("elapsed_cycles", ctypes.c_uint64),
    ]

    def failure(self, patterns: int) -> str | None:
        """What went wrong in an exchange of `patterns` words, in words."""
        where = f"in lane {self.lane}, round {self.round}: {self.key:#018x} {self.tag:#018x}"
        if self.code:
            return {
                1: f"a store didn't arrive in time; last seen {where}",
                2: f"a 16-byte store arrived in pieces {where}",
                3: f"a word came out of order {where}",
            }[self.code]
        return None if self.verified == patterns else f"{self.verified} of {patterns} words were verified"


@dataclass(frozen=True)
class PairResult:
    """The path to and from `peer`. hop_p50_us, hop_p99_us, hop_max_us: one way, store to seen, µs. patterns: words
    verified.
    """

    peer: int
    hop_p50_us: float
    hop_p99_us: float
    hop_max_us: float
    patterns: int


def macros() -> dict[str, int]:
    """What csrc/pair_test.cu is compiled with: the same for every runtime."""
    layout = MailboxLayout(world_size=2, max_batch=1, num_ctas=1)
    return (
        layout.defines()
        | status_defines()
        | {
            "TPW_PAIR_REPORT_BYTES": ctypes.sizeof(PairReport),
            "TPW_PAIR_WARM_UP": WARM_UP_HOPS,
        }
    )


def check_pairs(group: WalkGroup, topology: Topology, device: torch.device, *, again: bool = False) -> list[PairResult]:
    """Tests this rank's paths to all others; one result a peer on another GPU. Collective.

    again: test even what has passed before.

    Raises:
        PlanUnavailableError: a path failed; the message names it. The same on every rank. Else as PeerBuffer does.
    """
    if group.world_size == 1:
        return []
    kernel = group.stage(
        "compilation of the pair self-test", lambda: jit.compile_kernel("pair_test.cu", "pair_test", macros())
    )
    own = topology.gpus[group.rank]
    # Ranks that share a GPU, as tests may, take turns on it: there is no path, and an exchange would take for ever.
    peers = [rank for rank, gpu in enumerate(topology.gpus) if gpu.uuid != own.uuid]
    entries = {peer: _cache_path(topology, group.rank, peer, kernel.cubin) for peer in peers}
    known = None if again else _read_cached(entries)
    if all(results is not None for results in group.all_gather_object(known)) and known is not None:
        return known
    buffer = PeerBuffer(group, 2 * group.world_size * _REGION_BYTES, device)
    try:
        results = _meet(group, topology, device, kernel, buffer, peers)
    except WalkError as error:
        buffer.close_after(error)
        raise
    buffer.close()
    for result in results:
        _write_cached(entries[result.peer], result)
    return sorted(results, key=lambda result: result.peer)


def _meet(
    group: WalkGroup,
    topology: Topology,
    device: torch.device,
    kernel: jit.CompiledKernel,
    buffer: PeerBuffer,
    peers: list[int],
) -> list[PairResult]:
    """In meeting m ranks a and a ^ m test their path: each pair meets once, and the pairs of a meeting are disjoint."""
    function = group.stage("loading of the pair self-test", lambda: _load(kernel, device))
    results = []
    for meeting in range(1, 1 << (group.world_size - 1).bit_length()):
        peer = group.rank ^ meeting
        group.barrier()
        test = functools.partial(_test, function, group, topology, device, buffer, peer)
        tested = group.stage("pair self-test", test if peer in peers else lambda: None)
        if tested is not None:
            results.append(tested)
    return results


def _load(kernel: jit.CompiledKernel, device: torch.device) -> Any:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context, where nothing has yet
        return kernel.load()


def _test(
    function: Any, group: WalkGroup, topology: Topology, device: torch.device, buffer: PeerBuffer, peer: int
) -> PairResult:
    timed, arrivals = _exchange(function, group, device, buffer, peer, region=0, lanes=1, rounds=HOPS)
    failure = timed.failure(HOPS)
    if failure is None:
        report, _ = _exchange(function, group, device, buffer, peer, region=1, lanes=LANES, rounds=ROUNDS)
        failure = report.failure(PATTERNS)
    if failure is not None:
        raise PlanUnavailableError(
            f"the path from rank {peer} ({topology.gpus[peer]}) to rank {group.rank} ({topology.gpus[group.rank]}, "
            f"{topology.links[peer]}) can't be trusted: {failure}"
        )
    us_per_cycle = timed.elapsed_ns / timed.elapsed_cycles / 1e3
    steady = arrivals[WARM_UP_HOPS:]
    # Half a round trip: the ranks' own phases drop out of it. The clock's lower 32 bits may wrap in between.
    hops = [((after - before) % (1 << 32)) / 2 for before, after in zip(steady, steady[2:], strict=False)]
    percentiles = statistics.quantiles(hops, n=100, method="inclusive")
    p50, p99, longest = (cycles * us_per_cycle for cycles in (percentiles[49], percentiles[98], max(hops)))
    return PairResult(peer, p50, p99, longest, PATTERNS)


def _exchange(
    function: Any,
    group: WalkGroup,
    device: torch.device,
    buffer: PeerBuffer,
    peer: int,
    *,
    region: int,
    lanes: int,
    rounds: int,
) -> tuple[PairReport, list[int]]:
    """One launch: what it reported, and lane 0's clock at the end of each round."""
    from cuda.bindings import driver

    def words(owner: int, source: int) -> int:
        return buffer.addresses[owner] + (region * group.world_size + source) * _REGION_BYTES

    with torch.cuda.device(device):
        report = torch.zeros(ctypes.sizeof(PairReport), dtype=torch.uint8, device=device)
        arrivals = torch.zeros(rounds, dtype=torch.int32, device=device)
        arguments = (
            (words(group.rank, peer), ctypes.c_void_p),
            (words(peer, group.rank), ctypes.c_void_p),
            (report.data_ptr(), ctypes.c_void_p),
            (arrivals.data_ptr(), ctypes.c_void_p),
            (rounds, ctypes.c_uint32),
            (int(group.rank > peer), ctypes.c_uint32),
            # The vote on the outcome must fit into the same deadline.
            (int(min(LIMIT_S, group.timeout_s / 4) * 1e9), ctypes.c_uint64),
        )
        stream = torch.cuda.current_stream().cuda_stream
        values, types = zip(*arguments, strict=True)
        (status,) = driver.cuLaunchKernel(function, 1, 1, 1, lanes, 1, 1, 0, stream, (values, types), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"launching the pair self-test failed: {status.name}")
        return PairReport.from_buffer_copy(report.cpu().numpy().tobytes()), arrivals.tolist()


# ---- what has passed -------------------------------------------------------------------------------------------------


def _cache_path(topology: Topology, rank: int, peer: int, cubin: bytes) -> Path:
    own, other = topology.gpus[rank], topology.gpus[peer]
    tested = repr((own.uuid, other.uuid, own.driver, own.host, hashlib.sha256(cubin).hexdigest()))
    return settings().cache_dir / f"pair-{hashlib.sha256(tested.encode()).hexdigest()[:32]}.json"


def _read_cached(entries: dict[int, Path]) -> list[PairResult] | None:
    """Every peer's result, or None when one is missing."""
    results = []
    for peer, path in entries.items():
        try:
            results.append(PairResult(**(json.loads(path.read_text()) | {"peer": peer})))
        except (OSError, ValueError, TypeError):
            return None
    return results


def _write_cached(path: Path, result: PairResult) -> None:
    # A home that can't be written to costs a test at each start, no more.
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(asdict(result)).encode())

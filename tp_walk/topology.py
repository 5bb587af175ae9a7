"""Which GPU each rank has, how they are linked, and why they may not be able to exchange tokens.

GPUs are compared by UUID: ordinals depend on each process's CUDA_VISIBLE_DEVICES. NVML sees all GPUs of the host
whatever that says; where it doesn't (a container that was given one GPU), links stay unknown and set-up finds out by
trying.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tp_walk.config import settings
from tp_walk.errors import PlanUnavailableError
from tp_walk.group import WalkGroup

# A GPU that does no more than that is called idle; NVML averages over up to a second.
_IDLE_PERCENT = 10

# nvmlGpuP2PStatus_t, but for OK and unknown. Some of its names are spelt differently from one pynvml to the next.
_P2P_OBSTACLES = {
    1: "the chipset doesn't support it",
    2: "a GPU doesn't support it",
    3: "no path between their PCIe roots",
    4: "disabled in the driver's settings",
    5: "not supported",
}


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU. uuid: as CUDA gives it, without prefix. host: see `host_identity`. driver: its version."""

    uuid: str
    name: str
    host: str
    is_mig: bool
    driver: str

    def __str__(self) -> str:
        return f"{self.name} {self.uuid[:8]}"


@dataclass(frozen=True)
class Link:
    """How two GPUs reach each other. kind: "NVLink", "PCIe", "same GPU" or "unknown". lanes: NVLinks that are up.

    obstacle: why peer access is impossible, or None when NVML knows of no reason.
    """

    kind: str
    lanes: int = 0
    obstacle: str | None = None

    def __str__(self) -> str:
        text = f"{self.kind} x{self.lanes}" if self.lanes else self.kind
        return f"{text}, no peer access: {self.obstacle}" if self.obstacle else text


def host_identity() -> str:
    """The same in all containers of a host, and no other host's: the boot's id where there is one."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return boot_id.read_text().strip()
    return platform.node()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml between init and shutdown, or None where NVML can't be had."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver: all mean the same here
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str) -> tuple[Any, bool]:
    """NVML's handle of the GPU that CUDA calls `uuid`, and whether it is a MIG instance. (None, False): not visible."""
    for prefix, is_mig in (("GPU-", False), ("MIG-", True)):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid), is_mig
    return None, False


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a torch device."""
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    with _nvml() as nvml:
        is_mig, driver = False, "unknown"
        if nvml is not None:
            driver = nvml.nvmlSystemGetDriverVersion()
            handle, is_mig = _handle(nvml, uuid)
            if handle is not None and not is_mig:
                with contextlib.suppress(nvml.NVMLError):  # GPUs that know no MIG refuse the question
                    is_mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Gpu(uuid, properties.name, host_identity(), is_mig, driver)


def other_use(gpu: Gpu) -> str | None:
    """What else is going on on a GPU, in words, as far as NVML can tell; None when nothing is."""
    with _nvml() as nvml:
        handle = None if nvml is None else _handle(nvml, gpu.uuid)[0]
        if nvml is None or handle is None:
            return None
        processes, percent = [], 0
        with contextlib.suppress(nvml.NVMLError):
            processes = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid != os.getpid()]
        with contextlib.suppress(nvml.NVMLError):
            percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    if processes:
        return f"processes {', '.join(map(str, processes))} run on it"
    return f"it is {percent} % busy" if percent > _IDLE_PERCENT else None


def link_between(own: Gpu, peer: Gpu) -> Link:
    """The link of two GPUs of this host, as NVML knows it."""
    if own.uuid == peer.uuid:
        return Link("same GPU")
    with _nvml() as nvml:
        if nvml is None:
            return Link("unknown")
        (first, _), (second, _) = _handle(nvml, own.uuid), _handle(nvml, peer.uuid)
        if first is None or second is None:
            return Link("unknown")
        lanes = _nvlinks(nvml, first, second)
        kind = "NVLink" if lanes else "PCIe"
        return Link(kind, lanes, _obstacle(nvml, first, second))


def _nvlinks(nvml: Any, first: Any, second: Any) -> int:
    """NVLinks of `first` that lead to `second`, straight or through NVSwitch."""
    target = nvml.nvmlDeviceGetPciInfo(second).busId
    behind_switch = "switch" in _remotes(nvml, second)
    return sum(remote == target or (remote == "switch" and behind_switch) for remote in _remotes(nvml, first))


def _remotes(nvml: Any, handle: Any) -> list[str]:
    """What is at the other end of each NVLink that is up: "switch", or a PCI bus id."""
    remotes = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):  # a link that this GPU doesn't have
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                is_switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                remotes.append("switch" if is_switch else nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    return remotes


def _obstacle(nvml: Any, first: Any, second: Any) -> str | None:
    """Why `first` can't write to the memory of `second`, or None where NVML knows of no reason."""
    with contextlib.suppress(nvml.NVMLError):
        status = nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_WRITE)
        return _P2P_OBSTACLES.get(status)
    return None


def refusal(gpus: Sequence[Gpu], links: dict[tuple[int, int], Link], *, ranks_per_gpu: int = 1) -> str | None:
    """Why these ranks can't exchange tokens through each other's memory, or None.

    gpus: each rank's, in rank order. links: those known, by pair of ranks. ranks_per_gpu: how many may share a GPU,
    more than one in tests alone.
    """
    for rank, gpu in enumerate(gpus):
        if gpu.host != gpus[0].host:
            return f"ranks 0 and {rank} are on different hosts; peer-mapped mailboxes need one host"
        if gpu.is_mig and len(gpus) > 1:
            return f"rank {rank} runs on a MIG instance ({gpu}), which has no peer access"
    for rank, gpu in enumerate(gpus):
        sharers = [other for other in range(rank) if gpus[other].uuid == gpu.uuid]
        if len(sharers) >= ranks_per_gpu:
            return f"ranks {', '.join(map(str, sharers))} and {rank} share one GPU ({gpu}); give each rank its own"
        for other in range(rank):
            link = links.get((other, rank)) or links.get((rank, other))
            if link is not None and link.obstacle is not None:
                return f"ranks {other} and {rank} ({gpus[other]}, {gpu}) have no peer access: {link.obstacle}"
    return None


@dataclass(frozen=True)
class Topology:
    """Every rank's GPU, and this rank's link to each (its own included)."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]


def survey(group: WalkGroup, device: torch.device) -> Topology:
    """Every rank's GPU and this rank's links, if the ranks can exchange tokens. Collective.

    Raises:
        PlanUnavailableError: they can't; the message says why. The same on every rank.
    """
    own = group.stage("look at the GPU", lambda: gpu_of(device))
    gpus = group.all_gather_object(own)
    links = tuple(link_between(own, peer) if peer.host == own.host else Link("unknown") for peer in gpus)

    def judge() -> None:
        pairs = {(group.rank, peer): link for peer, link in enumerate(links)}
        reason = refusal(gpus, pairs, ranks_per_gpu=settings().test_ranks_per_gpu)
        if reason is not None:
            raise PlanUnavailableError(reason)

    group.stage("check of the links between GPUs", judge)
    return Topology(tuple(gpus), links)

"""Why ranks may not exchange tokens, and how links are told from what NVML says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tp_walk import topology
from tp_walk.topology import Gpu, Link, host_identity, link_between, refusal

FIRST = Gpu("11111111-0000", "NVIDIA H200", "host-a", False, "580.159")
SECOND = replace(FIRST, uuid="22222222-0000")
GOOD = {(0, 1): Link("NVLink", 18)}


def test_two_gpus_of_a_host_are_accepted() -> None:
    assert refusal([FIRST, SECOND], GOOD) is None
    assert refusal([FIRST, SECOND], {}) is None, "an unknown link is tried"
    assert refusal([FIRST], {}) is None


@pytest.mark.parametrize(
    ("gpus", "links", "reason"),
    [
        ([FIRST, replace(SECOND, host="host-b")], GOOD, "ranks 0 and 1 are on different hosts"),
        ([FIRST, replace(SECOND, is_mig=True)], GOOD, "rank 1 runs on a MIG instance"),
        ([FIRST, FIRST], {}, "ranks 0 and 1 share one GPU"),
        ([FIRST, SECOND], {(0, 1): Link("PCIe", obstacle="not supported")}, "no peer access: not supported"),
        ([FIRST, SECOND], {(1, 0): Link("PCIe", obstacle="not supported")}, "no peer access: not supported"),
    ],
)
def test_refusals_have_reasons(gpus: list[Gpu], links: dict[tuple[int, int], Link], reason: str) -> None:
    told = refusal(gpus, links)
    assert told is not None
    assert reason in told


def test_tests_may_share_a_gpu() -> None:
    assert refusal([FIRST, SECOND, FIRST, SECOND], {(0, 2): Link("same GPU")}, ranks_per_gpu=2) is None
    told = refusal([FIRST, SECOND, FIRST, FIRST], {}, ranks_per_gpu=2)
    assert told is not None
    assert "ranks 0, 2 and 3 share one GPU" in told


def test_the_host_is_the_same_each_time() -> None:
    assert host_identity() == host_identity() != ""


# ---- NVML ------------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """Two GPUs. remotes: what each NVLink of a UUID leads to, "switch" or a bus id. p2p: the status that it answers."""

    remotes: dict[str, list[str]] = field(default_factory=dict)
    p2p: int | None = 0
    visible: tuple[str, ...] = (FIRST.uuid, SECOND.uuid)

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_P2P_CAPS_INDEX_WRITE = 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid.removeprefix("GPU-") not in self.visible:
            raise NVMLError("not found")
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=f"bus of {handle}")

    def _remote(self, handle: str, link: int) -> str:
        remotes = self.remotes.get(handle, [])
        if link >= len(remotes):
            raise NVMLError("no such link")
        return remotes[link]

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        return int(self._remote(handle, link) != "down")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return 2 if self._remote(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:
        return SimpleNamespace(busId=self._remote(handle, link))

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, index: int) -> int:
        if self.p2p is None:
            raise NVMLError("not supported")
        return self.p2p


TO_SECOND = f"bus of {SECOND.uuid}"


@pytest.mark.parametrize(
    ("nvml", "link"),
    [
        (FakeNvml({FIRST.uuid: ["switch"] * 18, SECOND.uuid: ["switch"] * 18}), Link("NVLink", 18)),
        (FakeNvml({FIRST.uuid: ["switch"] * 18}), Link("PCIe")),
        (FakeNvml({FIRST.uuid: [TO_SECOND, "bus of a third", TO_SECOND, "down"]}), Link("NVLink", 2)),
        (FakeNvml(), Link("PCIe")),
        (FakeNvml(p2p=None), Link("PCIe")),
        (FakeNvml(p2p=1), Link("PCIe", obstacle="the chipset doesn't support it")),
        (FakeNvml(visible=(FIRST.uuid,)), Link("unknown")),
        (None, Link("unknown")),
    ],
    ids=str,
)
def test_links(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, link: Link) -> None:
    @contextlib.contextmanager
    def fake() -> Iterator[FakeNvml | None]:
        yield nvml

    monkeypatch.setattr(topology, "_nvml", fake)
    assert link_between(FIRST, SECOND) == link
    assert link_between(FIRST, FIRST) == Link("same GPU")


def test_links_in_words() -> None:
    assert str(Link("NVLink", 18)) == "NVLink x18"
    assert str(Link("PCIe", obstacle="not supported")) == "PCIe, no peer access: not supported"

"""Launches on several streams wait for each other, those on one stream don't, and captures are left alone."""

from __future__ import annotations

import pytest
import torch

from tp_walk.launch_order import LaunchOrder


class Event:
    """Remembers after which stream it was recorded last."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream | None] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.stream)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a capture is under way: its last element says."""
    under_way = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: under_way[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return under_way


def launch(order: LaunchOrder, stream: Stream) -> list[Stream | None]:
    """What this launch waited for."""
    stream.waited_for.clear()
    order.before(stream)
    order.after(stream)
    return stream.waited_for


def test_only_a_change_of_streams_waits(captures: list[bool]) -> None:
    order, first, second = LaunchOrder(), Stream(), Stream()
    assert launch(order, first) == []
    assert launch(order, first) == []
    assert launch(order, second) == [first]
    assert launch(order, second) == []
    assert launch(order, first) == [second]


def test_a_capture_neither_waits_nor_counts(captures: list[bool]) -> None:
    order, first, captured, second = LaunchOrder(), Stream(), Stream(), Stream()
    launch(order, first)
    captures.append(True)
    assert launch(order, captured) == []
    captures.append(False)
    assert launch(order, second) == [first]

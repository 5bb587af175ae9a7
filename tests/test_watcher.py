"""The thread that reports failures: once each, whatever the callback does, and no longer than it is wanted."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable

import pytest

from tp_walk import watcher
from tp_walk.errors import WalkTimeout
from tp_walk.watcher import Watcher

# Far above what a look takes: a test that waits so long has failed.
LIMIT_S = 20.0


class Walks:
    """Something that can fail; counts the looks at it."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.failure is not None:
            raise WalkTimeout(self.failure)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "LOOK_S", 0.001)


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def looks_on(walks: Walks, count: int = 3) -> None:
    """Returns after `count` more looks."""
    until = walks.looks + count
    wait_for(lambda: walks.looks >= until)


def threads() -> int:
    return sum(thread.name == "tp_walk watcher" for thread in threading.enumerate())


def test_each_failure_is_told_once() -> None:
    walks, told = Walks(), queue.Queue()
    watch = Watcher(walks.check, told.put)
    looks_on(walks)
    walks.failure = "first"
    assert str(told.get(timeout=LIMIT_S)) == "first"
    looks_on(walks)
    walks.failure = None
    looks_on(walks)
    walks.failure = "second"
    assert str(told.get(timeout=LIMIT_S)) == "second"
    looks_on(walks)
    watch.stop()
    assert told.empty()


def test_a_callback_that_raises_is_logged_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    walks = Walks()
    watch = Watcher(walks.check, lambda error: 1 / 0)
    walks.failure = "lost rank 3"
    looks_on(walks)
    walks.failure = None
    looks_on(walks)
    walks.failure = "lost rank 4"
    looks_on(walks)
    watch.stop()
    assert [record.getMessage() for record in caplog.records] == [
        f"on_poison raised while it was told of: lost rank {rank}" for rank in (3, 4)
    ]


def test_no_look_after_stop() -> None:
    walks = Walks()
    watch = Watcher(walks.check, lambda error: None)
    looks_on(walks)
    watch.stop()
    watch.stop()
    looks = walks.looks
    wait_for(lambda: threads() == 0)
    assert walks.looks == looks


def test_the_callback_may_stop_the_watch() -> None:
    walks, stopped = Walks(), threading.Event()

    def stop(error: Exception) -> None:
        watch.stop()
        stopped.set()

    watch = Watcher(walks.check, stop)
    walks.failure = "over"
    assert stopped.wait(LIMIT_S)
    wait_for(lambda: threads() == 0)


def test_a_callback_that_hangs_holds_up_nobody() -> None:
    walks, called, release = Walks(), threading.Event(), threading.Event()

    def hang(error: Exception) -> None:
        called.set()
        release.wait(LIMIT_S)

    watch = Watcher(walks.check, hang)
    walks.failure = "anything"
    assert called.wait(LIMIT_S)
    watch.stop()  # returns
    release.set()
    wait_for(lambda: threads() == 0)


def test_the_thread_ends_with_what_it_watches() -> None:
    walks = Walks()
    Watcher(walks.check, lambda error: None)
    looks_on(walks)
    del walks
    gc.collect()
    wait_for(lambda: threads() == 0)

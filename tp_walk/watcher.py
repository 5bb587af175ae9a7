"""A host thread that tells of a failed walk where no Python call could: a replayed graph runs none."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tp_walk.errors import WalkError

logger = logging.getLogger(__name__)

# A look is a read of 64 bytes of host memory. Engines act on a failure within seconds; this is far below that.
LOOK_S = 0.02


class Watcher:
    """Calls `on_poison(error)` from a thread of its own, once for each failure that `check` raises.

    check: a bound method that raises WalkError from the time that a walk fails until a reset, and never waits. Its
        object isn't kept alive: the thread ends with it.
    on_poison: what it raises is logged. It may call `stop`.
    """

    def __init__(self, check: Callable[[], None], on_poison: Callable[[Exception], None]) -> None:
        self._check: weakref.WeakMethod[Any] = weakref.WeakMethod(check)
        self._on_poison = on_poison
        self._stopped = threading.Event()
        self._looking = threading.Lock()
        threading.Thread(target=self._watch, name="tp_walk watcher", daemon=True).start()

    def stop(self) -> None:
        """No look begins after this; a call of on_poison that is under way isn't waited for. Idempotent."""
        self._stopped.set()
        with self._looking:
            pass

    def _watch(self) -> None:
        told = False
        while not self._stopped.wait(LOOK_S):
            with self._looking:
                check = self._check()
                if check is None or self._stopped.is_set():
                    return
                error = _failure(check)
                del check
            if error is not None and not told:
                self._tell(error)
            told = error is not None

    def _tell(self, error: WalkError) -> None:
        try:
            self._on_poison(error)
        except Exception:
            logger.exception("on_poison raised while it was told of: %s", error)


def _failure(check: Callable[[], None]) -> WalkError | None:
    try:
        check()
    except WalkError as error:
        return error
    return None

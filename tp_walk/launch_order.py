"""One walk in flight on a GPU at a time, whatever runtime it is of and whatever stream it is launched on."""

from __future__ import annotations

from functools import cache

import torch


class LaunchOrder:
    """Makes each launch wait for the one before it, where that was on another stream.

    Two walks of one runtime at once would share mailboxes and block number. Those of two runtimes could start in
    another order on another rank: each GPU, full of the CTAs of one, would wait for the other's. What a graph captures
    can't wait for anything outside of it: the order of replays is up to the caller.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._launched: torch.cuda.Event | None = None

    def before(self, stream: torch.cuda.Stream) -> None:
        """To be called before a launch on the current device's `stream`."""
        if self._launched is not None and stream != self._last and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._launched)

    def after(self, stream: torch.cuda.Stream) -> None:
        """To be called after it."""
        if torch.cuda.is_current_stream_capturing():
            return
        # At every launch: when the next one comes, this stream may capture a graph, or be gone.
        if self._launched is None:
            self._launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._launched.record(stream)
        self._last = stream


@cache
def launch_order(device: torch.device) -> LaunchOrder:
    """The order of this process's walks on a GPU."""
    return LaunchOrder()

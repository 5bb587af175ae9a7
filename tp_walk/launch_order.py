"""One walk of a runtime in flight at a time, whatever streams they are launched on."""

from __future__ import annotations

import torch


class LaunchOrder:
    """Makes each launch wait for the one before it, where that was on another stream.

    Two walks at once would share mailboxes and block number. What a graph captures can't wait for anything outside of
    it: two graphs that are replayed at once, or one beside an eager walk, are found out on the device.
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

"""SIGTERM and Ctrl-C: asked once, the run stops in order; asked twice by Ctrl-C, at once."""

import os
import signal
import sys
from types import FrameType


class StopRequest:
    """A flag that signals set. Install it before anything slow is imported."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    def install(self) -> None:
        """Take over SIGTERM and SIGINT (main thread alone)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            os.write(2, b"\nended at once; the last checkpoint stands\n")
            os._exit(128 + signal.SIGINT)
        self._signal = signal.Signals(number)
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping after this micro-step; Ctrl-C again ends at once\n")

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """``SIGTERM`` or ``Ctrl-C``."""
        return "Ctrl-C" if self._signal == signal.SIGINT else "SIGTERM"


class RankStopRequest(StopRequest):
    """The same for a rank, whose launcher passes the request on.

    A terminal's Ctrl-C reaches rank and launcher alike, so a second one is no reason to end at
    once; the launcher's death, told by SIGINT too, is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launcher = os.getppid()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._launcher:
            os._exit(128 + signal.SIGINT)
        self._signal = signal.Signals(number)

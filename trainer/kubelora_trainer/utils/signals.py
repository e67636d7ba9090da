"""SIGTERM and Ctrl-C: asked once, the run stops in order; asked twice by Ctrl-C, at once.

While nothing is to be saved (a download, a model being read) there is no good moment to wait for,
so there the first signal already ends what is going on.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from kubelora_api.names import ExitCode
from kubelora_trainer.utils.errors import InterruptedRunError

ENDED_AT_ONCE: Final = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, as a shell tells it."""
PATIENCE_SECONDS: Final = 10.0
"""How long a library may cling to its work after `at_once`, such as a download's threads."""
_SHOW_CURSOR: Final = b"\x1b[?25h"


class _Stopped(KeyboardInterrupt):
    """Leaves a library's code from within: no `except Exception` on the way may swallow it."""


class StopRequest:
    """A flag that signals set. Install it before anything slow is imported."""

    def __init__(self, exit_process: Callable[[int], object] = os._exit) -> None:
        self._exit = exit_process
        self._signal: signal.Signals | None = None
        self._saved_step: int | None = None
        self._doing: str | None = None

    def install(self) -> None:
        """Take over SIGTERM and SIGINT (main thread alone)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def saved(self, step: int) -> None:
        """Note the newest checkpoint, for the sentence of an end without another one."""
        self._saved_step = step

    @contextmanager
    def at_once(self, doing: str) -> Iterator[None]:
        """A time when nothing is to be saved: a signal ends it wherever it is.

        doing: what goes on, for the sentence, such as "while the model was read".
        Raises InterruptedRunError.
        """
        self._doing = doing
        try:
            if self.requested:
                raise _Stopped
            yield
            self._doing = None  # here, so that a signal on the way out is no stray exception
        except _Stopped:
            raise InterruptedRunError(self._sentence(doing)) from None
        finally:
            self._doing = None

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """``SIGTERM`` or ``Ctrl-C``."""
        return "Ctrl-C" if self._signal == signal.SIGINT else "SIGTERM"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            self._end_now(self._loss(), ENDED_AT_ONCE)
            return
        self._signal = signal.Signals(number)
        if self._doing is not None:
            self._lose_patience(self._sentence(self._doing))
            raise _Stopped
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping as soon as a checkpoint is saved; Ctrl-C again ends at once\n")

    def _lose_patience(self, sentence: str) -> None:
        """End the process later, should the work not let go of the main thread."""

        def end() -> None:
            if self._doing is not None:
                self._end_now(f"error: {sentence}", ExitCode.INTERRUPTED)

        timer = threading.Timer(PATIENCE_SECONDS, end)
        timer.daemon = True
        timer.start()

    def _end_now(self, sentence: str, code: int) -> None:
        """Leave without any clean-up but the terminal's cursor, which a progress bar hides."""
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"\n{sentence}\n".encode())
        self._exit(code)

    def _sentence(self, doing: str) -> str:
        return (
            f"stopped by {self.name} {doing}; nothing had been trained since the start, so nothing "
            "is lost: run it again to go on"
        )

    def _loss(self) -> str:
        if self._saved_step is None:
            return (
                "ended at once: no checkpoint was saved since the start, so the same command "
                "begins where this one did"
            )
        return (
            f"ended at once: no checkpoint was saved since step {self._saved_step}, from which "
            "the same command goes on"
        )


class RankStopRequest(StopRequest):
    """The same for a rank, whose launcher passes the request on.

    A terminal's Ctrl-C reaches rank and launcher alike, so a second one is no reason to end at
    once; the launcher's death, told by SIGINT too, is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launcher = os.getppid()

    @contextmanager
    def at_once(self, doing: str) -> Iterator[None]:
        """Ends nothing: a rank that left alone would keep the others waiting for it."""
        yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._launcher:
            os._exit(128 + signal.SIGINT)
        self._signal = signal.Signals(number)

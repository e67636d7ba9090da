"""SIGTERM and Ctrl-C: the first stops the run in an orderly way, a second Ctrl-C at once.

While there is nothing to save (a download, loading a model) there is no better moment to wait for,
so the first signal already aborts the current work.
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

FORCED_EXIT_CODE: Final = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, as in a shell."""
ABORT_TIMEOUT_SECONDS: Final = 10.0
"""How long a library may block after a signal in `at_once`, such as a download's threads."""
_SHOW_CURSOR: Final = b"\x1b[?25h"


class _Stopped(KeyboardInterrupt):
    """Unwinds a library's code; a KeyboardInterrupt, so that no `except Exception` swallows it."""


class StopRequest:
    """A flag that signals set. Install it before any slow import."""

    def __init__(self, exit_process: Callable[[int], object] = os._exit) -> None:
        self._exit = exit_process
        self._signal: signal.Signals | None = None
        self._saved_step: int | None = None
        self._doing: str | None = None

    def install(self) -> None:
        """Install handlers of SIGTERM and SIGINT (only in the main thread)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def saved(self, step: int) -> None:
        """Record the newest checkpoint, for the message after an immediate exit."""
        self._saved_step = step

    @contextmanager
    def at_once(self, doing: str) -> Iterator[None]:
        """Let a signal abort the block immediately, because there is nothing to save.

        doing: the current work, for the message, such as "while the model was read". Raises
        InterruptedRunError.
        """
        self._doing = doing
        try:
            if self.requested:
                raise _Stopped
            yield
            # Cleared inside the try, so that a signal from here on raises nothing.
            self._doing = None
        except _Stopped:
            raise InterruptedRunError(self._sentence(doing)) from None
        finally:
            self._doing = None

    @property
    def requested(self) -> bool:
        """True if the run is to stop."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """``SIGTERM`` or ``Ctrl-C``."""
        return "Ctrl-C" if self._signal == signal.SIGINT else "SIGTERM"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            self._end_now(self._loss(), FORCED_EXIT_CODE)
            return
        self._signal = signal.Signals(number)
        if self._doing is not None:
            self._lose_patience(self._sentence(self._doing))
            raise _Stopped
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping after the next checkpoint; press Ctrl-C again to stop now\n")

    def _lose_patience(self, sentence: str) -> None:
        """Exit the process later if the work does not return to the main thread."""

        def end() -> None:
            if self._doing is not None:
                self._end_now(f"error: {sentence}", ExitCode.INTERRUPTED)

        timer = threading.Timer(ABORT_TIMEOUT_SECONDS, end)
        timer.daemon = True
        timer.start()

    def _end_now(self, sentence: str, code: int) -> None:
        """Exit without cleanup, except for the terminal's cursor, which a progress bar hides."""
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"\n{sentence}\n".encode())
        self._exit(code)

    def _sentence(self, doing: str) -> str:
        return (
            f"stopped by {self.name} {doing}; nothing had been trained since the start, so nothing "
            "is lost: run it again to continue"
        )

    def _loss(self) -> str:
        if self._saved_step is None:
            return (
                "stopped at once: no checkpoint was saved since the start, so the same command "
                "starts where this one did"
            )
        return (
            f"stopped at once: no checkpoint was saved since step {self._saved_step}, from which "
            "the same command resumes"
        )


class RankStopRequest(StopRequest):
    """The stop request of a rank, which its launcher forwards.

    A terminal sends Ctrl-C to ranks and launcher alike, so a second one does not stop a rank at
    once. The launcher's death, which also arrives as SIGINT, does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launcher = os.getppid()

    @contextmanager
    def at_once(self, doing: str) -> Iterator[None]:
        """Never abort: a rank that left alone would keep the others waiting."""
        yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._launcher:
            os._exit(128 + signal.SIGINT)
        self._signal = signal.Signals(number)

"""Logging of a run: plain text next to the progress bar, or JSON lines in a pod.

All modules log through `logging.getLogger(__name__)`. The handler here also gets what third-party
libraries log and Python's own warnings. Errors go to stderr, everything else to stdout.
"""

import logging
import sys
import threading
from typing import Literal

from rich.console import Console

from kubelora_api.log_lines import JsonFormatter
from kubelora_trainer.utils.text import printable

LogFormat = Literal["plain", "json"]


class PlainFormatter(logging.Formatter):
    """Formatter for a terminal: the sentence, with its level if that is not info.

    Args:
        rank: Number of this rank; shown where a reader would otherwise take it for rank 0.
        world_size: Number of ranks of the run.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def format(self, record: logging.LogRecord) -> str:
        """Format the record."""
        text = record.getMessage().rstrip()
        if record.levelno >= logging.ERROR:
            text = (
                f"error: {text}" if self._world_size == 1 else f"rank {self._rank}: error: {text}"
            )
        elif record.levelno >= logging.WARNING:
            text = f"warning: rank {self._rank}: {text}" if self._rank else f"warning: {text}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class ConsoleHandler(logging.Handler):
    """Handler that writes above the progress bar of its console, and errors to stderr."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        try:
            text = printable(self.format(record))
            if record.levelno >= logging.ERROR:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
            else:
                self._console.out(text, highlight=False)
        except Exception:
            self.handleError(record)


def configure_logging(
    log_format: LogFormat, *, rank: int | None = 0, world_size: int = 1, attempt: int | None = None
) -> Console:
    """Send all logs and Python's warnings through one handler; only warnings of ranks above 0.

    Args:
        log_format: Format of the lines.
        rank: Number of this rank; None for the launcher of several ranks.
        world_size: Number of ranks of the run.
        attempt: The operator's count of attempts; None without an operator.

    Returns:
        The console for the progress bar: no terminal with JSON or on another rank than 0.
    """
    console = Console()
    handler = ConsoleHandler(console)
    if log_format == "json":
        known = {"rank": rank, "attempt": attempt}
        context = {key: value for key, value in known.items() if value is not None}
        handler.setFormatter(JsonFormatter(lambda: context))
        _log_uncaught_exceptions()
    else:
        handler.setFormatter(PlainFormatter(rank or 0, world_size))
    root = logging.getLogger()
    for previous in [h for h in root.handlers if isinstance(h, ConsoleHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    logging.captureWarnings(True)
    # The root logger's level is that of third-party libraries: WARNING by default, unless one that
    # was imported before has changed it.
    root.setLevel(logging.WARNING)
    logging.getLogger("kubelora_trainer").setLevel(logging.WARNING if rank else logging.INFO)
    if log_format == "plain" and rank == 0:
        return console
    return Console(quiet=True, force_terminal=False)


def redirect_library_logs() -> None:
    """Replace handlers that libraries installed at their import by the root logger's."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def _log_uncaught_exceptions() -> None:
    """Turn the traceback of an unexpected exception into one line as well."""
    logger = logging.getLogger(__name__)

    def log(message: str, error: BaseException | None) -> None:
        logger.critical("%s: %r", message, error, exc_info=error)

    sys.excepthook = lambda kind, error, trace: log("unexpected error", error)
    threading.excepthook = lambda args: log("unexpected error in a thread", args.exc_value)

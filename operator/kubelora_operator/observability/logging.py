"""Log formats that add job and attempt to each line, as JSON or as plain text."""

import contextvars
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from kubelora_api.log_lines import JsonFormatter

_JOB: contextvars.ContextVar[dict[str, object] | None] = contextvars.ContextVar("job", default=None)


@contextmanager
def job_log_context(namespace: str, name: str, attempt: int | None = None) -> Iterator[None]:
    """Add this job to all lines logged in the context.

    Args:
        namespace: Namespace of the job.
        name: Name of the job.
        attempt: Number of its attempt, if known.
    """
    about: dict[str, object] = {"namespace": namespace, "name": name}
    token = _JOB.set(about if attempt is None else about | {"attempt": attempt})
    try:
        yield
    finally:
        _JOB.reset(token)


def json_formatter() -> JsonFormatter:
    """Return a formatter of JSON lines with the job of the current context."""
    return JsonFormatter(lambda: _JOB.get() or {})


class TerminalFormatter(logging.Formatter):
    """Formatter for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        about = _JOB.get()
        where = f" [{about['namespace']}/{about['name']}]" if about else ""
        if about and "attempt" in about:
            where = f"{where[:-1]} attempt {about['attempt']}]"
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():7}{where} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(format_name: str, level: str) -> None:
    """Send all logs to stderr, and of kopf's only the warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(json_formatter() if format_name == "json" else TerminalFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

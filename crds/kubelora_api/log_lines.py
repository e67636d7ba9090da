"""JSON log lines of operator and trainer: one object per line, with the same keys in both."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Formatter with one JSON object per line: time, level, logger, message and context.

    Args:
        context: Returns what is added to each line, such as the job or the rank.
    """

    def __init__(self, context: Callable[[], Mapping[str, object]] = dict) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().strip(),
        }
        line |= self._context()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def messages_of(log: str) -> str:
    """Return a log with each JSON line replaced by its level, where it matters, and its message.

    Other lines stay as they are. The kubelet may have cut the first line.
    """
    return "\n".join(_message_of(line) for line in log.splitlines())


def _message_of(line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(record, dict) or not isinstance(record.get("message"), str):
        return line
    level = record.get("level")
    text = record["message"] if level == "info" else f"{level}: {record['message']}"
    return f"{text}\n{record['exception']}" if "exception" in record else text

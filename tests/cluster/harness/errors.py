"""The one error the harness raises: a sentence for the person who ran the command."""

from __future__ import annotations

from pathlib import Path


class HarnessError(Exception):
    """What was found, where, and what to do about it."""


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, indented, for the end of an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return f"    (no log at {log})"
    return "\n".join("    " + line[:400] for line in text.splitlines()[-lines:])

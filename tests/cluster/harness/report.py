"""Progress lines: on standard error, so that standard output carries only what a script reads."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    print(f"[cluster] {line}", file=sys.stderr, flush=True)

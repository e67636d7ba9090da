"""Text formatting: file names, durations, sizes and lists of ranks."""

import re
from collections.abc import Sequence

_NOT_UTF8 = re.compile("[\\udc80-\\udcff]")
"""Surrogates by which Python represents bytes that are not UTF-8 (PEP 383)."""


def printable(text: str) -> str:
    r"""Escape bytes of file names that are not UTF-8, such as ``\xe9``."""
    return _NOT_UTF8.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)


def ranks_named(ranks: Sequence[int], otherwise: str) -> str:
    """Format ``rank 1`` or ``ranks 1 and 3``; return ``otherwise`` if there are none."""
    if not ranks:
        return otherwise
    *most, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def duration_text(seconds: float) -> str:
    """Format a duration as ``1h20m``, ``2m05s`` or ``9s``."""
    rounded = max(0, round(seconds))
    if rounded >= 3600:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    return f"{rounded // 60}m{rounded % 60:02d}s" if rounded >= 60 else f"{rounded}s"


def bytes_text(count: int) -> str:
    """Format a number of bytes in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

"""Text for people: file names, durations, sizes and lists of ranks."""

import re
from collections.abc import Sequence

_NOT_UTF8 = re.compile("[\\udc80-\\udcff]")
"""What Python makes of such bytes (PEP 383)."""


def printable(text: str) -> str:
    """``text`` with bytes of file names that are not UTF-8 as ``\\xe9``."""
    return _NOT_UTF8.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)


def ranks_named(ranks: Sequence[int], otherwise: str) -> str:
    """``rank 1``, ``ranks 1 and 3``, or ``otherwise`` without any."""
    if not ranks:
        return otherwise
    *most, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def duration_text(seconds: float) -> str:
    """``1h20m``, ``2m05s`` or ``9s``."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def bytes_text(count: int) -> str:
    """``count`` bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

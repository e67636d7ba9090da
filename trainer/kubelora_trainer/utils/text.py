"""File names as text that can be written down: Linux takes any bytes for a name, UTF-8 or not."""

import re

_NOT_UTF8 = re.compile("[\\udc80-\\udcff]")
"""What Python makes of such bytes (PEP 383)."""


def printable(text: str) -> str:
    """``text`` with bytes of file names that are not UTF-8 as ``\\xe9``."""
    return _NOT_UTF8.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)

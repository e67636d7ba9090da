"""What a path that does not exist was meant to be: the entry of its folder that is most like it."""

from pathlib import Path

from kubelora_api.suggestions import nearest

_LOOKED_AT = 2000
"""Entries of a folder of millions are not all read for the sake of a sentence."""


def nearby(path: Path) -> str:
    """``; did you mean 'photos/bottles'?`` for the first part of ``path`` that is not there.

    Nothing where no entry of its folder is like it, or the folder can't be read.
    """
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    try:
        entries = missing.parent.iterdir()
        names = [entry.name for entry, _ in zip(entries, range(_LOOKED_AT), strict=False)]
    except OSError:
        return ""
    close = nearest(missing.name, (name for name in names if name != missing.name))
    return f"; did you mean '{missing.with_name(close)}'?" if close else ""

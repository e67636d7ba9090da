"""Suggestions for misspelled names, worded the same wherever a user enters a name.

Independent of fields, files and modules: the caller passes the known names.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_CLOSE = 0.6
"""difflib's default cutoff: six of ten letters agree."""
SHOWN = 24
"""Names in a message: about two lines of a terminal."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to ``name``, ignoring case, ``_`` and ``-``, or None."""
    by_letters: dict[str, str] = {}
    for one in known:
        by_letters.setdefault(_letters(one), one)
    close = get_close_matches(_letters(name), by_letters, n=1, cutoff=_CLOSE)
    return by_letters[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'rank'?``, or nothing if no name is similar."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'rank'?``, or the known names if none is similar."""
    names = list(known)
    return did_you_mean(name, names) or (f"; known here: {listed(names)}" if names else "")


def listed(names: Iterable[str]) -> str:
    """Join the first 24 names with commas."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")

"""What a misspelt name was probably meant to be, said in one way wherever a user names something.

Knows nothing of fields, files or modules: the caller says which names there are.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_CLOSE = 0.6
"""difflib's own limit: two names in which six letters of ten agree."""
SHOWN = 24


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, whatever its case and its word breaks, or None."""
    by_letters: dict[str, str] = {}
    for one in known:
        by_letters.setdefault(_letters(one), one)
    close = get_close_matches(_letters(name), by_letters, n=1, cutoff=_CLOSE)
    return by_letters[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'rank'?``, or nothing where no name is like it."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'rank'?``, or, where no name is like it, which names there are."""
    names = list(known)
    return did_you_mean(name, names) or (f"; known here: {listed(names)}" if names else "")


def listed(names: Iterable[str]) -> str:
    """Names with commas, the first 24 of them."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")

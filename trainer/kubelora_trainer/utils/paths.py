"""Paths for people: `~` expanded, near misses named."""

from pathlib import Path

from kubelora_api.suggestions import nearest
from kubelora_trainer.utils.errors import StorageError


def expand_home(path: str) -> Path:
    """The path with ``~`` written out. Raises StorageError for a user who is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = path.split("/")[0]
        raise StorageError(
            f"{path}: {home} is no home folder that is known here; write the path in full."
        ) from None


_LOOKED_AT = 2000
"""Entries of a folder of millions are not all read for the sake of a sentence."""


def did_you_mean_path(path: Path) -> str:
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

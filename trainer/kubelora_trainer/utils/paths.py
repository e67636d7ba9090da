"""Paths: expansion of `~`, and suggestions for misspelt ones."""

from pathlib import Path

from kubelora_api.suggestions import nearest
from kubelora_trainer.utils.errors import StorageError


def expand_home(path: str) -> Path:
    """Expand ``~``. Raises StorageError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = path.split("/")[0]
        raise StorageError(
            f"{path}: {home} is not a known home directory here; write the path in full."
        ) from None


_MOST_ENTRIES = 2000
"""Limit for directories with millions of entries: a suggestion is not worth reading them all."""


def did_you_mean_path(path: Path) -> str:
    """Suggest a correction for the first missing part of ``path``: ``; did you mean 'photos/a'?``.

    Empty if no sibling is similar, or the directory cannot be read.
    """
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    try:
        entries = missing.parent.iterdir()
        names = [entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return ""
    close = nearest(missing.name, (name for name in names if name != missing.name))
    return f"; did you mean '{missing.with_name(close)}'?" if close else ""

"""File listing of a dataset's directory, shared by images, captions and tables."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kubelora_trainer.utils.errors import DatasetError


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder``, except hidden ones; follow links to each directory once.

    Raises DatasetError for an unreadable directory: its images would be missing silently.
    """

    def refuse_unreadable(error: OSError) -> NoReturn:
        raise DatasetError(
            f"{error.filename} can't be read: {error.strerror}. Give this user read access, or "
            "remove it from the dataset."
        ) from error

    seen: set[str] = set()
    for current, folders, names in os.walk(folder, onerror=refuse_unreadable, followlinks=True):
        real = os.path.realpath(current)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__MACOSX")))
        yield from (Path(current) / name for name in names if not name.startswith("."))

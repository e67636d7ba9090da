"""Files of a dataset's folder: one listing for images, captions and tables alike."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kubelora_trainer.utils.errors import DatasetError


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder`` except hidden ones; linked folders are entered, once each.

    Raises:
        DatasetError: A folder can't be read; skipping it would silently lose its images.
    """

    def raise_unreadable(error: OSError) -> NoReturn:
        raise DatasetError(
            f"{error.filename} can't be read: {error.strerror}. Give this user read permission, or "
            "move it out of the dataset."
        ) from error

    seen: set[str] = set()
    for current, folders, names in os.walk(folder, onerror=raise_unreadable, followlinks=True):
        real = os.path.realpath(current)
        if real in seen:  # a link to a folder above would otherwise be followed for ever
            folders.clear()
            continue
        seen.add(real)
        # Assigned in place, which os.walk documents as the way to prune. __MACOSX holds resource
        # forks of zip archives made on a Mac, named like the images they belong to.
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__MACOSX")))
        yield from (Path(current) / name for name in names if not name.startswith("."))

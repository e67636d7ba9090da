"""Which files a dataset's folder has: one answer for images, captions and tables alike."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kubelora_trainer.utils.errors import DatasetError


def files_below(folder: Path) -> Iterator[Path]:
    """Files below ``folder``, hidden ones left out; linked folders are entered, once each.

    Raises DatasetError for a folder that can't be read: its images would be missing silently.
    """

    def refuse_unreadable(error: OSError) -> NoReturn:
        raise DatasetError(
            f"{error.filename} can't be read: {error.strerror}. Let this user read it, or take it "
            "out of the dataset."
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

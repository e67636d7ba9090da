"""The folders that checkpoints stand in: named, put in place, taken away, found again after a kill.

A folder has its real name only while it is whole: it is filled aside, renamed into place, and
renamed away before it is deleted. A kill between any two steps leaves hidden folders alone, which
the next run tidies up; a checkpoint that was about to be replaced gets its name back.
"""

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kubelora_trainer.utils.atomic_io import sync_folder

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_ASIDE, _OLD, _GONE = ".part", ".old", ".gone"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on the disk, by its folder."""

    path: Path
    step: int
    micro: int


def folder_name(step: int, window_micro_steps: int) -> str:
    """``step-000500``, or ``step-000500.3`` in the middle of a window."""
    return f"step-{step:06d}" + (f".{window_micro_steps}" if window_micro_steps else "")


def list_checkpoints(root: Path) -> list[SavedCheckpoint]:
    """Finished checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append(SavedCheckpoint(path, int(match[1]), int(match[2] or 0)))
    return sorted(found, key=lambda c: (c.step, c.micro))


def place_aside(target: Path) -> Path:
    """Where ``target`` is filled before it gets its name."""
    return target.with_name(f".{target.name}{_ASIDE}")


def put_in_place(target: Path) -> None:
    """Give what was filled aside its name, also over an earlier checkpoint of the same name."""
    old = target.with_name(f".{target.name}{_OLD}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    place_aside(target).rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint, so that a kill half way leaves none that looks whole."""
    gone = checkpoint.with_name(f".{checkpoint.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def tidy_up(root: Path) -> None:
    """Finish what a killed run left half done. For the one who may write there."""
    for left in root.glob(".step-*") if root.is_dir() else ():
        target = left.with_name(left.name.removeprefix(".").removesuffix(_OLD))
        if left.name.endswith(_OLD) and not target.exists():
            with suppress(FileNotFoundError):  # another rank was quicker
                left.rename(target)
        elif left.name.endswith((_OLD, _GONE, _ASIDE)):
            shutil.rmtree(left, ignore_errors=True)

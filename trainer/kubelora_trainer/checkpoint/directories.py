"""Checkpoint directories: names, atomic replacement, deletion, and cleanup after a kill.

A directory has its final name only while it is complete: it is filled under a staging name, renamed
into place, and renamed again before it is deleted. A kill between any two steps leaves only hidden
directories, which the next run cleans up; a checkpoint that was being replaced gets its name back.
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
    """A checkpoint on disk."""

    path: Path
    step: int
    micro: int


def folder_name(step: int, window_micro_steps: int) -> str:
    """Return ``step-000500``, or ``step-000500.3`` in the middle of a window."""
    return f"step-{step:06d}" + (f".{window_micro_steps}" if window_micro_steps else "")


def list_checkpoints(root: Path) -> list[SavedCheckpoint]:
    """List finished checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append(SavedCheckpoint(path, int(match[1]), int(match[2] or 0)))
    return sorted(found, key=lambda c: (c.step, c.micro))


def staging_path(target: Path) -> Path:
    """Return the staging path of ``target``."""
    return target.with_name(f".{target.name}{_ASIDE}")


def publish_staged(target: Path) -> None:
    """Rename the staging directory to ``target``, replacing an earlier checkpoint of that name."""
    old = target.with_name(f".{target.name}{_OLD}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staging_path(target).rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint so that a kill halfway leaves none that looks complete."""
    gone = checkpoint.with_name(f".{checkpoint.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def tidy_up(root: Path) -> None:
    """Finish or undo what a killed run left half done; requires write access."""
    for left in root.glob(".step-*") if root.is_dir() else ():
        target = left.with_name(left.name.removeprefix(".").removesuffix(_OLD))
        if left.name.endswith(_OLD) and not target.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                left.rename(target)
        elif left.name.endswith((_OLD, _GONE, _ASIDE)):
            shutil.rmtree(left, ignore_errors=True)

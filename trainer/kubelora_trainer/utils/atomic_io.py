"""Atomic file writes, and messages for refused writes.

Everything a run leaves behind is written under a temporary name, flushed to disk and renamed, so
that a kill or a full disk never leaves a partial file under its final name.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubelora_trainer.utils.errors import OutputError

_SENTENCES = {
    errno.ENOSPC: "no space left on the device; free some, or set spec.output.uri to another place",
    errno.EDQUOT: "disk quota exceeded; free some space, or set spec.output.uri to another place",
    errno.EFBIG: "the file would be larger than this system's file size limit (ulimit -f)",
    errno.EROFS: "the file system is read-only; mount it writable, or set spec.output.uri to "
    "another place",
    errno.EACCES: "permission denied; give this user write access, or set spec.output.uri to "
    "another place",
    errno.EEXIST: "a file of that name is in the way; move it away, or set spec.output.uri to "
    "another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder; set spec.output.uri to another "
    "place",
}
_SENTENCES[errno.EPERM] = _SENTENCES[errno.EACCES]


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Convert a refused write below ``place`` to an OutputError with advice.

    Rust writers (safetensors) report the system's error number only in their message.
    """
    try:
        yield
    except OSError as error:
        raise _refused(place, error.errno or 0, error.strerror or str(error)) from error
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise _refused(place, int(number[1]), str(error)) from error


def _refused(place: Path, number: int, text: str) -> OutputError:
    return OutputError(f"can't write to {place}: {_SENTENCES.get(number, text)}")


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically. Raises OutputError if the disk refuses."""
    aside = path.with_name(f".{path.name}.part")
    with writing_to(path):
        try:
            write_durably(aside, data)
            aside.replace(path)
            sync_folder(path.parent)
        except BaseException:  # including a signal's exception
            aside.unlink(missing_ok=True)
            raise


# The umask can only be read by setting it, which is safe only before threads start.
_UMASK = os.umask(0)
os.umask(_UMASK)


def apply_umask(path: Path) -> None:
    """Give a file, or a directory and its content, the permissions that the umask allows.

    tempfile and safetensors create files for their owner only, but others read a claim too.
    """
    for one in (path, *path.rglob("*")):
        if not one.is_symlink():
            usual = (0o777 if one.is_dir() else 0o666) & ~_UMASK
            one.chmod(one.stat().st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) | usual)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Provide an empty directory that is renamed to ``folder`` on success and deleted otherwise.

    Another process may do the same; the first one wins. Raises OSError, and whatever the block
    raises.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    try:
        yield aside
        apply_umask(aside)
        for written in aside.rglob("*"):
            if written.is_file():
                flush_to_disk(written)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write and flush to disk, without renaming. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_to_disk(path: Path) -> None:
    """Flush a file that another writer has closed. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a directory's entries (after a rename) to disk, if the system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems may not
            raise
    finally:
        os.close(descriptor)

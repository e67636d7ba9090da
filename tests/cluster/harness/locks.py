"""One at a time: builds and changes to the cluster; and no teardown under a test that runs."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from .errors import HarnessError
from .places import Places
from .report import say


class InUseError(HarnessError):
    """The cluster can't be taken down now, because a test run uses it."""


@contextlib.contextmanager
def exclusive(places: Places, purpose: str) -> Iterator[None]:
    """Hold the cache's lock for a purpose; the kernel lets go of it when the process ends."""
    places.cache.mkdir(parents=True, exist_ok=True)
    with (places.cache / f".{purpose}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is busy with the {purpose}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def exclusive_if_free(places: Places, purpose: str) -> Iterator[bool]:
    """Like `exclusive`, without waiting: whether the lock is held in the block."""
    places.cache.mkdir(parents=True, exist_ok=True)
    with (places.cache / f".{purpose}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def in_use(places: Places) -> Iterator[None]:
    """Say that the cluster is used, for as long as the block runs. Many may at once."""
    with _users(places).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def without_users(places: Places) -> Iterator[None]:
    """Hold off users while the cluster is taken down; raises when there is one."""
    with _users(places).open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUseError(
                f"A test run uses the cluster in {places.state}. Wait until it has ended, or take "
                "the cluster down under it with `down --force`."
            ) from error
        yield


def _users(places: Places) -> Path:
    places.cache.mkdir(parents=True, exist_ok=True)
    return places.cache / ".users.lock"

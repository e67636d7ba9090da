"""One at a time: builds, and changes to the cluster, from whichever process they come."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from .places import Places
from .report import say


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

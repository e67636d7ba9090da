"""When objects appeared and reached their conditions, as a watching client sees it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.operator_scale.api import Api, Object

CREATED: Final = "Created"
"""Pseudo condition of an object that exists."""


@dataclass(frozen=True)
class Moment:
    """A moment on two clocks.

    monotonic: For durations.
    wall: Seconds since the epoch, to compare with the API server's log.
    """

    monotonic: float
    wall: float


class Timeline:
    """First moments of the objects of one collection, by the name of their job.

    key_of: Name under which an object counts.
    """

    def __init__(self, key_of: Callable[[Object], str]) -> None:
        self._key_of = key_of
        self._changed = asyncio.Event()
        self._moments: dict[str, dict[str, Moment]] = defaultdict(dict)
        self._ignored: set[str] = set()
        self.uids: dict[str, str] = {}
        """Name of each object by its uid."""

    def of(self, condition: str) -> dict[str, Moment]:
        """Return when each object was first seen with this condition True."""
        return self._moments[condition]

    async def follow(self, api: Api, path: str) -> None:
        """Watch the collection until cancelled."""
        async for event in api.list_and_watch(path):
            if event["type"] in ("ADDED", "MODIFIED"):
                self._record(event["object"])

    async def until(self, condition: str, count: int, seconds: float) -> bool:
        """Wait until ``count`` objects have had the condition; return False if time runs out.

        Args:
            condition: Type of the condition, or `CREATED`.
            count: Number of objects.
            seconds: Longest wait.
        """
        try:
            async with asyncio.timeout(seconds):
                while len(self._moments[condition]) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def forget(self) -> None:
        """Forget all moments and ignore what is known so far from now on."""
        self._ignored.update(self.uids)
        self._moments.clear()

    def _record(self, item: Object) -> None:
        now = Moment(time.monotonic(), time.time())
        key = self._key_of(item)
        uid = item["metadata"]["uid"]
        if uid in self._ignored:
            return
        self.uids[uid] = key
        true = [c["type"] for c in _conditions(item) if c["status"] == "True"]
        for condition in (CREATED, *true):
            self._moments[condition].setdefault(key, now)
        self._changed.set()


def _conditions(item: Object) -> list[Object]:
    return list(item.get("status", {}).get("conditions") or [])

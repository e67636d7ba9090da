"""A full list every so often: it finds what the watches missed, and says when they are ill.

A watch can lose a deletion (after a 410 Gone there is no DELETED) or fall silent, and silence
proves nothing: bookmarks never reach a handler. So the list is compared with what was heard. What
differs is looked at again, and when it stays unheard for longer than a grace the operator is not
healthy.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kubelora_operator.kube.client import ApiError, Cluster
from kubelora_operator.observability.metrics import JobKey

log = logging.getLogger(__name__)
GRACE: Final = 30.0
"""Seconds that a watch may lag behind a list."""


@dataclass(frozen=True)
class _Heard:
    version: str
    at: float


class Ledger:
    """What the watches told of each job and what the lists found. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._heard: dict[JobKey, _Heard] = {}
        self._missed: dict[JobKey, float] = {}

    def hear(self, key: JobKey, version: str, now: float) -> None:
        """A watch told of the job."""
        self._heard[key] = _Heard(version, now)
        self._missed.pop(key, None)

    def compare(self, listed: dict[JobKey, str], began: float) -> set[JobKey]:
        """Jobs to look at again: listed otherwise than heard, or heard of and not listed.

        began: when the list was asked for; what was heard since then is newer than the list.
        """
        suspects: set[JobKey] = set()
        for key, version in listed.items():
            heard = self._heard.get(key)
            if heard is None or (heard.version != version and heard.at < began):
                suspects.add(key)
                self._missed.setdefault(key, began)
            else:
                self._missed.pop(key, None)
        for key in [k for k, h in self._heard.items() if k not in listed and h.at < began]:
            suspects.add(key)
            del self._heard[key]
            self._missed.pop(key, None)
        return suspects

    def overdue(self, now: float) -> list[JobKey]:
        """Jobs whose change a list found and no watch told of within the grace."""
        return [key for key, since in self._missed.items() if now - since > GRACE]


class Resync:
    """Lists all jobs of the namespaces served (none given: all) every ``seconds``."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        ledger: Ledger,
        wake: Callable[[JobKey], None],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._namespaces, self._ledger = cluster, namespaces, ledger
        self._wake, self._seconds, self._clock = wake, seconds, clock

    async def run(self) -> None:
        """List for ever; a list that fails is tried again at the next turn."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self.once()
            except ApiError as error:
                log.warning("the periodic list failed: %s", error)

    async def once(self) -> None:
        """One list, compared with what was heard."""
        began = self._clock()
        listed: dict[JobKey, str] = {}
        for namespace in self._namespaces or (None,):
            async for job in self._cluster.list_jobs(namespace):
                metadata = job["metadata"]
                listed[metadata["namespace"], metadata["name"]] = metadata["resourceVersion"]
        for key in self._ledger.compare(listed, began):
            self._wake(key)

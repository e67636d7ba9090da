"""A periodic full list that finds changes the watches missed and detects a broken watch.

A watch can lose a deletion (after 410 Gone there is no DELETED event) or stop sending events, and
that goes unnoticed because bookmarks never reach a handler. So each list is compared with the
watch events. Jobs that differ are reconciled again; if an event is still missing after a grace
period, the operator reports itself unhealthy.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube.client import ApiError, Cluster

log = logging.getLogger(__name__)
GRACE: Final = 30.0
"""Seconds that a watch may lag behind a list before the operator is unhealthy."""


@dataclass(frozen=True)
class _Observed:
    version: str
    at: float


class WatchTracker:
    """The state of each job in watch events and lists. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._observed: dict[JobKey, _Observed] = {}
        self._missed: dict[JobKey, float] = {}

    def record(self, key: JobKey, version: str, now: float) -> None:
        """Record a watch event of the job.

        Args:
            key: Namespace and name of the job.
            version: Its resourceVersion.
            now: When the event arrived.
        """
        self._observed[key] = _Observed(version, now)
        self._missed.pop(key, None)

    def compare(self, listed: dict[JobKey, str], began: float) -> set[JobKey]:
        """Return the jobs whose list entry and last watch event differ, to reconcile them again.

        Args:
            listed: resourceVersion of each listed job.
            began: When the list was requested; later watch events are newer than the list.
        """
        suspects: set[JobKey] = set()
        for key, version in listed.items():
            observed = self._observed.get(key)
            if observed is None or (observed.version != version and observed.at < began):
                suspects.add(key)
                self._missed.setdefault(key, began)
            else:
                self._missed.pop(key, None)
        for key in [k for k, h in self._observed.items() if k not in listed and h.at < began]:
            suspects.add(key)
            del self._observed[key]
            self._missed.pop(key, None)
        return suspects

    def overdue(self, now: float) -> list[JobKey]:
        """Return the jobs whose change a list found but no watch reported within the grace."""
        return [key for key, since in self._missed.items() if now - since > GRACE]


class Resync:
    """Lists all jobs of the given namespaces (of all if none is given) every ``seconds``."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        tracker: WatchTracker,
        enqueue: Callable[[JobKey], None],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._namespaces, self._tracker = cluster, namespaces, tracker
        self._enqueue, self._seconds, self._clock = enqueue, seconds, clock

    async def run(self) -> None:
        """List forever; a failed list is retried after the next interval."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self.run_once()
            except ApiError as error:
                log.warning("periodic list failed: %s", error)

    async def run_once(self) -> None:
        """List once and compare with the watch events."""
        began = self._clock()
        listed: dict[JobKey, str] = {}
        for namespace in self._namespaces or (None,):
            async for job in self._cluster.list_jobs(namespace):
                metadata = job["metadata"]
                listed[metadata["namespace"], metadata["name"]] = metadata["resourceVersion"]
        for key in self._tracker.compare(listed, began):
            self._enqueue(key)

"""A periodic list of all watched objects' versions, which finds changes that the watches missed.

A watch can lose a deletion or stop sending events. A source whose list differs from the store is
listed and watched again from the start, which brings every change and removes what is gone. One
refused kind or namespace affects no other.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kubelora_operator.controller.object_store import ObjectStore, WatchSource, is_newer
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watch_health import WatchHealth
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube.client import ApiError, Cluster

log = logging.getLogger(__name__)
LAG: Final = 5.0
"""Seconds that an event may arrive after a list that has it already."""


class Resync:
    """Lists every source each ``seconds``. ``restart`` lists and watches a source again."""

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        sources: list[WatchSource],
        health: WatchHealth,
        restart: Callable[[WatchSource], None],
        seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster, self._store, self._sources = cluster, store, sources
        self._health, self._restart, self._seconds = health, restart, seconds
        self._clock, self._sleep = clock, sleep

    async def run(self) -> None:
        """List forever; a failed list is retried after the next interval."""
        while True:
            await self._sleep(self._seconds)
            await self.run_once()

    async def run_once(self) -> None:
        """List every source once; restart the watches that missed a change."""
        for source in self._sources:
            try:
                missed = await self._missed(source)
            except ApiError as error:
                self._health.failed(source, str(error))
                log.warning("periodic list of %s failed: %s", source, error)
                continue
            self._health.listed(source)
            self._health.compared(source, len(missed))
            if missed:
                example = "/".join(min(missed))
                log.warning(
                    "the watch of %s missed changes of %d objects, such as %s; listing it again",
                    source,
                    len(missed),
                    example,
                )
                self._restart(source)

    async def _missed(self, source: WatchSource) -> set[JobKey]:
        began = self._clock()
        listed = await self._cluster.list_versions(
            source.kind is Kind.JOB, source.kind.value, source.namespace
        )
        suspects = _differences(listed, self._store, source, began)
        if suspects:
            await self._sleep(LAG)
            suspects &= _differences(listed, self._store, source, began)
        return suspects


def _differences(
    listed: dict[JobKey, tuple[str, str]], store: ObjectStore, source: WatchSource, began: float
) -> set[JobKey]:
    """Return the objects of which the store knows less than the list.

    Args:
        listed: uid and resourceVersion of each listed object.
        store: The store.
        source: The source that was listed.
        began: When the list was requested; what was stored since is newer.
    """
    stored = store.versions(source)
    lost = {
        key
        for key, (uid, version) in listed.items()
        if (key not in stored and not store.was_deleted(uid))
        or (key in stored and is_newer(version, stored[key][1]))
    }
    ghosts = {key for key, (_, _, at) in stored.items() if key not in listed and at < began}
    return lost | ghosts

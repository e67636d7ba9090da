"""Watches that feed the object store: one for each kind and namespace, each restarted by itself.

kopf lists, watches, reconnects and continues at the last version. Of it only the streams are used:
its handlers write annotations and finalizers to users' objects, take six times the CPU of the
stream itself, and report neither a complete list nor an error that has ended a watch.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import kopf
from kopf._cogs.clients import auth, watching
from kopf._cogs.structs import bodies, credentials, references

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.controller.object_store import ObjectStore, WatchSource
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watch_health import WatchHealth

log = logging.getLogger(__name__)
_OURS: Final = f"{names.LABEL_MANAGED_BY}={names.OPERATOR_APP}"
RESOURCES: Final = {
    Kind.JOB: (names.GROUP, names.VERSION),
    Kind.CHILD: ("batch", "v1"),
    Kind.POD: ("", "v1"),
}
"""API group and version of each kind."""
FIRST_WATCH_BACKOFF: Final = 1.0
"""Seconds before a watch that an error ended is started again; doubled each time."""
LONGEST_WATCH_BACKOFF: Final = 30.0
"""Seconds, as for a failed request."""
_STEADY: Final = 60.0
"""Seconds for which a watch must have run to be restarted without a longer wait."""
_OVERLAP: Final = 60.0
"""Seconds: what was stored so shortly before a list of kopf's own may be newer than the list."""


class _EndlessBackoffs:
    """Backoffs of 1, 2, 4, 8, 16 and then 30 s forever, for kopf's own requests."""

    def __iter__(self) -> Iterator[float]:
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        while True:
            yield 30.0


def sources_of(namespaces: tuple[str, ...]) -> list[WatchSource]:
    """Return the watches to run: each kind in each namespace, or in all if none is given."""
    return [WatchSource(kind, namespace) for namespace in namespaces or (None,) for kind in Kind]


def build_settings() -> kopf.OperatorSettings:
    """Return kopf's settings for the streams."""
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 200
    # The API server sends a bookmark each minute: a watch that is silent for longer is dead.
    settings.watching.inactivity_timeout = 150
    # Without these selectors kopf would read every Job and every pod of the cluster.
    settings.watching.label_selectors["batch", "v1", "jobs"] = _OURS
    settings.watching.label_selectors["", "v1", "pods"] = _OURS
    return settings


class Watches:
    """All watches. ``log_in`` returns the credentials for the API server."""

    def __init__(
        self,
        store: ObjectStore,
        sources: list[WatchSource],
        health: WatchHealth,
        log_in: Callable[[], kopf.ConnectionInfo | None],
        random_part: Callable[[], float] = random.random,
    ) -> None:
        self._settings, self._log_in = build_settings(), log_in
        self._watches = {s: Watch(s, store, health, self._settings, random_part) for s in sources}

    async def run(self) -> None:
        """Watch until cancelled."""
        vault = credentials.Vault()
        auth.vault_var.set(vault)
        tasks = [asyncio.create_task(w.run(), name=f"watch {s}") for s, w in self._watches.items()]
        try:
            await self._stay_logged_in(vault)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await vault.close()

    def restart(self, source: WatchSource) -> None:
        """List and watch a source again from the start."""
        self._watches[source].restart()

    async def _stay_logged_in(self, vault: credentials.Vault) -> None:
        """Log in, and again when the API server refuses the credentials, such as an old token."""
        while True:
            try:
                info = self._log_in()
            except Exception as error:
                log.warning("can't read the credentials for the API server: %s", error)
                info = None
            if info is not None:
                await vault.populate({"operator": info})
                await vault.wait_for_emptiness()
            await asyncio.sleep(1)


def log_in() -> kopf.ConnectionInfo | None:
    """Return credentials from KUBECONFIG if it is set, else from the pod's service account."""
    settings = build_settings()
    return kopf.login_with_kubeconfig(
        logger=log, settings=settings
    ) or kopf.login_with_service_account(logger=log, settings=settings)


class Watch:
    """The watch of one source. An error ends neither it nor the others: it starts again."""

    def __init__(
        self,
        source: WatchSource,
        store: ObjectStore,
        health: WatchHealth,
        settings: kopf.OperatorSettings,
        random_part: Callable[[], float],
    ) -> None:
        self._source, self._store, self._health = source, store, health
        self._settings, self._random_part = settings, random_part
        self._listed: set[str] = set()
        self._listing = True
        self._began = 0.0
        self._stream: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        failures = 0
        while True:
            started = time.monotonic()
            self._stream = asyncio.create_task(self._follow())
            try:
                await asyncio.wait({self._stream})
            finally:
                self._stream.cancel()
            if self._stream.cancelled():
                continue  # `restart`
            error = self._stream.exception()
            failures = 0 if time.monotonic() - started > _STEADY else failures + 1
            longest = min(FIRST_WATCH_BACKOFF * 2 ** min(failures, 8), LONGEST_WATCH_BACKOFF)
            delay = longest * (1 - self._random_part() / 2)
            self._health.failed(self._source, str(error) or type(error).__name__)
            log.warning("the watch of %s ended, again in %.0f s: %r", self._source, delay, error)
            await asyncio.sleep(delay)

    def restart(self) -> None:
        """End the stream, so that the next begins with a list."""
        if self._stream is not None:
            self._stream.cancel()

    async def _follow(self) -> None:
        self._listed, self._listing, self._began = set(), True, time.monotonic()
        group, version = RESOURCES[self._source.kind]
        resource = references.Resource(group, version, self._source.kind.value, namespaced=True)
        stream = watching.infinite_watch(
            settings=self._settings,
            resource=resource,
            namespace=cast(references.Namespace, self._source.namespace),
        )
        try:
            async for event in stream:
                if isinstance(event, watching.Bookmark):
                    self._finish_list()
                else:
                    self._take(event)
        finally:
            await cast(Any, stream).aclose()
        raise RuntimeError("the stream ended")

    def _finish_list(self) -> None:
        if not self._listing:  # a list of kopf's own that is empty
            self._begin_own_list()
        self._store.listed(self._source, self._listed, self._began)
        self._health.listed(self._source)
        self._listed, self._listing = set(), False

    def _begin_own_list(self) -> None:
        """Begin a list that kopf requests by itself, after 410 Gone."""
        self._listed, self._listing = set(), True
        self._began = time.monotonic() - _OVERLAP

    def _take(self, event: bodies.RawEvent) -> None:
        document = cast(JsonObject, event["object"])
        kind = self._source.kind
        self._health.heard(self._source)
        if event["type"] is None:
            if not self._listing:
                self._begin_own_list()
            self._listed.add(str(document["metadata"]["uid"]))
            self._store.deliver(kind, document)
        elif event["type"] == "DELETED":
            self._store.remove(kind, document)
        elif document.get("metadata", {}).get("uid"):  # a bookmark has none
            self._store.deliver(kind, document, added=event["type"] == "ADDED")

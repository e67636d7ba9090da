"""A store of the watched objects: LoraTrainingJobs, their batch/v1 Jobs and pods.

Looks read from it and cost the API server nothing. The watches feed it, and so do the API server's
answers to the operator's own requests, so that no look is spent on an echo. A newer version is
never replaced by an older one, whichever way it came.

An object is kept as JSON text of what is read of it, about 1 KiB: as Python objects it takes ten
times as much.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.controller.trim import Kind, controller_of, family_of, job_of, trim
from kubelora_operator.decision.snapshot import JobKey

OnChange = Callable[[JobKey, bool], None]
"""Callback for a job to look at.

The last argument is False for a change of nothing but its status or metadata, which ends no wait.
"""
_REMEMBERED_DELETIONS: Final = 4096
"""An answer that arrives after the deletion's event is younger than this many deletions."""


@dataclass(frozen=True)
class WatchSource:
    """A watch: one kind in one namespace, or in all if ``namespace`` is None."""

    kind: Kind
    namespace: str | None

    def __str__(self) -> str:
        return f"{self.kind} in {self.namespace or 'all namespaces'}"


@dataclass(frozen=True, slots=True)
class _Stored:
    uid: str
    version: str
    at: float
    job: str | None
    body: bytes
    spec: tuple[object, ...]
    group: tuple[str, str] | None


class ObjectStore:
    """Objects by namespace and name, and those of a job by owner.

    sources: The watches that feed the store. A namespace's jobs are decided on after the first
        list of all three kinds has arrived.
    changed: Called with each job to look at.
    """

    def __init__(
        self, sources: list[WatchSource], changed: OnChange, clock: Callable[[], float]
    ) -> None:
        self._sources, self._changed, self._clock = sources, changed, clock
        self._objects: dict[Kind, dict[JobKey, _Stored]] = {kind: {} for kind in Kind}
        self._groups: dict[Kind, dict[tuple[str, str], set[JobKey]]] = {
            kind: defaultdict(set) for kind in (Kind.CHILD, Kind.POD)
        }
        self._deleted: OrderedDict[str, str] = OrderedDict()
        self._unseen: set[WatchSource] = set(sources)
        self._new: set[str] = set()

    def synced(self, namespace: str) -> bool:
        """Return whether the first list of all three kinds has arrived for the namespace."""
        return not any(s.namespace in (None, namespace) for s in self._unseen)

    def deliver(self, kind: Kind, document: JsonObject, *, added: bool = False) -> None:
        """Store an object from a watch, and report its job as changed if anything read has changed.

        Args:
            kind: Kind of the object.
            document: The object.
            added: Whether it was just created, and not found by a list.
        """
        key, old, new = self._put(kind, document)
        if new is None:
            return
        if kind is Kind.JOB and added and old is None and not document.get("status"):
            self._new.add(new.uid)
        if old is None or old.body != new.body or old.uid != new.uid:
            urgent = kind is not Kind.JOB or old is None or old.spec != new.spec
            self._report(key[0], new.job, urgent)

    def record(self, kind: Kind, document: JsonObject) -> None:
        """Store an object from an answer to the operator's own request; nothing is reported."""
        self._put(kind, document)

    def remove(self, kind: Kind, document: JsonObject) -> None:
        """Remove an object that a watch reports as deleted or no longer selected.

        Args:
            kind: Kind of the object.
            document: Its last state.
        """
        metadata = document["metadata"]
        key, uid = (str(metadata["namespace"]), str(metadata["name"])), str(metadata["uid"])
        self._deleted[uid] = str(metadata.get("resourceVersion") or "")
        if len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        stored = self._objects[kind].get(key)
        if stored is not None and stored.uid == uid:
            self._evict(kind, key, stored)

    def discard(self, kind: Kind, key: JobKey) -> None:
        """Remove an object that a GET did not find; nothing is reported.

        Args:
            kind: Kind of the object.
            key: Its namespace and name.
        """
        stored = self._objects[kind].pop(key, None)
        if stored is not None:
            self._forget(kind, key, stored)

    def listed(self, source: WatchSource, uids: set[str], began: float) -> None:
        """Remove what a complete list of the source lacks; the first one may start decisions.

        Args:
            source: The watch that has listed.
            uids: uids of all listed objects.
            began: When the list was requested: an object stored since then may be newer.
        """
        ghosts = [
            (key, s)
            for key, s in self._objects[source.kind].items()
            if source.namespace in (None, key[0]) and s.uid not in uids and s.at < began
        ]
        for key, stored in ghosts:
            self._evict(source.kind, key, stored)
        if source not in self._unseen:
            return
        self._unseen.discard(source)
        # Jobs without a status first: they wait for their first attempt.
        waiting = sorted(
            (key for key in self._objects[Kind.JOB] if source.namespace in (None, key[0])),
            key=lambda key: b'"status"' in self._objects[Kind.JOB][key].body,
        )
        for key in waiting:
            if self.synced(key[0]):
                self._changed(key, True)

    def get_job(self, namespace: str, name: str) -> JsonObject | None:
        """Return a LoraTrainingJob without its managed fields, or None."""
        return self._get(Kind.JOB, (namespace, name))

    def children_of(self, namespace: str, uid: str) -> list[JsonObject]:
        """Return the batch/v1 Jobs whose controller has this uid."""
        return list(self._members(Kind.CHILD, (namespace, uid)))

    def pods_of(self, namespace: str, family: str) -> list[JsonObject]:
        """Return the pods whose Job's name is of this family; see `family_of`."""
        return list(self._members(Kind.POD, (namespace, family)))

    def is_new(self, uid: str) -> bool:
        """Return whether the job was created under this watch and had no status since."""
        return uid in self._new

    def versions(self, source: WatchSource) -> dict[JobKey, tuple[str, str, float]]:
        """Return uid, resourceVersion and time of arrival of each object of a source."""
        return {
            key: (s.uid, s.version, s.at)
            for key, s in self._objects[source.kind].items()
            if source.namespace in (None, key[0])
        }

    def was_deleted(self, uid: str) -> bool:
        """Return whether a watch has reported this object as deleted or no longer selected."""
        return uid in self._deleted

    def __len__(self) -> int:
        return sum(len(objects) for objects in self._objects.values())

    def _put(
        self, kind: Kind, document: JsonObject
    ) -> tuple[JobKey, _Stored | None, _Stored | None]:
        """Store a document; return its key, what was stored before and, unless older, after."""
        metadata = document["metadata"]
        key, uid = (str(metadata["namespace"]), str(metadata["name"])), str(metadata["uid"])
        version, old = str(metadata.get("resourceVersion") or ""), self._objects[kind].get(key)
        if old is not None and not is_newer(version, old.version):
            return key, old, None
        if uid in self._deleted and not is_newer(version, self._deleted[uid]):
            return key, old, None
        new = _Stored(
            uid,
            version,
            self._clock(),
            job_of(kind, document),
            json.dumps(trim(kind, document), separators=(",", ":")).encode(),
            (uid, metadata.get("generation"), metadata.get("deletionTimestamp")),
            _group_of(kind, document, key[0]),
        )
        if old is not None:
            self._forget(kind, key, old)
        if kind is Kind.JOB and (document.get("status") or old is None):
            self._new.discard(uid)
        self._objects[kind][key] = new
        if new.group:
            self._groups[kind][new.group].add(key)
        return key, old, new

    def _evict(self, kind: Kind, key: JobKey, stored: _Stored) -> None:
        del self._objects[kind][key]
        self._forget(kind, key, stored)
        self._report(key[0], stored.job, True)

    def _forget(self, kind: Kind, key: JobKey, stored: _Stored) -> None:
        if kind is Kind.JOB and key not in self._objects[kind]:
            self._new.discard(stored.uid)
        if stored.group:
            members = self._groups[kind][stored.group]
            members.discard(key)
            if not members:
                del self._groups[kind][stored.group]

    def _report(self, namespace: str, job: str | None, urgent: bool) -> None:
        if job and self.synced(namespace):
            self._changed((namespace, job), urgent)

    def _get(self, kind: Kind, key: JobKey) -> JsonObject | None:
        stored = self._objects[kind].get(key)
        if stored is None:
            return None
        document: JsonObject = json.loads(stored.body)
        document["metadata"]["resourceVersion"] = stored.version
        return document

    def _members(self, kind: Kind, group: tuple[str, str]) -> Iterator[JsonObject]:
        for key in sorted(self._groups[kind].get(group, ())):
            document = self._get(kind, key)
            if document is not None:
                yield document


def is_newer(version: str, than: str) -> bool:
    """Return whether a resourceVersion is newer than another of the same resource.

    The API server counts them up; what it does not number is taken as newer if it differs.

    Args:
        version: The resourceVersion.
        than: The one to compare with.
    """
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than


def _group_of(kind: Kind, document: JsonObject, namespace: str) -> tuple[str, str] | None:
    if kind is Kind.JOB:
        return None
    owner = controller_of(document, names.KIND if kind is Kind.CHILD else "Job")
    if owner is None:
        return None
    return namespace, str(owner.get("uid") if kind is Kind.CHILD else family_of(str(owner["name"])))

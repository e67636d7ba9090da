"""Application of a plan, in an order in which a crash between two steps does no harm.

The single status update, then deletes, then creates, then Events. The status update carries uid and
resourceVersion, so a plan made from a stale snapshot fails there and neither deletes nor creates.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from kubelora_api import names
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus
from kubelora_operator.attempt.manifests import (
    build_config_map,
    build_job,
    build_service,
    child_name,
)
from kubelora_operator.attempt.network_policy import NetworkSettings, build_network_policy
from kubelora_operator.controller.convert import owned_by
from kubelora_operator.controller.object_store import ObjectStore
from kubelora_operator.controller.parsing import parse_status
from kubelora_operator.controller.snapshot_reader import FetchedJob
from kubelora_operator.controller.trim import Kind
from kubelora_operator.decision.conditions import format_time, truncate_message
from kubelora_operator.decision.decide import KEPT_ATTEMPTS
from kubelora_operator.decision.plan import JobEvent, ReconcilePlan
from kubelora_operator.decision.snapshot import Explanation, Snapshot
from kubelora_operator.kube.client import ApiError, AttemptKind, Cluster

log = logging.getLogger(__name__)
_EVENT_MESSAGE_MAX: Final = 1024
"""The API server refuses a longer note in an Event."""
_REMEMBERED_EVENTS: Final = 1024
"""Counts of equal Events are lost beyond this, not the Events; a few hundred KiB."""
_REJECTED_CODES: Final = frozenset({400, 403, 404, 409, 413, 422})
"""HTTP codes of a rejected create that the user must fix: quota, policy, an invalid template."""
_REFUSED_DELETES: Final = frozenset({400, 403, 422})
"""HTTP codes of a delete that a policy or missing rights refuse."""

_Create = Callable[[JsonObject], Awaitable[JsonObject]]
_Get = Callable[[str, str], Awaitable[JsonObject | None]]


class StaleSnapshotError(Exception):
    """The job has changed since the snapshot was taken; reconcile again."""


@dataclass(frozen=True)
class ApplyResult:
    """The result of applying a plan.

    document: The job as last written.
    rejection: Why the children could not be created.
    """

    document: JsonObject
    rejection: Explanation | None = None


class PlanApplier:
    """Applies plans; the API server's answers go into the store.

    trainer_image: Image for jobs that do not set one.
    network: Settings for the NetworkPolicy of an attempt; None for no NetworkPolicy.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        trainer_image: str,
        identity: str,
        network: NetworkSettings | None = None,
    ) -> None:
        self._cluster, self._store = cluster, store
        self._image, self._identity = trainer_image, identity
        self._network = network
        self._counts: OrderedDict[str, int] = OrderedDict()

    async def apply(
        self, fetched: FetchedJob, plan: ReconcilePlan, now: datetime, *, hold: bool = False
    ) -> ApplyResult:
        """Apply the plan.

        Args:
            fetched: The job that the plan was made for.
            plan: The changes to make.
            now: Time recorded in Events.
            hold: Whether the change of the status can wait for a later write.

        Returns:
            The job as last written, and why its children were rejected, if they were.

        Raises:
            StaleSnapshotError: The job has changed since; the queue retries.
            ApiError: A request failed; the queue retries.
        """
        snapshot = fetched.snapshot
        document = fetched.document
        # Update the status before a delete or create even if nothing changed: the update's
        # resourceVersion proves that the snapshot is current. The server stores nothing then.
        deletes = plan.delete or plan.force_delete or plan.delete_job
        acts = plan.create is not None or deletes
        if acts or (not hold and plan.status != snapshot.status):
            document = await self._write_status(document, plan)
        await self._delete(snapshot, plan, now)
        if plan.delete_job:
            await self._delete_job(snapshot, document, now)
        rejection = None
        if plan.create is not None and fetched.job is not None:
            rejection = await self._create(fetched, plan.create, plan.status)
        for event in plan.events:
            await self._record_event(snapshot, event, now)
        return ApplyResult(document, rejection)

    async def _write_status(self, document: JsonObject, plan: ReconcilePlan) -> JsonObject:
        try:
            return await self._put(document, plan.status)
        except ApiError as error:
            if error.code in (404, 409):
                raise StaleSnapshotError(error.message) from error
            plain = without_reports(plan.status, parse_status(document))
            if error.code not in (400, 422) or plain == plan.status:
                raise
            log.warning("status refused, writing it without the pods' reports: %s", error)
        return await self._put(document, plain)

    async def _put(self, document: JsonObject, status: JobStatus) -> JsonObject:
        answer = await self._cluster.put_status(document | {"status": status.document()})
        self._store.record(Kind.JOB, answer)
        return answer

    async def _delete(self, snapshot: Snapshot, plan: ReconcilePlan, now: datetime) -> None:
        """Delete Jobs and pods; a refusal is an Event, and the queue retries."""
        namespace = snapshot.namespace
        requests = [
            (f"pod {p.name} by force", self._cluster.force_delete_pod, p.name, p.uid)
            for p in plan.force_delete
        ] + [(f"Job {c.name}", self._cluster.delete_child, c.name, c.uid) for c in plan.delete]
        for what, delete, name, uid in requests:
            log.info("deleting %s", what)
            try:
                await delete(namespace, name, uid)
            except ApiError as error:
                if error.code in _REFUSED_DELETES:
                    message = f"the API server refused to delete {what}: {error.message}"
                    event = JobEvent("Warning", "DeleteRefused", message)
                    await self._record_event(snapshot, event, now)
                raise

    async def _delete_job(self, snapshot: Snapshot, document: JsonObject, now: datetime) -> None:
        log.info("deleting the finished job: spec.ttlSecondsAfterFinished has passed")
        try:
            await self._cluster.delete_job(document)
        except ApiError as error:
            if error.code in _REFUSED_DELETES:
                message = f"the API server refused to delete the finished job: {error.message}"
                await self._record_event(
                    snapshot, JobEvent("Warning", "DeleteRefused", message), now
                )
            raise

    async def _create(
        self, fetched: FetchedJob, attempt: int, status: JobStatus
    ) -> Explanation | None:
        """Create the attempt's objects, the Job last; existing ones are left unchanged."""
        assert fetched.job is not None
        snapshot, cluster = fetched.snapshot, self._cluster
        child = build_job(fetched.job, attempt, self._image, status.avoided_nodes)
        try:
            await self._delete_obsolete(snapshot, attempt)
            for manifest in self._manifests(fetched.job, attempt):
                create = partial(cluster.create_object, manifest["kind"])
                get = partial(cluster.get_object, manifest["kind"])
                found = await _ensure(manifest, create, get)
                if found and not owned_by(found, snapshot.uid):
                    return _name_taken(manifest["kind"], manifest["metadata"]["name"])
            found = await _ensure(child, cluster.create_child, cluster.get_child)
            if found and not owned_by(found, snapshot.uid):
                return _name_taken("Job", child["metadata"]["name"])
            if found:
                self._store.record(Kind.CHILD, found)
        except ApiError as error:
            if error.code not in _REJECTED_CODES:
                raise
            return Explanation(
                "Rejected", f"the API server rejected the attempt's objects: {error.message}"
            )
        log.info("attempt %d: Job %s exists", attempt, child["metadata"]["name"])
        return None

    def _manifests(self, job: LoraTrainingJob, attempt: int) -> Iterator[JsonObject]:
        """Yield what the attempt's Job needs, in the order of its creation."""
        yield build_config_map(job, attempt)
        if self._network:  # before the pods, so that they are never without it
            yield build_network_policy(job, attempt, self._network)
        if service := build_service(job, attempt):
            yield service

    async def _delete_obsolete(self, snapshot: Snapshot, attempt: int) -> None:
        """Delete what the oldest attempt had whose Job is not kept any more.

        The first attempt's ConfigMap stays: it shows that the job was started if all else is lost.
        """
        obsolete = attempt - KEPT_ATTEMPTS
        if obsolete < 1:
            return
        name = child_name(snapshot.name, snapshot.uid, obsolete)
        kinds: tuple[AttemptKind, ...] = ("ConfigMap", "NetworkPolicy", "Service")
        for kind in kinds[1:] if obsolete == 1 else kinds:
            try:
                found = await self._cluster.get_object(kind, snapshot.namespace, name)
                if found and owned_by(found, snapshot.uid):
                    await self._cluster.delete_object(kind, found)
            except ApiError as error:
                if error.code not in _REFUSED_DELETES:
                    raise
                log.warning("can't delete %s %s: %s", kind, name, error)

    async def _record_event(self, snapshot: Snapshot, event: JobEvent, now: datetime) -> None:
        """Record an Event on the job, or raise the count of the same one. Never fails a plan."""
        key = f"{snapshot.uid}/{event.reason}/{event.message}"
        name = f"{snapshot.name}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED_EVENTS:
            self._counts.popitem(last=False)
        try:
            try:
                await self._cluster.create_event(self._event_manifest(snapshot, event, name, now))
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                patch = {"count": count, "lastTimestamp": format_time(now)}
                await self._cluster.patch_event(snapshot.namespace, name, patch)
        except ApiError as error:
            log.warning("failed to record the Event %s: %s", event.reason, error)

    def _event_manifest(
        self, snapshot: Snapshot, event: JobEvent, name: str, now: datetime
    ) -> JsonObject:
        stamp = format_time(now)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": snapshot.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": snapshot.namespace,
                "name": snapshot.name,
                "uid": snapshot.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": truncate_message(event.message)[:_EVENT_MESSAGE_MAX],
            "source": {"component": names.OPERATOR_APP},
            "reportingComponent": f"{names.GROUP}/{names.OPERATOR_APP}",
            "reportingInstance": self._identity,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }


def without_reports(status: JobStatus, old: JobStatus) -> JobStatus:
    """Return the status with what pods reported left as it was.

    What a pod reports must not keep the operator from writing what it decided.
    """
    reported = ("progress", "health", "checkpoint", "artifacts")
    return status.model_copy(update={name: getattr(old, name) for name in reported})


async def _ensure(manifest: JsonObject, create: _Create, get: _Get) -> JsonObject | None:
    """Create the object; return what has its name now, None if that is already gone again."""
    try:
        return await create(manifest)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
    return await get(manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def _name_taken(kind: str, name: str) -> Explanation:
    return Explanation(
        "NameTaken",
        f"{kind} {name} exists but is not owned by this job: delete it and the job continues",
    )

"""The reader of a job's snapshot: its resource, its Jobs and pods, and the pods' own reports.

The only module that reads for a decision. It reads from the store that the watches feed; the API
server is asked only to confirm what a watch may have missed, before anything is called gone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus
from kubelora_operator.attempt.manifests import child_name
from kubelora_operator.controller.convert import (
    child_from,
    node_state_from,
    owned_by,
    pod_from,
)
from kubelora_operator.controller.object_store import ObjectStore
from kubelora_operator.controller.parsing import ParsedJobs
from kubelora_operator.controller.report_pool import Report, ReportPool
from kubelora_operator.controller.trim import Kind, family_of
from kubelora_operator.controller.warnings import Warnings
from kubelora_operator.decision.conditions import (
    COMPLETE,
    FAILED,
    RESTARTING,
    SUSPENDED,
)
from kubelora_operator.decision.snapshot import (
    Child,
    JobKey,
    NodeState,
    Snapshot,
    TrainerPod,
    blocking_pod,
    reporting_pod,
)
from kubelora_operator.kube.client import ApiError, Cluster

_ENDED: Final = (COMPLETE, FAILED, RESTARTING, SUSPENDED)
"""Conditions with which the current attempt's Job may be gone."""


@dataclass(frozen=True)
class FetchedJob:
    """A job's snapshot, with the documents needed to apply a plan.

    job: None if the resource is invalid.
    look_again: Seconds after which to ask for the cluster's warnings, if the job waits for them.
    """

    snapshot: Snapshot
    document: JsonObject
    job: LoraTrainingJob | None
    look_again: float | None = None


class SnapshotReader:
    """Reads the store, and what the pods have reported."""

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        reports: ReportPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._store, self._reports = cluster, store, reports
        self._parsed, self._warnings = ParsedJobs(), Warnings(cluster, clock)

    def ready(self, namespace: str) -> bool:
        """Return whether the store has everything for a decision in this namespace."""
        return self._store.synced(namespace)

    async def refresh(self, key: JobKey) -> None:
        """Replace a job in the store that has turned out to be stale by the API server's."""
        document = await self._cluster.get_job(*key)
        if document is None:
            self._store.discard(Kind.JOB, key)
        else:
            self._store.record(Kind.JOB, document)

    async def read(self, namespace: str, name: str, now: datetime) -> FetchedJob | None:
        """Read everything about a job; None if it does not exist.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            now: Current time, to judge the age of reports and warnings.
        """
        document = self._store.get_job(namespace, name)
        if document is None:
            self._reports.forget((namespace, name))
            self._warnings.forget((namespace, name))
            return None
        uid = str(document["metadata"]["uid"])
        raw_children = self._store.children_of(namespace, uid)
        raw_pods = self._store.pods_of(namespace, family_of(child_name(name, uid, 1)))
        parsed = self._parsed.parse(document)
        job, status = parsed.job, parsed.status
        children = tuple(c for d in raw_children if (c := child_from(d, name, uid)))
        children += await self._unlisted(namespace, name, uid, status, children)
        owners = frozenset(c.uid for c in children) | (
            {status.child_uid} if status.child_uid else set()
        )
        pods = tuple(
            p for d in sorted(raw_pods, key=_creation_time) if (p := pod_from(d, name, uid, owners))
        )
        snapshot = Snapshot(
            namespace=namespace,
            name=name,
            uid=uid,
            generation=int(document["metadata"].get("generation") or 0),
            spec=job.spec if job else None,
            suspend=_suspend(document),
            status=status,
            status_problems=parsed.status_problems,
            problems=parsed.problems,
            deleting="deletionTimestamp" in document["metadata"],
            children=children,
            pods=pods,
            config_map_attempts=await self._anchors(namespace, name, uid)
            if status.attempt == 0 and not self._store.is_new(uid)
            else frozenset(),
        )
        snapshot = replace(snapshot, pods=await self._with_nodes(pods, now))
        snapshot = replace(snapshot, report=self._report(snapshot))
        snapshot, look_again = await self._with_warning(snapshot, now)
        return FetchedJob(snapshot, document, job, look_again)

    def acknowledge(self, snapshot: Snapshot) -> None:
        """Mark the snapshot's report as recorded; until then it is read again."""
        if snapshot.report is not None:
            self._reports.acknowledge((snapshot.namespace, snapshot.name), snapshot.report)

    async def _anchors(self, namespace: str, name: str, uid: str) -> frozenset[int]:
        """Return the attempts whose ConfigMap exists, counted from 1.

        They survive when the status is lost. A job that was created under this watch and has had
        no status since lost none, so it is not asked for.
        """
        found: set[int] = set()
        while True:
            attempt = len(found) + 1
            config_map = await self._cluster.get_config_map(
                namespace, child_name(name, uid, attempt)
            )
            if config_map is None or not owned_by(config_map, uid):
                return frozenset(found)
            found.add(attempt)

    async def _unlisted(
        self,
        namespace: str,
        name: str,
        uid: str,
        status: JobStatus,
        listed: tuple[Child, ...],
    ) -> tuple[Child, ...]:
        """Return the current attempt's Job if the store lacks it although it exists.

        The watch selects by labels, which anyone can change, and may have missed an event; only the
        name shows that the Job is gone.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            uid: Its uid.
            status: Its status.
            listed: The Jobs in the store.
        """
        attempt = status.attempt
        ended = any(c.status == "True" and c.type in _ENDED for c in status.conditions)
        if attempt == 0 or ended or any(c.attempt == attempt for c in listed):
            return ()
        document = await self._cluster.get_child(namespace, child_name(name, uid, attempt))
        child = child_from(document, name, uid) if document else None
        return (child,) if child else ()

    async def _with_nodes(
        self, pods: tuple[TrainerPod, ...], now: datetime
    ) -> tuple[TrainerPod, ...]:
        """Add the state of its node to each pod that should be gone."""
        return tuple(
            [
                replace(p, node=await self._node_state(p.node_name))
                if p.node_name and p.overdue(now)
                else p
                for p in pods
            ]
        )

    async def _node_state(self, name: str) -> NodeState:
        try:
            return node_state_from(name, await self._cluster.get_node(name))
        except ApiError as error:
            if error.code != 403:
                raise
            return NodeState(None, f"the operator has no right to read its node {name}")

    async def _with_warning(
        self, snapshot: Snapshot, now: datetime
    ) -> tuple[Snapshot, float | None]:
        """Add the cluster's warning about what does not start; return when to ask again, too."""
        key, child = (snapshot.namespace, snapshot.name), _running_child(snapshot)
        if child is not None and not snapshot.pods_of(child.attempt):
            found, wait = await self._warnings.about(key, child.uid, "PodNotCreated", now)
            return (replace(snapshot, rejection=found) if found else snapshot), wait
        pod = blocking_pod(_writing_pods(snapshot, child)) if child else None
        if pod is None or pod.waiting is not None:
            self._warnings.forget(key)
            return snapshot, None
        waiting, wait = await self._warnings.about(key, pod.uid, "PodNotStarted", now)
        if waiting is None:
            return snapshot, wait
        pods = tuple(replace(p, waiting=waiting) if p is pod else p for p in snapshot.pods)
        return replace(snapshot, pods=pods), wait

    def _report(self, snapshot: Snapshot) -> Report | None:
        """Return the running pod's report; None if there is no new one."""
        key = (snapshot.namespace, snapshot.name)
        child = _running_child(snapshot)
        pods = _writing_pods(snapshot, child) if child else []
        pod = reporting_pod(pods)
        if pod is None or blocking_pod(pods) is not None:
            self._reports.forget(key)
            return None
        return self._reports.read(key, snapshot.uid, pod)


def _running_child(snapshot: Snapshot) -> Child | None:
    """Return the newest live Job unless its pods are held back or ending."""
    child = snapshot.child_of(max((c.attempt for c in snapshot.children if c.live), default=0))
    return None if child is None or child.suspended or child.deleting else child


def _writing_pods(snapshot: Snapshot, child: Child) -> list[TrainerPod]:
    return [p for p in snapshot.pods_of(child.attempt) if p.writing and not p.deleting]


def _suspend(document: JsonObject) -> bool:
    spec = document.get("spec")
    return isinstance(spec, dict) and spec.get("suspend") is True


def _creation_time(document: JsonObject) -> str:
    return str(document["metadata"].get("creationTimestamp") or "")

"""The reader of a job's snapshot: its resource, its Jobs and pods, and the pods' own reports.

The only module that reads the cluster for a decision. Everything is fetched again each time, so the
operator holds no state that a restart could lose; only a pod's report is what the pool heard last.
"""

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from pydantic import ValidationError

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus
from kubelora_operator.attempt.manifests import child_name
from kubelora_operator.controller.convert import (
    child_from,
    node_state_from,
    owned_by,
    pod_from,
    warning_from,
)
from kubelora_operator.controller.report_pool import Report, ReportPool
from kubelora_operator.decision.conditions import (
    COMPLETE,
    FAILED,
    RESTARTING,
    SUSPENDED,
)
from kubelora_operator.decision.snapshot import (
    Child,
    Explanation,
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
    """

    snapshot: Snapshot
    document: JsonObject
    job: LoraTrainingJob | None


class SnapshotReader:
    """Reads the cluster, and what the pods have reported."""

    def __init__(self, cluster: Cluster, reports: ReportPool) -> None:
        self._cluster, self._reports = cluster, reports

    async def read(self, namespace: str, name: str, now: datetime) -> FetchedJob | None:
        """Read everything about a job; None if it does not exist.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            now: Current time, to judge the age of reports and warnings.
        """
        document = await self._cluster.get_job(namespace, name)
        if document is None:
            self._reports.forget((namespace, name))
            return None
        uid = str(document["metadata"]["uid"])
        raw_children, raw_pods = await asyncio.gather(
            self._cluster.children_of(namespace, uid), self._cluster.pods_of(namespace, uid)
        )
        job, problems = parse_resource(document)
        status = parse_status(document)
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
            status_problems=status_problems(document),
            problems=problems,
            deleting="deletionTimestamp" in document["metadata"],
            children=children,
            pods=pods,
            config_map_attempts=await self._anchors(namespace, name, uid)
            if status.attempt == 0
            else frozenset(),
        )
        snapshot = replace(snapshot, pods=await self._with_nodes(pods, now))
        snapshot = replace(snapshot, report=self._report(snapshot))
        return FetchedJob(await self._with_warning(snapshot, now), document, job)

    def acknowledge(self, snapshot: Snapshot) -> None:
        """Mark the snapshot's report as recorded; until then it is read again."""
        if snapshot.report is not None:
            self._reports.acknowledge((snapshot.namespace, snapshot.name), snapshot.report)

    async def _anchors(self, namespace: str, name: str, uid: str) -> frozenset[int]:
        """Return the attempts whose ConfigMap exists, counted from 1.

        They survive when the status is lost.
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
        """Return the current attempt's Job if the list lacks it although it exists.

        The list is selected by labels, which anyone can change; only the name shows that the Job is
        gone.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            uid: Its uid.
            status: Its status.
            listed: The Jobs that were found by their labels.
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

    async def _with_warning(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """Add the cluster's warning about a pod that does not start."""
        child = _running_child(snapshot)
        if child is None:
            return snapshot
        if not snapshot.pods_of(child.attempt):
            explanation = await self._warning(snapshot.namespace, child.uid, "PodNotCreated", now)
            return replace(snapshot, rejection=explanation) if explanation else snapshot
        pod = blocking_pod(_writing_pods(snapshot, child))
        if pod is not None and pod.waiting is None:
            waiting = await self._warning(snapshot.namespace, pod.uid, "PodNotStarted", now)
            if waiting:
                updated = tuple(
                    replace(p, waiting=waiting) if p is pod else p for p in snapshot.pods
                )
                return replace(snapshot, pods=updated)
        return snapshot

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

    async def _warning(
        self, namespace: str, uid: str, reason: str, now: datetime
    ) -> Explanation | None:
        text = warning_from(await self._cluster.warnings_about(namespace, uid), now)
        return Explanation(reason, text) if text else None


def parse_resource(document: JsonObject) -> tuple[LoraTrainingJob | None, tuple[str, ...]]:
    """Parse the resource without its status; return the job, or None and the violations."""
    try:
        return parse_job({k: v for k, v in document.items() if k != "status"}), ()
    except InvalidDocumentError as error:
        return None, tuple(str(p) for p in error.problems)


def parse_status(document: JsonObject) -> JobStatus:
    """Parse the status; an empty one if there is none or `status_problems` finds any."""
    raw = document.get("status")
    if not isinstance(raw, dict) or status_problems(document):
        return JobStatus()
    return JobStatus.model_validate(raw)


def status_problems(document: JsonObject) -> tuple[str, ...]:
    """Return what can't be read in the status, as field and reason.

    A newer operator may have written it; acting without it would run finished work again.
    """
    try:
        JobStatus.model_validate(document.get("status") or {})
    except ValidationError as error:
        return tuple(
            f"{'.'.join(['status', *map(str, e['loc'])])}: {e['msg']}" for e in error.errors()
        )
    return ()


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

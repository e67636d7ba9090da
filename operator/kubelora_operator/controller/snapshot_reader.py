"""Gather what is known about one job: its resource, its Jobs and pods, and the pods' own reports.

The only place that reads. Everything is fetched anew each time, so the operator holds no state that
a restart could lose.
"""

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import aiohttp

from kubelora_api.documents import InvalidDocument, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.report import RunReport
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus
from kubelora_operator.attempt.manifests import child_name
from kubelora_operator.controller import pod_reports as reports
from kubelora_operator.controller.convert import child_from, owned_by, pod_from, warning_from
from kubelora_operator.decision.conditions import time_of
from kubelora_operator.decision.snapshot import (
    Observation,
    TrainerPod,
    Unreachable,
    Why,
    laggard,
    speaker,
)
from kubelora_operator.kube.client import Cluster


@dataclass(frozen=True)
class Sight:
    """An observation, with the documents that acting on it needs.

    job: None where the resource breaks our own rules.
    """

    seen: Observation
    document: JsonObject
    job: LoraTrainingJob | None


class Observer:
    """Reads the cluster and the pods. ``poll``: a pod is asked no more often than this."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, poll: timedelta) -> None:
        self._cluster, self._session, self._poll = cluster, session, poll

    async def look(self, namespace: str, name: str, now: datetime) -> Sight | None:
        """All that is known of a job; None where it does not exist."""
        document = await self._cluster.get_job(namespace, name)
        if document is None:
            return None
        uid = str(document["metadata"]["uid"])
        raw_children, raw_pods = await asyncio.gather(
            self._cluster.children_of(namespace, uid), self._cluster.pods_of(namespace, uid)
        )
        children = tuple(c for d in raw_children if (c := child_from(d, name, uid)))
        pods = tuple(p for d in sorted(raw_pods, key=_age) if (p := pod_from(d, name, uid)))
        job, problems = read_job(document)
        status = read_status(document)
        seen = Observation(
            namespace=namespace,
            name=name,
            uid=uid,
            generation=int(document["metadata"].get("generation") or 0),
            spec=job.spec if job else None,
            suspend=_suspend(document),
            status=status,
            problems=problems,
            deleting="deletionTimestamp" in document["metadata"],
            children=children,
            pods=pods,
            anchors=await self._anchors(namespace, name, uid)
            if status.attempt == 0
            else frozenset(),
        )
        return Sight(await self._with_words(seen, now), document, job)

    async def _anchors(self, namespace: str, name: str, uid: str) -> frozenset[int]:
        """Attempts whose ConfigMap exists, counted up from 1: what survives a wiped status."""
        found: set[int] = set()
        while True:
            attempt = len(found) + 1
            config_map = await self._cluster.get_config_map(
                namespace, child_name(name, uid, attempt)
            )
            if config_map is None or not owned_by(config_map, uid):
                return frozenset(found)
            found.add(attempt)

    async def _with_words(self, seen: Observation, now: datetime) -> Observation:
        """Add what the running pod says, or what the cluster says of one that does not start."""
        child = seen.child_of(max((c.attempt for c in seen.children if c.live), default=0))
        if child is None or child.suspended or child.deleting:
            return seen
        pods = [p for p in seen.pods_of(child.attempt) if p.live and not p.deleting]
        if not pods:
            why = await self._warning(seen.namespace, child.uid, "PodNotCreated", now)
            return replace(seen, rejection=why) if why else seen
        first, pod = speaker(pods), laggard(pods)
        if first is not None and pod is None:
            return replace(seen, report=await self._report(seen, first, now))
        if pod is not None and pod.stuck is None:
            stuck = await self._warning(seen.namespace, pod.uid, "PodNotStarted", now)
            if stuck:
                mended = tuple(replace(p, stuck=stuck) if p is pod else p for p in seen.pods)
                return replace(seen, pods=mended)
        return seen

    async def _report(
        self, seen: Observation, pod: TrainerPod, now: datetime
    ) -> RunReport | Unreachable | None:
        """None where the pod was asked a moment ago: pod events must not become a flood."""
        progress = seen.status.progress
        if progress and progress.last_report_time and seen.status.attempt == pod.attempt:
            # Times in a status have whole seconds.
            age = now - time_of(progress.last_report_time)
            if timedelta() <= age < self._poll - timedelta(seconds=1):
                return None
        return await reports.ask(self._session, pod, seen.uid)

    async def _warning(self, namespace: str, uid: str, reason: str, now: datetime) -> Why | None:
        text = warning_from(await self._cluster.warnings_about(namespace, uid), now)
        return Why(reason, text) if text else None


def read_job(document: JsonObject) -> tuple[LoraTrainingJob | None, tuple[str, ...]]:
    """The resource as a typed job, or what is wrong with it. The status is judged apart."""
    try:
        return parse_job({k: v for k, v in document.items() if k != "status"}), ()
    except InvalidDocument as error:
        return None, tuple(str(p) for p in error.problems)


def read_status(document: JsonObject) -> JobStatus:
    """The status; what can't be read of it is taken as not there, all but the attempt's number."""
    raw = document.get("status")
    if not isinstance(raw, dict):
        return JobStatus()
    try:
        return JobStatus.model_validate(raw)
    except ValueError:
        attempt = raw.get("attempt")
        whole = isinstance(attempt, int) and not isinstance(attempt, bool) and attempt > 0
        return JobStatus(attempt=attempt if whole else 0)


def _suspend(document: JsonObject) -> bool:
    spec = document.get("spec")
    return isinstance(spec, dict) and spec.get("suspend") is True


def _age(document: JsonObject) -> str:
    return str(document["metadata"].get("creationTimestamp") or "")

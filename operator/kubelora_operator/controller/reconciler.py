"""The reconciler: take a snapshot of a job, decide, apply the plan. Run by every queue worker."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kubelora_api import names
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_operator.admission.check import refusals_of
from kubelora_operator.admission.policy import DEFAULT_POLICY, PodPolicy
from kubelora_operator.controller.apply import PlanApplier, StaleSnapshotError
from kubelora_operator.controller.create_pacer import CreatePacer, Creation
from kubelora_operator.controller.parsing import parse_status
from kubelora_operator.controller.snapshot_reader import FetchedJob, SnapshotReader
from kubelora_operator.controller.status_pacer import StatusPacer
from kubelora_operator.controller.workqueue import WorkQueue
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Explanation, JobKey
from kubelora_operator.kube.client import ApiError
from kubelora_operator.observability.logging import job_log_context
from kubelora_operator.observability.metrics import OperatorMetrics

log = logging.getLogger(__name__)
_FIRST_CONFLICT: Final = 0.2
"""Seconds: a conflict is usually gone with the next look."""
_LONGEST_REJECTED: Final = 300.0
"""Seconds: a refusal lasts until somebody changes a policy, a quota or the spec."""


_AFTER_CREATE: Final = 5.0
"""Seconds: the events of the new Job and its pods come earlier, unless none can be created."""


def utc_now() -> datetime:
    """Return the current time in whole seconds, as conditions record it."""
    return datetime.now(UTC).replace(microsecond=0)


class Reconciler:
    """Reconciles jobs, one at a time per worker.

    poll: Returns the seconds between two reads of a running pod's progress.
    progress_seconds: Seconds between two writes of a job's progress.
    """

    def __init__(
        self,
        reader: SnapshotReader,
        applier: PlanApplier,
        metrics: OperatorMetrics,
        poll: Callable[[], float],
        progress_seconds: float = 30.0,
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        policy: PodPolicy = DEFAULT_POLICY,
    ) -> None:
        self._reader, self._applier, self._metrics = reader, applier, metrics
        self._poll, self._now, self._policy = poll, now, policy
        self._refusals: dict[JobKey, tuple[LoraTrainingJob, tuple[str, ...]]] = {}
        self._creates, self._pacer = CreatePacer(clock), StatusPacer(progress_seconds, clock)

    async def work(self, queue: WorkQueue[JobKey]) -> None:
        """Process jobs from the queue forever. No failure of a job ends a worker."""
        while True:
            key = await queue.get()
            self._metrics.queue_depth.set(len(queue))
            began = time.monotonic()
            with job_log_context(*key):
                result = await self._reconcile_and_requeue(queue, key)
            self._metrics.duration.observe(time.monotonic() - began)
            self._metrics.reconciles.labels(result=result).inc()

    async def _reconcile_and_requeue(self, queue: WorkQueue[JobKey], key: JobKey) -> str:
        try:
            requeue_after, rejected = await self._reconcile(key)
        except StaleSnapshotError as error:
            await self._refresh(key)
            delay = queue.failed(key, first=_FIRST_CONFLICT)
            log.debug("the snapshot was stale, reconciling again in %.1f s: %s", delay, error)
            return "stale"
        except ApiError as error:
            delay = queue.failed(key, at_least=error.retry_after or 0.0)
            log.warning("API request failed, retrying in %.0f s: %s", delay, error)
            return "api_error"
        except Exception:
            delay = queue.failed(key)
            log.exception("unexpected error, retrying in %.0f s", delay)
            return "error"
        if rejected:
            delay = queue.failed(key, longest=_LONGEST_REJECTED)
            log.warning("%s; retrying in %.0f s", rejected.message, delay)
            return "rejected"
        queue.done(key, requeue_after)
        return "ok"

    async def _reconcile(self, key: JobKey) -> tuple[float | None, Explanation | None]:
        """Reconcile once; return the seconds until the next time, and a rejection if any."""
        if not self._reader.ready(key[0]):
            return None, None  # the first complete lists make the job due
        now, poll = self._now(), timedelta(seconds=self._poll())
        fetched = await self._reader.read(*key, now)
        if fetched is None:
            self._forget(key)
            return None, None
        if fetched.job is not None:
            refusals = self._refusals_of(key, fetched.job)
            fetched = replace(fetched, snapshot=replace(fetched.snapshot, refusals=refusals))
        plan = decide(fetched.snapshot, now, poll)
        wait = 0.0
        if plan.create is not None:
            wait = self._creates.wait(key, _creation(fetched, plan.create))
            plan = replace(plan, create=None) if wait > 0 else plan
        held = self._pacer.wait(key, fetched.snapshot.status, plan.status)
        with job_log_context(*key, plan.status.attempt):
            for event in plan.events:
                log.info("%s: %s", event.reason, event.message)
            outcome = await self._applier.apply(fetched, plan, now, hold=held > 0)
            self._metrics.set_job(
                key, plan.status, fetched.snapshot.spec, _acknowledgement(fetched)
            )
            if held == 0 or outcome.document is not fetched.document:
                self._reader.acknowledge(fetched.snapshot)
            self._pace(key, fetched, outcome.document, plan.status.completion_time)
            if outcome.rejection:
                await self._record_rejection(fetched, outcome.document, outcome.rejection, now)
                return None, outcome.rejection
        if wait > 0:
            return wait, None
        if plan.create is not None:
            self._creates.record(key, _creation(fetched, plan.create))
            return _AFTER_CREATE, None
        due = plan.requeue_after.total_seconds() if plan.requeue_after is not None else None
        return min(
            (s for s in (due, fetched.look_again, held or None) if s is not None), default=None
        ), None

    async def _refresh(self, key: JobKey) -> None:
        """Read a stale job from the API server, in case the watch that should bring it is late."""
        try:
            await self._reader.refresh(key)
        except ApiError as error:
            log.warning("failed to read a job whose snapshot was stale: %s", error)

    def _pace(
        self, key: JobKey, fetched: FetchedJob, document: JsonObject, finished: str | None
    ) -> None:
        if finished:
            self._pacer.forget(key)
            self._refusals.pop(key, None)  # a finished job's parsed form need not be kept
        elif document is not fetched.document:
            self._pacer.record(key)

    def _refusals_of(self, key: JobKey, job: LoraTrainingJob) -> tuple[str, ...]:
        """Return what the policy refuses; the same parsed job is not checked twice."""
        known = self._refusals.get(key)
        if known is None or known[0] is not job:
            known = self._refusals[key] = (job, refusals_of(job, self._policy))
        return known[1]

    def _forget(self, key: JobKey) -> None:
        self._refusals.pop(key, None)
        self._metrics.remove_job(key)
        self._creates.forget(key)
        self._pacer.forget(key)

    async def _record_rejection(
        self,
        fetched: FetchedJob,
        document: JsonObject,
        explanation: Explanation,
        now: datetime,
    ) -> None:
        """Record in the status why the API server rejected the children, and create nothing."""
        snapshot = replace(fetched.snapshot, status=parse_status(document), rejection=explanation)
        poll = timedelta(seconds=self._poll())
        plan = replace(decide(snapshot, now, poll), create=None, delete=())
        await self._applier.apply(replace(fetched, snapshot=snapshot, document=document), plan, now)


def _acknowledgement(fetched: FetchedJob) -> str | None:
    annotations: Any = fetched.document["metadata"].get("annotations") or {}
    text: str | None = annotations.get(names.ANNOTATION_ACKNOWLEDGED)
    return text


def _creation(fetched: FetchedJob, attempt: int) -> Creation:
    return Creation(fetched.snapshot.uid, attempt, fetched.snapshot.generation)

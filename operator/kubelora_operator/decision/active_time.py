"""The time for which a job ran, counted from what its pods record. Pure.

A pod's own times are right also when the operator was away, and they stand still while the job is
suspended or queued, because no pod runs then. The status remembers how much of which pod is
counted, so that no second is counted twice or lost with the pod.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.status import CountedRun, JobStatus
from kubelora_operator.decision.clock import MAX_SKEW
from kubelora_operator.decision.conditions import RUNNING, Conditions, format_time, parse_time
from kubelora_operator.decision.snapshot import Child, Snapshot, TrainerPod

COUNT_EVERY: Final = timedelta(minutes=1)
"""Interval at which a current run is counted: each time costs a write of the status."""
_UNSEEN: Final = 2 * COUNT_EVERY
"""A pod that vanished within this time of its last count is taken to have run until now."""


@dataclass(frozen=True)
class _Run:
    """A pod's running time; it is still running if ``end`` is None."""

    uid: str
    start: datetime
    end: datetime | None


def count_active_time(
    snapshot: Snapshot, status: JobStatus, child: Child | None, conditions: Conditions
) -> JobStatus:
    """Return the status with the current attempt's running time counted.

    Args:
        snapshot: What is known about the job.
        status: The status so far.
        child: The attempt's Job, as its trainers left it.
        conditions: The conditions so far, and the current time.
    """
    run = _find_run(snapshot, status, child, conditions)
    if run is None:
        return status
    seconds, old = _seconds(run, child, conditions.now), status.counted_run
    counted = old.seconds if old and old.uid == run.uid else 0
    new = old is None or old.uid != run.uid
    if not new and run.end is None and 0 <= seconds - counted < COUNT_EVERY.total_seconds():
        return status
    return status.model_copy(
        update={
            "active_seconds": max((status.active_seconds or 0) + seconds - counted, 0),
            "counted_run": CountedRun(
                attempt=status.attempt,
                uid=run.uid,
                start_time=format_time(run.start),
                end_time=format_time(run.end) if run.end else None,
                seconds=seconds,
            ),
        }
    )


def active_seconds(status: JobStatus, now: datetime) -> int:
    """Return the running time up to ``now``, with what is not counted yet."""
    run, total = status.counted_run, status.active_seconds or 0
    if run is None or run.end_time is not None:
        return total
    ran = int((now - parse_time(run.start_time)).total_seconds())
    return total + max(ran - run.seconds, 0)


def running_since(pod: TrainerPod, conditions: Conditions) -> datetime | None:
    """Return since when the pod runs: as the operator saw it if the node's clock is ahead."""
    if pod.since is None or pod.since - conditions.now <= MAX_SKEW:
        return pod.since
    running = conditions.get(RUNNING)
    seen = running is not None and running.status == "True"
    return parse_time(running.last_transition_time) if running and seen else conditions.now


def _find_run(
    snapshot: Snapshot, status: JobStatus, child: Child | None, conditions: Conditions
) -> _Run | None:
    pods = [p for p in snapshot.pods_of(status.attempt) if p.index == 0]
    started = [p for p in pods if p.since is not None]
    if not started:
        return _find_vanished_run(status, child, conditions, pod_exists=bool(pods))
    pod = started[-1]
    if pod.since is not None and pod.ended is not None:
        return _Run(pod.uid, pod.since, max(pod.ended, pod.since))
    start = running_since(pod, conditions)
    end = child.finished if child and not pod.writing else None
    if pod.overdue(conditions.now):
        # Its node is lost, and nothing shows for how long it ran after it should have ended.
        end = pod.delete_by
    return _Run(pod.uid, start, end) if start else None


def _find_vanished_run(
    status: JobStatus, child: Child | None, conditions: Conditions, pod_exists: bool
) -> _Run | None:
    """Return the run of a pod that no longer exists, as far as its Job or the status knows it."""
    run, finished = status.counted_run, child.finished if child else None
    if run is not None and run.attempt == status.attempt:
        if run.end_time is not None:
            return None
        start = parse_time(run.start_time)
        counted = start + timedelta(seconds=run.seconds)
        recent = conditions.now if conditions.now - counted < _UNSEEN else counted
        # With another pod, the Job's end is that one's.
        return _Run(run.uid, start, recent if pod_exists or not finished else finished)
    if child and child.started and finished and child.state == "complete" and not pod_exists:
        # It ran, although nobody saw it; its Job's times include that of pending.
        return _Run(child.uid, child.started, finished)
    return None


def _seconds(run: _Run, child: Child | None, now: datetime) -> int:
    """Return the run's seconds; no more than since its Job was started."""
    ran = (run.end or now) - run.start
    if child and child.started and child.started <= now:
        ran = min(ran, max(now, child.finished or now) - child.started + MAX_SKEW)
    return max(int(ran.total_seconds()), 0)

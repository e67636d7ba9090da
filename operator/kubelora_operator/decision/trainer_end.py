"""The end of an attempt, read from the trainer containers themselves. Pure.

A Job ends when its pods do, and a pod ends with its last container: a service mesh's sidecar keeps
both running although the trainer has ended. So the trainers' exit codes decide. The Job controller
gets a moment to notice an end by itself, because only then are the Job and its pods' logs kept.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from kubelora_operator.decision.clock import elapsed_since
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod

JOB_CONTROLLER_TIME: Final = timedelta(seconds=10)
"""Time for the kubelet and the Job controller to report an end that no sidecar hides."""
PEER_TIME: Final = timedelta(seconds=60)
"""Time for the other trainers of a gang to end after the first one."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


def judge_child(snapshot: Snapshot, attempt: int, now: datetime) -> Child | None:
    """Return the attempt's Job as its trainers left it, or None if there is none.

    Args:
        snapshot: What is known about the job.
        attempt: Number of the attempt.
        now: Current time.
    """
    child, pods = snapshot.child_of(attempt), snapshot.pods_of(attempt)
    done = next((p for p in pods if p.index == 0 and p.exit_code == 0), None)
    if child is None:
        # The Job was deleted before it could report it; a trainer that ended with 0 has finished.
        uid = snapshot.status.child_uid
        return _completed(Child("", uid, attempt), done, now) if done and uid else None
    if child.state == "failed" and done:
        return _completed(child, done, now)
    if child.state != "active" or child.suspended:
        return child
    ended = [p for p in pods if p.exit_code is not None and not p.deleting]
    if not any(p.live for p in ended):
        return child
    failed = sorted((p for p in ended if p.exit_code), key=_end)
    first = done or next(iter(failed), None)
    if first is None or elapsed_since(_end(first), now) < JOB_CONTROLLER_TIME:
        return child
    if any(p.writing for p in pods) and not _peers_overdue(first.ended, now):
        return child
    return _completed(child, first, now) if done else _failed(child, first, now)


def peers_given_up(snapshot: Snapshot, attempt: int, now: datetime) -> bool:
    """Return whether trainers that outlive the attempt's end need not be waited for.

    Rank 0 exits with 0 only after the adapter was verified, and no rank trains without the others.

    Args:
        snapshot: What is known about the job.
        attempt: Number of the attempt.
        now: Current time.
    """
    reported, judged = snapshot.child_of(attempt), judge_child(snapshot, attempt, now)
    hidden = reported is not None and reported.live and judged is not None and not judged.live
    return hidden and judged is not None and _peers_overdue(judged.finished, now)


def _end(pod: TrainerPod) -> datetime:
    return pod.ended or _LONG_AGO


def _peers_overdue(end: datetime | None, now: datetime) -> bool:
    return end is not None and elapsed_since(end, now) >= PEER_TIME


def _completed(child: Child, pod: TrainerPod, now: datetime) -> Child:
    return replace(child, state="complete", failure=None, finished=pod.ended or now)


def _failed(child: Child, pod: TrainerPod, now: datetime) -> Child:
    failure = Explanation("BackoffLimitExceeded", "the trainer ended while its pod runs on")
    return replace(child, state="failed", failure=failure, finished=pod.ended or now)

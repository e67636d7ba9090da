"""The rules for an attempt whose Job exists and has not ended: tell how it fares. Pure."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.report import RunReport
from kubelora_operator.decision.conditions import (
    HEALTHY,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    time_text,
)
from kubelora_operator.decision.plan_builder import SOON, Draft, stopped
from kubelora_operator.decision.run_progress import judge_health, with_report
from kubelora_operator.decision.snapshot import (
    Child,
    TrainerPod,
    Unreachable,
    Why,
    laggard,
    speaker,
)

_SLOW: Final = timedelta(seconds=30)
_TRAINER_START: Final = timedelta(minutes=2)
"""Time a trainer may take to load its model before its silence is worth a word."""


def track(draft: Draft, child: Child, poll: timedelta) -> Draft:
    """The attempt is under way: tell how it fares."""
    draft = draft.update(child_uid=child.uid)
    if draft.status.start_time is None:
        draft = draft.update(start_time=time_text(draft.now))
    draft = draft.untell(RESTARTING, "Restarted", f"attempt {child.attempt} was started")
    if child.deleting:
        return replace(draft, again_after=SOON)
    draft = draft.untell(SUSPENDED, "Resumed", f"attempt {child.attempt} goes on")
    if child.suspended:
        return _queued(draft, child)
    if child.queue:
        draft = draft.tell(QUEUED, False, "Admitted", f"queue {child.queue} has admitted the job")
    pods = [p for p in draft.pods if p.live and not p.deleting]
    waited_for, first = laggard(pods), speaker(pods)
    if first is None or waited_for is not None:
        return _pending(draft, waited_for)
    return replace(_running(draft, first), again_after=poll)


def _queued(draft: Draft, child: Child) -> Draft:
    if child.queue:
        why = Why("WaitingForAdmission", f"queue {child.queue} has not admitted the job yet")
    else:
        why = Why("JobSuspended", f"Job {child.name} was suspended from outside: resume it there")
    draft = stopped(draft, "Queued", why.message, draft.now)
    return draft.tell(QUEUED, True, why.reason, why.message)


def _pending(draft: Draft, pod: TrainerPod | None) -> Draft:
    why = pod.stuck if pod else None
    if why is None and draft.seen.rejection:
        why = draft.seen.rejection
    if why is None:
        why = Why("Starting", "the pod's container is being started" if pod else "no pod yet")
    return replace(stopped(draft, why.reason, why.message, draft.now), again_after=_SLOW)


def _running(draft: Draft, pod: TrainerPod) -> Draft:
    report = draft.seen.report
    reason = draft.conditions.reason(RUNNING) if draft.conditions.is_true(RUNNING) else ""
    if isinstance(report, RunReport):
        draft = replace(draft, status=with_report(draft.status, report, draft.now))
        draft = replace(draft, conditions=judge_health(draft.conditions, report.health))
        return draft.tell(RUNNING, True, "Training", f"pod {pod.name} trains")
    if isinstance(report, Unreachable) and _late(pod, draft.now):
        message = f"pod {pod.name} runs, but its status can't be read: {report.cause}"
        draft = draft.tell(RUNNING, True, "StatusUnreachable", message)
        unknown = draft.conditions.set(HEALTHY, "Unknown", "StatusUnreachable", message)
        return replace(draft, conditions=unknown)
    if reason in ("Training", "StatusUnreachable"):
        return draft
    return draft.tell(RUNNING, True, "TrainerStarting", f"pod {pod.name} loads model and data")


def _late(pod: TrainerPod, now: datetime) -> bool:
    return pod.since is None or now - pod.since > _TRAINER_START

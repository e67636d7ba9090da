"""Rules for an attempt whose Job exists and has not finished: report its progress. Pure."""

from dataclasses import replace
from datetime import timedelta
from typing import Final

from kubelora_api.report import RunReport
from kubelora_operator.decision.active_time import running_since
from kubelora_operator.decision.attempt_end import account_for_failure
from kubelora_operator.decision.conditions import (
    HEALTHY,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
    format_time,
)
from kubelora_operator.decision.deadlines import (
    active_time_left,
    pending_over,
    stop_for_deadline,
)
from kubelora_operator.decision.gang import gang_waiting, half_gang
from kubelora_operator.decision.plan_builder import REQUEUE_SOON, PlanBuilder, set_not_running
from kubelora_operator.decision.run_progress import apply_report, set_health_condition
from kubelora_operator.decision.snapshot import (
    Child,
    Explanation,
    TrainerPod,
    Unreachable,
    blocking_pod,
    reporting_pod,
)

_REQUEUE_PENDING: Final = timedelta(seconds=30)
"""Pod events arrive by themselves; this is for the cluster's warnings, which do not."""
_STARTUP_TIMEOUT: Final = timedelta(minutes=2)
"""Time a trainer may take to load its model before a missing answer is reported."""


def track(builder: PlanBuilder, child: Child, poll: timedelta) -> PlanBuilder:
    """Report the progress of the attempt.

    Args:
        builder: The plan so far.
        child: The attempt's Job, which has not finished.
        poll: Interval at which a running pod's progress is read.
    """
    builder = builder.update_status(child_uid=child.uid)
    if builder.status.start_time is None:
        builder = builder.update_status(start_time=format_time(builder.now))
    builder = builder.clear_condition(
        RESTARTING, "Restarted", f"attempt {child.attempt} was started"
    )
    if child.deleting:
        return replace(builder, requeue_after=REQUEUE_SOON)
    builder = builder.clear_condition(
        SUSPENDED, "Resumed", f"attempt {child.attempt} resumes training"
    )
    if child.suspended:
        return _queued(builder, child)
    if child.queue:
        builder = builder.set_condition(
            QUEUED, False, "Admitted", f"queue {child.queue} has admitted the job"
        )
    else:
        builder = builder.clear_condition(QUEUED, "NoQueue", f"Job {child.name} is in no queue")
    pods = [p for p in builder.pods if p.writing and not p.deleting]
    waited_for, first = blocking_pod(pods), reporting_pod(pods)
    nodes = builder.snapshot.spec.workers.nodes if builder.snapshot.spec else 1
    if len(pods) < min(nodes, len(builder.pods)) and waited_for is None:
        # An end is near: it is reported once, with its cause, when the Job or the trainers have it.
        return replace(builder, requeue_after=REQUEUE_SOON)
    if first is None and _had_pod(builder):
        return replace(builder, requeue_after=REQUEUE_SOON)
    if first is None or waited_for is not None:
        return _pending(builder, waited_for)
    left = active_time_left(builder)
    builder = _running(builder.update_status(pending_since=None), first)
    return replace(builder, requeue_after=poll if left is None else min(poll, left))


def _had_pod(builder: PlanBuilder) -> bool:
    """Return whether the attempt's pod ran before, so that it is gone and not still to come."""
    return builder.conditions.is_true(RUNNING)


def _queued(builder: PlanBuilder, child: Child) -> PlanBuilder:
    if child.queue:
        explanation = Explanation(
            "WaitingForAdmission", f"queue {child.queue} has not admitted the job yet"
        )
    else:
        explanation = Explanation(
            "JobSuspended",
            f"Job {child.name} was suspended, but not by the operator: "
            "set its spec.suspend to false",
        )
    builder = builder.update_status(pending_since=None)
    builder = set_not_running(builder, "Queued", explanation.message)
    return builder.set_condition(QUEUED, True, explanation.reason, explanation.message)


def _pending(builder: PlanBuilder, pod: TrainerPod | None) -> PlanBuilder:
    explanation = pod.waiting if pod else None
    if explanation is None and builder.snapshot.rejection:
        explanation = builder.snapshot.rejection
    if explanation is None:
        explanation = Explanation(
            "Starting", "the pod's container is being created" if pod else "no pod exists yet"
        )
    builder = set_not_running(builder, explanation.reason, explanation.message)
    if builder.status.pending_since is None:
        builder = builder.update_status(pending_since=format_time(builder.now))
    if over := pending_over(builder, pod, explanation):
        return stop_for_deadline(builder, over)
    pods = tuple(p for p in builder.pods if p.writing and not p.deleting)
    half = half_gang(builder.snapshot, pods, builder.now)
    if half is None:
        return replace(builder, requeue_after=_REQUEUE_PENDING)
    left, placed, nodes = half
    if left > timedelta():
        return replace(builder, requeue_after=min(left, _REQUEUE_PENDING))
    builder = account_for_failure(builder, gang_waiting(placed, nodes, explanation))
    return replace(builder.delete_live_jobs(), requeue_after=REQUEUE_SOON)


def _running(builder: PlanBuilder, pod: TrainerPod) -> PlanBuilder:
    report = builder.snapshot.report
    reason = builder.conditions.reason(RUNNING) if builder.conditions.is_true(RUNNING) else ""
    if isinstance(report, RunReport):
        builder = replace(builder, status=apply_report(builder.status, report, builder.now))
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, report.health)
        )
        return builder.set_condition(RUNNING, True, "Training", f"pod {pod.name} is training")
    if isinstance(report, Unreachable) and _startup_timed_out(pod, builder.conditions):
        message = f"pod {pod.name} is running, but its status can't be read: {report.message}"
        builder = builder.set_condition(RUNNING, True, "StatusUnreachable", message)
        unknown = builder.conditions.set(HEALTHY, "Unknown", "StatusUnreachable", message)
        return replace(builder, conditions=unknown)
    if reason in ("Training", "StatusUnreachable"):
        return builder
    return builder.set_condition(
        RUNNING, True, "TrainerStarting", f"pod {pod.name} is loading the model and the data"
    )


def _startup_timed_out(pod: TrainerPod, conditions: Conditions) -> bool:
    since = running_since(pod, conditions)
    return since is None or conditions.now - since > _STARTUP_TIMEOUT

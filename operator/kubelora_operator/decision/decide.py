"""Rules that turn a snapshot of a job into a reconcile plan. Pure; the time is passed in.

Read `decide` from the top: the first rule that applies returns. The property tests check these
invariants: there are never two live attempts; a finished job is never recreated; a finished
attempt is accounted for once, before the next one is numbered; reconciling again after a plan was
applied changes nothing.

A finished attempt is accounted for when the condition Restarting (or Suspended) becomes True in the
same write that increments ``restarts``. The pod may then disappear without the failure being
counted twice.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus
from kubelora_operator.decision.active_time import count_active_time
from kubelora_operator.decision.attempt_end import account_for_failure, complete_job, fail_job
from kubelora_operator.decision.attempt_start import start_first_attempt, start_next_attempt
from kubelora_operator.decision.clock import largest_lead, without_future_times
from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    SUSPENDED,
    Conditions,
)
from kubelora_operator.decision.deadlines import (
    continue_job,
    deadline_over,
    is_stopping,
    may_continue,
    next_look,
    stop_for_deadline,
    time_to_deletion,
)
from kubelora_operator.decision.display_state import display_state
from kubelora_operator.decision.events import clock_ahead, events_for_changes, unreadable_status
from kubelora_operator.decision.failure import (
    classify_failure,
    externally_deleted,
)
from kubelora_operator.decision.free_restarts import (
    open_window,
)
from kubelora_operator.decision.lost_node import (
    forced_pods,
    lost_with_its_node,
    report_overdue_pod,
)
from kubelora_operator.decision.plan import ReconcilePlan
from kubelora_operator.decision.plan_builder import (
    REQUEUE_SOON,
    PlanBuilder,
)
from kubelora_operator.decision.policy_suspension import (
    USER_WAIT_REASONS,
    waits_for_user,
)
from kubelora_operator.decision.run_progress import (
    lossy_precision_message,
)
from kubelora_operator.decision.running import track
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod
from kubelora_operator.decision.spec_changes import changed_since
from kubelora_operator.decision.suspension import suspend_job

KEPT_ATTEMPTS: Final = 3
"""Jobs of finished attempts that are kept for `kubectl describe` and `kubectl logs`."""


def decide(
    snapshot: Snapshot, now: datetime, poll: timedelta = timedelta(seconds=10)
) -> ReconcilePlan:
    """Decide what to do about the job.

    Args:
        snapshot: What is known about the job.
        now: Current time.
        poll: Interval at which a running pod's progress is read.
    """
    if snapshot.deleting:
        return ReconcilePlan(status=snapshot.status)
    if snapshot.status_problems:
        return ReconcilePlan(status=snapshot.status, events=(unreadable_status(snapshot),))
    lead = largest_lead(snapshot.status, now)
    status = without_future_times(snapshot.status, now) if lead else snapshot.status
    builder = PlanBuilder(
        snapshot, now, status, Conditions.start(status.conditions, snapshot.generation, now)
    )
    if _terminal(builder.conditions):
        if not may_continue(builder):
            return _finished(builder)
        builder = continue_job(builder)
    builder = _count_active_time(_set_accepted(_recover_attempt_number(builder)))
    builder = _decide(builder, poll)
    plan = _build_plan(builder if _terminal(builder.conditions) else report_overdue_pod(builder))
    return replace(plan, events=(*plan.events, clock_ahead(lead))) if lead else plan


def _finished(builder: PlanBuilder) -> ReconcilePlan:
    """Clean up after a finished job, and delete it when its time is over."""
    left = time_to_deletion(builder)
    due = left is not None and left <= timedelta() and not builder.live
    return ReconcilePlan(
        _observed(builder),
        delete=builder.delete_live_jobs().delete,
        force_delete=forced_pods(builder.snapshot, builder.now),
        delete_job=due,
        requeue_after=REQUEUE_SOON if builder.live else None if due else next_look(left),
    )


def _observed(builder: PlanBuilder) -> JobStatus:
    """Return the status with the generation for which it is true; clients wait for that."""
    seen = {"observed_generation": builder.snapshot.generation}
    conditions = [c.model_copy(update=seen) for c in builder.status.conditions]
    return builder.status.model_copy(update=seen | {"conditions": conditions})


def _terminal(conditions: Conditions) -> bool:
    return conditions.is_true(COMPLETE) or conditions.is_true(FAILED)


def _recover_attempt_number(builder: PlanBuilder) -> PlanBuilder:
    """Recover the attempt number from existing objects when the status was lost."""
    known = {c.attempt for c in builder.snapshot.children} | builder.snapshot.config_map_attempts
    if builder.status.attempt > 0 or not known:
        newest = max(known, default=0)
        if newest > builder.status.attempt and builder.snapshot.child_of(newest):
            return builder.update_status(attempt=newest)
        return builder
    return builder.update_status(attempt=max(known))


def _count_active_time(builder: PlanBuilder) -> PlanBuilder:
    counted = count_active_time(builder.snapshot, builder.status, builder.child, builder.conditions)
    return replace(builder, status=counted)


def _set_accepted(builder: PlanBuilder) -> PlanBuilder:
    spec = builder.snapshot.spec
    if spec is None:
        what = "; ".join(builder.snapshot.problems) or "the resource can't be parsed"
        return builder.set_condition(
            ACCEPTED, False, "InvalidSpec", f"{what}. Fix it and apply it again"
        )
    if builder.snapshot.refusals:
        return _set_not_allowed(builder, "; ".join(builder.snapshot.refusals))
    lossy_message = lossy_precision_message(spec)
    if changed := _pending_changes(builder, spec):
        message = (
            f"the change of {' and '.join(changed)} takes effect with the next attempt. To start "
            "one now, set spec.suspend to true and back to false"
        )
        message += f". {lossy_message}" if lossy_message else ""
        return builder.set_condition(ACCEPTED, True, "ChangePending", message)
    if lossy_message:
        return builder.set_condition(ACCEPTED, True, "LossyPrecision", lossy_message)
    return builder.set_condition(ACCEPTED, True, "Valid", "the job is valid")


def _pending_changes(builder: PlanBuilder, spec: JobSpec) -> list[str]:
    """Return the changes of the spec that the current attempt can't take up."""
    child = builder.child
    # Without a new generation nothing has changed; digests take longer than all other rules.
    if child is None or not child.live or builder.snapshot.generation <= 1:
        return []
    return changed_since(spec, dict(child.begun_with))


def _set_not_allowed(builder: PlanBuilder, what: str) -> PlanBuilder:
    """Refuse the next attempt; one that began under an earlier policy keeps running."""
    if builder.live:
        message = f"this attempt keeps running, but the next one will not start: {what}"
        return builder.set_condition(ACCEPTED, True, "NextAttemptNotAllowed", message)
    return builder.set_condition(ACCEPTED, False, "PodTemplateNotAllowed", what)


def _decide(builder: PlanBuilder, poll: timedelta) -> PlanBuilder:
    child = builder.child
    builder = _delete_stale_jobs(builder)
    if child and child.state == "complete":
        return complete_job(builder, child)
    stopping = is_stopping(builder.conditions)
    if child and child.state == "failed" and not builder.attempt_accounted and not stopping:
        return account_for_failure(builder, classify_failure(builder.snapshot, child))
    if child and child.live and (lost := _lost_pod(builder, child)):
        return account_for_failure(builder, lost_with_its_node(lost))
    missing = child is None and builder.status.attempt > 0 and not builder.attempt_accounted
    if missing and not stopping:
        if builder.conditions.reason(SUSPENDED) != "Suspending":
            if _is_lost(builder):
                return _state_lost(builder)
            if builder.status.child_uid:
                name = (
                    f"{builder.snapshot.name}-{builder.snapshot.uid[:5]}-{builder.status.attempt}"
                )
                status = open_window(builder).status
                return account_for_failure(builder, externally_deleted(name, status))
        elif not builder.snapshot.suspend:
            return start_next_attempt(builder)
    if builder.snapshot.suspend:
        return suspend_job(builder)
    if waits_for_user(builder):
        return builder
    if over := deadline_over(builder):
        return stop_for_deadline(builder, over)
    if builder.attempt_accounted or stopping:
        return start_next_attempt(builder)
    if child is None:
        return start_first_attempt(builder)
    return track(builder, child, poll)


def _lost_pod(builder: PlanBuilder, child: Child) -> TrainerPod | None:
    """Return a pod that ends the attempt because it is about to be deleted by force, or None."""
    ending = builder.snapshot.suspend or is_stopping(builder.conditions)
    if child.suspended or builder.attempt_accounted or ending:
        return None
    forced = forced_pods(builder.snapshot, builder.now)
    return next((p for p in builder.pods if p in forced), None)


def _delete_stale_jobs(builder: PlanBuilder) -> PlanBuilder:
    """Delete live Jobs of other or ended attempts, and finished ones beyond those that are kept.

    The Job of an ended attempt is still live if a sidecar outlives the trainer or a node is lost.
    """
    attempt, ended = builder.status.attempt, builder.attempt_accounted
    stale = tuple(
        c
        for c in builder.snapshot.children
        if not c.deleting
        and ((c.live and (c.attempt != attempt or ended)) or c.attempt <= attempt - KEPT_ATTEMPTS)
    )
    return replace(builder, delete=stale)


def _is_lost(builder: PlanBuilder) -> bool:
    """Return whether the status was lost and the Job is gone: only its ConfigMap is left.

    ConfigMaps are looked up only when the status has no attempt number.
    """
    return builder.status.attempt in builder.snapshot.config_map_attempts


def _state_lost(builder: PlanBuilder) -> PlanBuilder:
    return fail_job(
        builder,
        Explanation(
            "StateLost",
            f"attempt {builder.status.attempt} was started, but its Job and the job's status were "
            "deleted, so its outcome is unknown. Check the output; create a new job to train again",
        ),
    )


def _build_plan(builder: PlanBuilder) -> ReconcilePlan:
    """Put conditions and state into the status, and derive the Events from what changed."""
    # A suspension that waits for its user is over with the next generation, so it keeps its own.
    held = (SUSPENDED,) if builder.conditions.reason(SUSPENDED) in USER_WAIT_REASONS else ()
    status = builder.status.model_copy(
        update={
            "observed_generation": builder.snapshot.generation,
            "conditions": list(builder.conditions.observed(except_for=held).items),
            "state": display_state(builder.conditions, builder.status.attempt),
        }
    )
    return ReconcilePlan(
        status=status,
        delete=builder.delete,
        force_delete=forced_pods(builder.snapshot, builder.now),
        create=builder.create,
        events=events_for_changes(builder.snapshot.status, status),
        requeue_after=builder.requeue_after,
    )

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

from kubelora_api.report import FinalReport
from kubelora_api.status import JobStatus
from kubelora_operator.decision.active_time import count_active_time
from kubelora_operator.decision.clock import largest_lead, without_future_times
from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
    format_time,
    parse_time,
)
from kubelora_operator.decision.display_state import display_state
from kubelora_operator.decision.events import clock_ahead, events_for_changes, unreadable_status
from kubelora_operator.decision.failure import (
    FREE_REASONS,
    Failure,
    RestartCost,
    classify_failure,
    externally_deleted,
)
from kubelora_operator.decision.free_restarts import (
    budget_exceeded,
    count_free_restart,
    forget_free_restarts,
    open_window,
    suspend_by_budget,
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
    finish_time,
    set_not_running,
)
from kubelora_operator.decision.policy_suspension import (
    USER_WAIT_REASONS,
    policy_is_suspend,
    suspend_by_policy,
    waits_for_user,
)
from kubelora_operator.decision.restart_delay import restart_delay, run_duration
from kubelora_operator.decision.run_progress import (
    apply_final_report,
    lossy_precision_message,
    set_health_condition,
)
from kubelora_operator.decision.running import track
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod
from kubelora_operator.decision.trainer_end import peers_given_up

KEPT_ATTEMPTS: Final = 3
"""Jobs of finished attempts that are kept for `kubectl describe` and `kubectl logs`."""
_REJECTIONS: Final = frozenset({"Rejected", "NameTaken"})


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
        stale = tuple(c for c in snapshot.children if c.live and not c.deleting)
        return ReconcilePlan(
            _observed(builder),
            delete=stale,
            force_delete=forced_pods(snapshot, now),
            requeue_after=REQUEUE_SOON if builder.live else None,
        )
    builder = _count_active_time(_set_accepted(_recover_attempt_number(builder)))
    builder = _decide(builder, poll)
    plan = _build_plan(builder if _terminal(builder.conditions) else report_overdue_pod(builder))
    return replace(plan, events=(*plan.events, clock_ahead(lead))) if lead else plan


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
    lossy_message = lossy_precision_message(spec)
    if lossy_message:
        return builder.set_condition(ACCEPTED, True, "LossyPrecision", lossy_message)
    return builder.set_condition(ACCEPTED, True, "Valid", "the job is valid")


def _decide(builder: PlanBuilder, poll: timedelta) -> PlanBuilder:
    child = builder.child
    builder = _delete_stale_jobs(builder)
    if child and child.state == "complete":
        return _complete(builder, child)
    if child and child.state == "failed" and not builder.attempt_accounted:
        return _account_for_failure(builder, classify_failure(builder.snapshot, child))
    if child and child.live and (lost := _lost_pod(builder, child)):
        return _account_for_failure(builder, lost_with_its_node(lost))
    if child is None and builder.status.attempt > 0 and not builder.attempt_accounted:
        if builder.conditions.reason(SUSPENDED) != "Suspending":
            if _is_lost(builder):
                return _state_lost(builder)
            if builder.status.child_uid:
                name = (
                    f"{builder.snapshot.name}-{builder.snapshot.uid[:5]}-{builder.status.attempt}"
                )
                status = open_window(builder).status
                return _account_for_failure(builder, externally_deleted(name, status))
        elif not builder.snapshot.suspend:
            return _start_next_attempt(builder)
    if builder.snapshot.suspend:
        return _suspend(builder)
    if waits_for_user(builder):
        return builder
    if builder.attempt_accounted:
        return _start_next_attempt(builder)
    if child is None:
        return _start(builder)
    return track(builder, child, poll)


def _lost_pod(builder: PlanBuilder, child: Child) -> TrainerPod | None:
    """Return a pod that ends the attempt because it is about to be deleted by force, or None."""
    if child.suspended or builder.attempt_accounted or builder.snapshot.suspend:
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
    return _fail(
        builder,
        Explanation(
            "StateLost",
            f"attempt {builder.status.attempt} was started, but its Job and the job's status were "
            "deleted, so its outcome is unknown. Check the output; create a new job to train again",
        ),
    )


def _complete(builder: PlanBuilder, child: Child) -> PlanBuilder:
    if _others_live(builder):
        return replace(builder, requeue_after=REQUEUE_SOON)
    final = _final_report(builder.pods)
    status = apply_final_report(builder.status, final, done=True)
    ended = finish_time(child, builder.now)
    message = final.message if final else "training has finished; the pod left no final report"
    builder = set_not_running(
        replace(builder, status=status), "Finished", "the trainer has finished"
    )
    builder = builder.clear_condition(QUEUED, "Complete", "the job is complete")
    builder = builder.clear_condition(RESTARTING, "Complete", "the job is complete")
    builder = builder.clear_condition(SUSPENDED, "Complete", "the job is complete")
    if final or builder.status.health:
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, builder.status.health)
        )
    return builder.update_status(
        completion_time=format_time(ended), child_uid=child.uid
    ).set_condition(COMPLETE, True, "TrainingDone", message)


def _account_for_failure(builder: PlanBuilder, failure: Failure) -> PlanBuilder:
    """Account once for an attempt that ended without completing the job."""
    status = apply_final_report(builder.status, _final_report(builder.pods), done=False)
    builder = replace(builder, status=status)
    restarts = builder.status.restarts + (1 if failure.cost is RestartCost.COUNTED else 0)
    if failure.cost is RestartCost.FINAL:
        return _fail(builder, failure.explanation)
    if restarts > builder.snapshot.max_restarts and failure.cost is RestartCost.COUNTED:
        limit = builder.snapshot.max_restarts
        return _fail(
            builder,
            Explanation(
                "MaxRestartsExceeded",
                f"{failure.explanation.message}. "
                f"restartPolicy.maxRestarts ({limit}) has been reached",
            ),
        )
    builder = set_not_running(builder, failure.explanation.reason, failure.explanation.message)
    builder = builder.clear_condition(
        QUEUED, "AttemptEnded", f"attempt {builder.status.attempt} has ended"
    )
    builder = count_free_restart(builder.update_status(restarts=restarts), failure)
    if builder.snapshot.suspend and not builder.live:
        return _suspend(builder)
    if failure.cost is RestartCost.SUSPENDED and policy_is_suspend(builder):
        return suspend_by_policy(builder, failure.explanation)
    if failure.cost is RestartCost.FREE and budget_exceeded(builder):
        return suspend_by_budget(builder, failure)
    counted = failure.cost is RestartCost.COUNTED
    cost = (
        f"restart {restarts} of {builder.snapshot.max_restarts}"
        if counted
        else "not counted against maxRestarts"
    )
    builder = builder.set_condition(
        RESTARTING,
        True,
        failure.explanation.reason,
        f"attempt {builder.status.attempt} ended: {failure.explanation.message}. The next attempt "
        f"resumes from the last checkpoint ({cost})",
    )
    return replace(builder, requeue_after=_remaining_backoff(builder))


def _fail(builder: PlanBuilder, explanation: Explanation) -> PlanBuilder:
    if _others_live(builder):
        return replace(builder, requeue_after=REQUEUE_SOON)
    ended = finish_time(builder.child, builder.now)
    builder = set_not_running(builder, explanation.reason, explanation.message)
    builder = builder.clear_condition(QUEUED, "Failed", "the job has failed")
    builder = builder.clear_condition(RESTARTING, "Failed", "the job has failed")
    builder = builder.clear_condition(SUSPENDED, "Failed", "the job has failed")
    if builder.status.health and builder.status.health.verdict != "Unknown":
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, builder.status.health)
        )
    return builder.update_status(completion_time=format_time(ended)).set_condition(
        FAILED, True, explanation.reason, explanation.message
    )


def _others_live(builder: PlanBuilder) -> bool:
    """Return whether anything but the current child could still write to the output.

    The job's result is recorded only after that has ended.
    """
    attempt = builder.status.attempt
    given_up = peers_given_up(builder.snapshot, attempt, builder.now)
    return any(c.live and c.attempt != attempt for c in builder.snapshot.children) or any(
        p.writing and not (given_up and p.attempt == attempt) for p in builder.snapshot.pods
    )


def _suspend(builder: PlanBuilder) -> PlanBuilder:
    live = tuple(c for c in builder.snapshot.children if c.live and not c.deleting)
    others = tuple(c for c in builder.delete if c not in live)
    builder = builder.clear_condition(QUEUED, "Suspended", "spec.suspend is true")
    final = _final_report(builder.pods)
    if final or builder.status.progress:
        builder = replace(builder, status=apply_final_report(builder.status, final, done=False))
    if builder.live:
        builder = builder.set_condition(
            SUSPENDED, False, "Suspending", "the pods are saving a checkpoint before they exit"
        )
        return replace(builder, delete=others + live, requeue_after=REQUEUE_SOON)
    # Clear Restarting only now that Suspended is about to become True: until then it is what
    # records that the finished attempt was accounted for.
    builder = builder.clear_condition(RESTARTING, "Suspended", "spec.suspend is true")
    at = builder.status.checkpoint
    where = f" from the checkpoint of step {at.step}" if at else " from the last checkpoint"
    builder = set_not_running(builder, "Suspended", "spec.suspend is true")
    return builder.set_condition(
        SUSPENDED,
        True,
        "SuspendedByUser",
        "spec.suspend is true; set it to false to "
        + (f"resume{where}" if builder.status.attempt else "start training"),
    )


def _start_next_attempt(builder: PlanBuilder) -> PlanBuilder:
    """Start the next attempt once the last is gone, the delay is over and the spec is valid."""
    if builder.live:
        return replace(builder, requeue_after=REQUEUE_SOON)
    wait = _remaining_backoff(builder)
    if wait > timedelta():
        return replace(builder, requeue_after=wait)
    if builder.snapshot.spec is None:
        return builder
    number = builder.status.attempt + 1
    builder = builder.update_status(attempt=number, child_uid=None)
    if builder.conditions.is_true(SUSPENDED):
        builder = forget_free_restarts(builder)
    builder = builder.clear_condition(SUSPENDED, "Resumed", f"attempt {number} resumes training")
    builder = builder.clear_condition(RESTARTING, "Restarted", f"attempt {number} was started")
    return _create(builder)


def _start(builder: PlanBuilder) -> PlanBuilder:
    """Create the attempt's objects, for the first time or again after a crash in between."""
    if builder.snapshot.spec is None:
        return _set_waiting(
            builder, "InvalidSpec", "the job is invalid; see the condition Accepted"
        )
    if builder.live:
        return replace(builder, requeue_after=REQUEUE_SOON)
    return _create(builder.update_status(attempt=max(builder.status.attempt, 1)))


def _create(builder: PlanBuilder) -> PlanBuilder:
    rejection = builder.snapshot.rejection
    number = builder.status.attempt
    builder = builder.clear_condition(QUEUED, "Starting", f"attempt {number} is being created")
    if rejection:
        builder = _set_waiting(builder, rejection.reason, rejection.message)
    elif builder.conditions.reason(RUNNING) not in _REJECTIONS:
        builder = _set_waiting(builder, "Starting", "the pod is being created")
    if builder.status.start_time is None:
        builder = builder.update_status(start_time=format_time(builder.now))
    return replace(builder, create=builder.status.attempt)


def _set_waiting(builder: PlanBuilder, reason: str, message: str) -> PlanBuilder:
    return builder.set_condition(RUNNING, False, reason, message)


def _remaining_backoff(builder: PlanBuilder) -> timedelta:
    """Return how long the next attempt still has to wait."""
    restarting = builder.conditions.get(RESTARTING)
    if restarting is None or restarting.status != "True":
        return timedelta()
    free = restarting.reason in FREE_REASONS
    count = builder.status.free_restarts if free else builder.status.restarts
    delay = restart_delay(
        RestartCost.FREE if free else RestartCost.COUNTED, count, run_duration(builder.child)
    )
    due = parse_time(restarting.last_transition_time) + delay
    return max(due - builder.now, timedelta())


def _final_report(pods: tuple[TrainerPod, ...]) -> FinalReport | None:
    newest_first = pods[::-1]
    by_index = sorted(newest_first, key=lambda p: p.index)
    return next((p.final for p in by_index if p.final), None)


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

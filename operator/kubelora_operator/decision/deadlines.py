"""Times after which a job is stopped, given up or deleted. Pure.

A job that a deadline stopped has saved a checkpoint, which no other job may resume from. So its
user can continue it: by a higher deadline, or after a wait for its pods by any change of the spec.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Final

from kubelora_operator.decision.active_time import active_seconds
from kubelora_operator.decision.attempt_end import fail_job
from kubelora_operator.decision.attempt_start import CONTINUED
from kubelora_operator.decision.conditions import (
    COMPLETE,
    FAILED,
    RESTARTING,
    Conditions,
    parse_time,
)
from kubelora_operator.decision.plan_builder import REQUEUE_SOON, PlanBuilder
from kubelora_operator.decision.run_progress import (
    apply_final_report,
    format_duration,
    newest_final_report,
)
from kubelora_operator.decision.snapshot import Explanation, TrainerPod

ACTIVE_DEADLINE: Final = "DeadlineExceeded"
PENDING_DEADLINE: Final = "PendingDeadlineExceeded"
_REASONS: Final = (ACTIVE_DEADLINE, PENDING_DEADLINE)
HOLDING_DEADLINE: Final = timedelta(hours=1)
"""For a pod that holds its GPUs and can't start for a known cause: a wrong name in the spec stays
wrong, and an outage of a registry is over by then or has an operator of its own."""
_HOLDING_CAUSES: Final = frozenset({"ImagePullFailed", "ContainerConfigError", "PodNotStarted"})
_LONGEST_WAIT: Final = timedelta(hours=1)
"""A wait for a ttl is looked at again this often, because a wait doesn't notice a clock's jump."""


def active_time_left(builder: PlanBuilder) -> timedelta | None:
    """Return how long the job may still run; None without a limit."""
    spec = builder.snapshot.spec
    if spec is None or spec.active_deadline_seconds is None:
        return None
    used = active_seconds(builder.status, builder.now)
    return timedelta(seconds=max(spec.active_deadline_seconds - used, 0))


def is_stopping(conditions: Conditions) -> bool:
    """Return whether the pods are being stopped because a deadline is over."""
    failed = conditions.get(FAILED)
    return failed is not None and failed.status == "False" and failed.reason in _REASONS


def deadline_over(builder: PlanBuilder) -> Explanation | None:
    """Return why the job is to be stopped, or None."""
    left = active_time_left(builder)
    if left is not None and left <= timedelta():
        return Explanation(ACTIVE_DEADLINE, _active_message(builder))
    failed = builder.conditions.get(FAILED)
    if failed and is_stopping(builder.conditions) and failed.reason == PENDING_DEADLINE:
        return Explanation(PENDING_DEADLINE, failed.message)
    return None


def pending_over(
    builder: PlanBuilder, pod: TrainerPod | None, cause: Explanation
) -> Explanation | None:
    """Return why a job whose pods don't all run is given up, or None.

    Args:
        builder: The plan so far.
        pod: The pod that is waited for.
        cause: Why it does not run.
    """
    spec, since = builder.snapshot.spec, builder.status.pending_since
    limit = spec.pending_deadline_seconds if spec else None
    if spec is None:
        return None
    if limit is not None:
        waited = builder.now - parse_time(since) if since else timedelta()
        over = waited >= timedelta(seconds=limit)
        where = f"pendingDeadlineSeconds ({limit})"
    else:
        scheduled = pod.scheduled if pod and cause.reason in _HOLDING_CAUSES else None
        over = scheduled is not None and builder.now - scheduled >= HOLDING_DEADLINE
        where = f"{format_duration(HOLDING_DEADLINE.total_seconds())} with its GPUs held"
    if not over:
        return None
    return Explanation(
        PENDING_DEADLINE,
        f"not all pods ran within {where}: {cause.message.rstrip('.')}. Remove the cause, then "
        "change the spec (such as podTemplate or pendingDeadlineSeconds) to continue the job",
    )


def stop_for_deadline(builder: PlanBuilder, why: Explanation) -> PlanBuilder:
    """Stop the pods, which save a checkpoint; the job has failed once none is left."""
    final = newest_final_report(builder.pods)
    if final or builder.status.progress:
        builder = replace(builder, status=apply_final_report(builder.status, final, done=False))
    if not builder.live:
        over = deadline_over(builder) or why  # with the checkpoint that was saved last
        return fail_job(builder, over)
    builder = builder.set_condition(FAILED, False, why.reason, why.message)
    return replace(builder.delete_live_jobs(), requeue_after=REQUEUE_SOON)


def may_continue(builder: PlanBuilder) -> bool:
    """Return whether the job failed by a deadline that its user has changed since."""
    failed = builder.conditions.get(FAILED)
    if failed is None or failed.status != "True" or builder.snapshot.spec is None:
        return False
    if failed.reason == ACTIVE_DEADLINE:
        return deadline_over(builder) is None
    changed = failed.observed_generation != builder.snapshot.generation
    return failed.reason == PENDING_DEADLINE and changed


def continue_job(builder: PlanBuilder) -> PlanBuilder:
    """Let the next attempt resume the job."""
    message = "the spec was changed; the next attempt resumes from the last checkpoint"
    builder = builder.set_condition(FAILED, False, CONTINUED, message)
    builder = builder.set_condition(RESTARTING, True, CONTINUED, message)
    return builder.update_status(completion_time=None, pending_since=None)


def time_to_deletion(builder: PlanBuilder) -> timedelta | None:
    """Return the time after which a finished job is to be deleted; None for never.

    A job that its user suspends is kept.
    """
    snapshot = builder.snapshot
    ttl = snapshot.spec.ttl_seconds_after_finished if snapshot.spec else None
    if ttl is None or snapshot.suspend:
        return None
    ended = builder.status.completion_time or _end_in_conditions(builder.conditions)
    return max(parse_time(ended) + timedelta(seconds=ttl) - builder.now, timedelta())


def next_look(left: timedelta | None) -> timedelta | None:
    """Return when to look again at a job that is deleted after ``left``."""
    return None if left is None else min(left, _LONGEST_WAIT)


def _active_message(builder: PlanBuilder) -> str:
    spec, at = builder.snapshot.spec, builder.status.checkpoint
    used = active_seconds(builder.status, builder.now)
    attempts = f"{builder.status.attempt} attempt" + ("s" if builder.status.attempt != 1 else "")
    where = f"the checkpoint of step {at.step}" if at else "its last checkpoint"
    return (
        f"the job ran for {format_duration(used)} ({used} s) in {attempts}, "
        f"and activeDeadlineSeconds is {spec.active_deadline_seconds if spec else 0}. To continue "
        f"from {where}, raise or remove activeDeadlineSeconds"
    )


def _end_in_conditions(conditions: Conditions) -> str:
    ended = conditions.get(COMPLETE) if conditions.is_true(COMPLETE) else conditions.get(FAILED)
    return ended.last_transition_time if ended else ""

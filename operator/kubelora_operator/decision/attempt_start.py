"""Rules for the start of an attempt: when, and what is created. Pure."""

from dataclasses import replace
from datetime import timedelta
from typing import Final

from kubelora_operator.decision.conditions import (
    ACCEPTED,
    FAILED,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    format_time,
    parse_time,
)
from kubelora_operator.decision.failure import FREE_REASONS, RestartCost
from kubelora_operator.decision.free_restarts import forget_free_restarts
from kubelora_operator.decision.gang import GANG_WAITING, gang_delay
from kubelora_operator.decision.plan_builder import REQUEUE_SOON, PlanBuilder
from kubelora_operator.decision.restart_delay import restart_delay, run_duration

CONTINUED: Final = "Continued"
"""Reason of a restart that the user asked for, which waits for nothing."""
_REJECTIONS: Final = frozenset({"Rejected", "NameTaken"})


def start_next_attempt(builder: PlanBuilder) -> PlanBuilder:
    """Start the next attempt once the last is gone, the delay is over and the spec is valid."""
    if builder.live:
        return replace(builder, requeue_after=REQUEUE_SOON)
    wait = remaining_backoff(builder)
    if wait > timedelta():
        return replace(builder, requeue_after=wait)
    if not builder.conditions.is_true(ACCEPTED):
        return builder
    number = builder.status.attempt + 1
    builder = builder.update_status(attempt=number, child_uid=None)
    if builder.conditions.is_true(SUSPENDED):
        builder = forget_free_restarts(builder)
    builder = builder.clear_condition(SUSPENDED, "Resumed", f"attempt {number} resumes training")
    builder = builder.clear_condition(RESTARTING, "Restarted", f"attempt {number} was started")
    builder = builder.clear_condition(FAILED, CONTINUED, f"attempt {number} was started")
    return _create(builder)


def start_first_attempt(builder: PlanBuilder) -> PlanBuilder:
    """Create the attempt's objects, for the first time or again after a crash in between."""
    if not builder.conditions.is_true(ACCEPTED):
        reason = builder.conditions.reason(ACCEPTED) or "InvalidSpec"
        return _set_waiting(builder, reason, "the job is not accepted; see the condition Accepted")
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
    if builder.status.pending_since is None:
        builder = builder.update_status(pending_since=format_time(builder.now))
    return replace(builder, create=builder.status.attempt)


def _set_waiting(builder: PlanBuilder, reason: str, message: str) -> PlanBuilder:
    return builder.set_condition(RUNNING, False, reason, message)


def remaining_backoff(builder: PlanBuilder) -> timedelta:
    """Return how long the next attempt still has to wait."""
    restarting = builder.conditions.get(RESTARTING)
    if restarting is None or restarting.status != "True" or restarting.reason == CONTINUED:
        return timedelta()
    since = parse_time(restarting.last_transition_time)
    if restarting.reason == GANG_WAITING:
        delay = gang_delay(builder.snapshot.uid, builder.status.attempt)
        return max(since + delay - builder.now, timedelta())
    free = restarting.reason in FREE_REASONS
    count = builder.status.free_restarts if free else builder.status.restarts
    delay = restart_delay(
        RestartCost.FREE if free else RestartCost.COUNTED, count, run_duration(builder.child)
    )
    return max(since + delay - builder.now, timedelta())

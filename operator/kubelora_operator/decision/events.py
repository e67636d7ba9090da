"""Events for the changes of a job's conditions that a user should see. Pure."""

from datetime import timedelta
from typing import Final

from kubelora_api.status import Condition, JobStatus
from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    HEALTHY,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
)
from kubelora_operator.decision.failure import HEALTH_POLICY_REASON
from kubelora_operator.decision.free_restarts import BUDGET_REASON
from kubelora_operator.decision.plan import JobEvent
from kubelora_operator.decision.run_progress import format_duration
from kubelora_operator.decision.snapshot import Snapshot

_EVENT_WHEN_TRUE: Final = (QUEUED, SUSPENDED, RESTARTING, COMPLETE, FAILED)
_WARNING_WHEN_TRUE: Final = (RESTARTING, FAILED)
_WARNING_REASONS: Final = (HEALTH_POLICY_REASON, BUDGET_REASON)
_WARNING_WHEN_ACCEPTED: Final = ("ChangePending", "LossyPrecision", "NextAttemptNotAllowed")
_REASONS_WITHOUT_EVENT: Final = frozenset(
    {"Starting", "Finished", "Queued", "Suspended", "TrainerStarting"}
)


def events_for_changes(old: JobStatus, new: JobStatus) -> tuple[JobEvent, ...]:
    """Return an Event for each condition whose status or reason changed noticeably."""
    before = {c.type: (c.status, c.reason) for c in old.conditions}
    changed = [c for c in new.conditions if before.get(c.type) != (c.status, c.reason)]
    ended = {c.reason for c in changed if _is_failure(c)}
    # Running=False has the same reason as the failure: one Event is enough.
    shown = [c for c in changed if c.type != RUNNING or c.reason not in ended]
    return tuple(event for c in shown if (event := _event_for(c)))


def unreadable_status(snapshot: Snapshot) -> JobEvent:
    """Return the Event for a status that is left as it is, because it can't be read."""
    return JobEvent(
        "Warning",
        "StatusUnreadable",
        "the operator leaves this job as it is, because it can't read "
        f"{snapshot.status_problems[0]}. If a newer operator wrote it, install that version again",
    )


def clock_ahead(lead: timedelta) -> JobEvent:
    """Return the Event for times in the status that a clock ahead of this one has stamped."""
    return JobEvent(
        "Warning",
        "ClockSkew",
        f"times in the status were up to {format_duration(lead.total_seconds())} in the future and "
        "were set to now: check the clocks of the cluster's nodes",
    )


def _is_failure(condition: Condition) -> bool:
    kind = condition.type in _WARNING_WHEN_TRUE or condition.reason in _WARNING_REASONS
    return kind and condition.type != RUNNING and condition.status == "True"


def _event_for(condition: Condition) -> JobEvent | None:
    true = condition.status == "True"
    match condition.type:
        case kind if kind in _EVENT_WHEN_TRUE and true:
            bad = _is_failure(condition)
            return JobEvent("Warning" if bad else "Normal", condition.reason, condition.message)
        case kind if kind == RUNNING and condition.reason not in _REASONS_WITHOUT_EVENT:
            bad = not true or condition.reason == "StatusUnreachable"
            return JobEvent("Warning" if bad else "Normal", condition.reason, condition.message)
        case kind if kind == ACCEPTED and (not true or condition.reason in _WARNING_WHEN_ACCEPTED):
            return JobEvent("Warning", condition.reason, condition.message)
        case kind if kind == HEALTHY and (
            condition.status == "False" or condition.reason == "Warning"
        ):
            return JobEvent("Warning", condition.reason, condition.message)
        case _:
            return None

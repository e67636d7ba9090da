"""The value of the STATE column, derived from the conditions."""

from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
)
from kubelora_operator.decision.deadlines import is_stopping


def display_state(conditions: Conditions, attempt: int) -> str:
    """Return the most informative condition; a final one takes precedence."""
    for kind in (COMPLETE, FAILED, SUSPENDED, RESTARTING):
        if conditions.is_true(kind):
            return kind
    if conditions.reason(SUSPENDED) == "Suspending":
        return "Suspending"
    if is_stopping(conditions):
        return "Stopping"
    for kind in (QUEUED, RUNNING):
        if conditions.is_true(kind):
            return kind
    accepted = conditions.get(ACCEPTED)
    if accepted and accepted.status == "False":
        return "Invalid"
    return "Pending" if attempt else "Accepted"

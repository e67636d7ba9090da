"""The one word of the STATE column, from the conditions."""

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


def state_of(conditions: Conditions, attempt: int) -> str:
    """The word that tells most; an end wins over everything else."""
    for kind in (COMPLETE, FAILED, SUSPENDED, RESTARTING):
        if conditions.is_true(kind):
            return kind
    if conditions.reason(SUSPENDED) == "Suspending":
        return "Suspending"
    for kind in (QUEUED, RUNNING):
        if conditions.is_true(kind):
            return kind
    accepted = conditions.get(ACCEPTED)
    if accepted and accepted.status == "False":
        return "Invalid"
    return "Pending" if attempt else "Accepted"

"""Which changes of a job's conditions a user should see as Events. Pure."""

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
from kubelora_operator.decision.failure import HELD_REASON
from kubelora_operator.decision.plan import Notice

_TOLD_WHEN_TRUE: Final = (QUEUED, SUSPENDED, RESTARTING, COMPLETE, FAILED)
_BAD_WHEN_TRUE: Final = (RESTARTING, FAILED)
_QUIET: Final = frozenset({"Starting", "Finished", "Queued", "Suspended", "TrainerStarting"})


def notices_between(old: JobStatus, new: JobStatus) -> tuple[Notice, ...]:
    """One notice for each condition whose status or reason changed in a way worth telling."""
    before = {c.type: (c.status, c.reason) for c in old.conditions}
    changed = [c for c in new.conditions if before.get(c.type) != (c.status, c.reason)]
    ended = {c.reason for c in changed if _is_a_bad_end(c)}
    # The same cause stands in Running=False: one Event is enough.
    telling = [c for c in changed if c.type != RUNNING or c.reason not in ended]
    return tuple(notice for c in telling if (notice := _notice(c)))


def _is_a_bad_end(condition: Condition) -> bool:
    kind = condition.type in _BAD_WHEN_TRUE or condition.reason == HELD_REASON
    return kind and condition.type != RUNNING and condition.status == "True"


def _notice(condition: Condition) -> Notice | None:
    true = condition.status == "True"
    match condition.type:
        case kind if kind in _TOLD_WHEN_TRUE and true:
            bad = _is_a_bad_end(condition)
            return Notice("Warning" if bad else "Normal", condition.reason, condition.message)
        case kind if kind == RUNNING and condition.reason not in _QUIET:
            bad = not true or condition.reason == "StatusUnreachable"
            return Notice("Warning" if bad else "Normal", condition.reason, condition.message)
        case kind if kind == ACCEPTED and (not true or condition.reason == "LossyPrecision"):
            return Notice("Warning", condition.reason, condition.message)
        case kind if kind == HEALTHY and (
            condition.status == "False" or condition.reason == "Warning"
        ):
            return Notice("Warning", condition.reason, condition.message)
        case _:
            return None

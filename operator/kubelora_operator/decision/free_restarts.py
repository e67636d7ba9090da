"""The budget of restarts that don't count against maxRestarts. Pure.

Infrastructure that ends every attempt is not the job's fault, but must not cause endless attempts:
within a window of time they wait longer and longer, and then for the user.
"""

from datetime import timedelta
from typing import Final

from kubelora_operator.decision.conditions import RESTARTING, SUSPENDED, format_time, parse_time
from kubelora_operator.decision.failure import JOB_DELETED, Failure, RestartCost
from kubelora_operator.decision.gang import GANG_WAITING
from kubelora_operator.decision.plan_builder import PlanBuilder

BUDGET: Final = 50
"""With the longest delay of 10 minutes between them, 50 restarts take a working day."""
WINDOW: Final = timedelta(hours=24)
"""A day: a maintenance that moves a job several times is forgotten by the next one."""
BUDGET_REASON: Final = "FreeRestartsExceeded"


def count_free_restart(builder: PlanBuilder, failure: Failure) -> PlanBuilder:
    """Count an end that maxRestarts does not count; a new window begins if the last one is over."""
    builder = open_window(builder)
    if failure.cost is not RestartCost.FREE or failure.explanation.reason == GANG_WAITING:
        return builder  # a gang may wait for days
    status = builder.status
    unknown = failure.explanation.reason == JOB_DELETED
    return builder.update_status(
        free_restarts=status.free_restarts + 1,
        free_restarts_since=status.free_restarts_since or format_time(builder.now),
        unknown_ends=status.unknown_ends + unknown,
    )


def open_window(builder: PlanBuilder) -> PlanBuilder:
    """Forget the restarts of a window that is over."""
    since = builder.status.free_restarts_since
    if since is None or builder.now - parse_time(since) < WINDOW:
        return builder
    return forget_free_restarts(builder)


def forget_free_restarts(builder: PlanBuilder) -> PlanBuilder:
    """Give the job its budget back."""
    return builder.update_status(free_restarts=0, free_restarts_since=None, unknown_ends=0)


def budget_exceeded(builder: PlanBuilder) -> bool:
    """Return whether there were too many uncounted restarts in the window."""
    return builder.status.free_restarts > BUDGET


def suspend_by_budget(builder: PlanBuilder, failure: Failure) -> PlanBuilder:
    """Set Suspended, with a message on how to resume."""
    builder = builder.clear_condition(RESTARTING, BUDGET_REASON, "the job waits for the user")
    return builder.set_condition(
        SUSPENDED,
        True,
        BUDGET_REASON,
        f"{BUDGET} restarts in {WINDOW // timedelta(hours=1)} h did not count against maxRestarts, "
        f"the last because {failure.explanation.message.rstrip('.')}. Once the cause is removed, "
        "set spec.suspend to true and then to false to resume from the last checkpoint",
    )

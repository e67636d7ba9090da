"""Builder of a reconcile plan: the status so far, its conditions, deletes and creates. Pure."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.status import ConditionType, JobStatus
from kubelora_operator.decision.conditions import (
    HEALTHY,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
    Truth,
)
from kubelora_operator.decision.run_progress import set_health_condition
from kubelora_operator.decision.snapshot import Child, Snapshot, TrainerPod
from kubelora_operator.decision.trainer_end import judge_child

REQUEUE_SOON: Final = timedelta(seconds=2)
"""When to reconcile again while something terminates without causing a watch event."""


@dataclass(frozen=True)
class PlanBuilder:
    """An immutable builder: each method returns a changed copy."""

    snapshot: Snapshot
    now: datetime
    status: JobStatus
    conditions: Conditions
    delete: tuple[Child, ...] = ()
    create: int | None = None
    requeue_after: timedelta | None = None

    def set_condition(
        self, kind: ConditionType, truth: bool, reason: str, message: str
    ) -> "PlanBuilder":
        """Set a condition to True or False.

        Args:
            kind: Type of the condition.
            truth: Its status.
            reason: CamelCase reason.
            message: Sentence for the user.
        """
        status: Truth = "True" if truth else "False"
        return replace(
            self,
            conditions=self.conditions.set(kind, status, reason, message),
        )

    def clear_condition(self, kind: ConditionType, reason: str, message: str) -> "PlanBuilder":
        """Set a condition to False if it is present.

        Args:
            kind: Type of the condition.
            reason: CamelCase reason.
            message: Sentence for the user.
        """
        return replace(self, conditions=self.conditions.clear(kind, reason, message))

    def update_status(self, **fields: object) -> "PlanBuilder":
        """Change fields of the status."""
        return replace(self, status=self.status.model_copy(update=fields))

    def delete_live_jobs(self) -> "PlanBuilder":
        """Delete every live Job; its pods save a checkpoint before they exit."""
        live = tuple(c for c in self.snapshot.children if c.live and not c.deleting)
        return replace(self, delete=tuple(c for c in self.delete if c not in live) + live)

    @property
    def child(self) -> Child | None:
        """The current attempt's Job, as its trainers left it."""
        return judge_child(self.snapshot, self.status.attempt, self.now)

    @property
    def pods(self) -> tuple[TrainerPod, ...]:
        """The current attempt's pods."""
        return self.snapshot.pods_of(self.status.attempt)

    @property
    def attempt_accounted(self) -> bool:
        """Whether the current attempt ended and was accounted for, or never started."""
        return self.conditions.is_true(RESTARTING) or self.conditions.is_true(SUSPENDED)

    @property
    def live(self) -> bool:
        """Whether a Job or pod of any attempt may still be running."""
        return any(c.live for c in self.snapshot.children) or any(
            p.live for p in self.snapshot.pods
        )


def set_not_running(builder: PlanBuilder, reason: str, message: str) -> PlanBuilder:
    """Set Running to False, and what is known of the numerical health of a job without a pod.

    Args:
        builder: The plan so far.
        reason: CamelCase reason.
        message: Sentence for the user.
    """
    if builder.conditions.reason(HEALTHY) == "StatusUnreachable":
        # That was about a running pod; without one, the last verdict holds again.
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, builder.status.health)
        )
    return builder.set_condition(RUNNING, False, reason, message)


def finish_time(child: Child | None, now: datetime) -> datetime:
    """Return when an attempt ended; ``now`` if unknown."""
    return child.finished if child and child.finished else now

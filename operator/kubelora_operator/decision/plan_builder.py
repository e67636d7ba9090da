"""A decision in the making: the status so far, its conditions, and what goes with them. Pure."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.status import JobStatus
from kubelora_operator.decision.conditions import (
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
    Truth,
    time_of,
)
from kubelora_operator.decision.snapshot import Child, Observation, TrainerPod

SOON: Final = timedelta(seconds=2)
"""When to look again while something ends that tells no one that it has ended."""


@dataclass(frozen=True)
class Draft:
    """A decision in the making: the status so far and what goes with it."""

    seen: Observation
    now: datetime
    status: JobStatus
    conditions: Conditions
    delete: tuple[Child, ...] = ()
    create: int | None = None
    again_after: timedelta | None = None

    def tell(self, kind: str, truth: bool, reason: str, message: str) -> "Draft":
        """With a condition True or False."""
        status: Truth = "True" if truth else "False"
        return replace(
            self,
            conditions=self.conditions.set(kind, status, reason, message),
        )

    def untell(self, kind: str, reason: str, message: str) -> "Draft":
        """With a condition False, where it was ever told."""
        return replace(self, conditions=self.conditions.clear(kind, reason, message))

    def update(self, **fields: object) -> "Draft":
        """With fields of the status changed."""
        return replace(self, status=self.status.model_copy(update=fields))

    @property
    def child(self) -> Child | None:
        """The current attempt's Job."""
        return self.seen.child_of(self.status.attempt)

    @property
    def pods(self) -> tuple[TrainerPod, ...]:
        """The current attempt's pods."""
        return self.seen.pods_of(self.status.attempt)

    @property
    def accounted(self) -> bool:
        """Whether the current attempt is over and paid for, or was never begun."""
        return self.conditions.is_true(RESTARTING) or self.conditions.is_true(SUSPENDED)

    @property
    def live(self) -> bool:
        """Whether anything of any attempt may still run."""
        return any(c.live for c in self.seen.children) or any(p.live for p in self.seen.pods)


def stopped(draft: Draft, reason: str, message: str, ended: datetime) -> Draft:
    """Running=False; the time it ran until ``ended`` is added to ``activeSeconds``."""
    running = draft.conditions.get(RUNNING)
    if running and running.status == "True":
        ran = max(int((ended - time_of(running.last_transition_time)).total_seconds()), 0)
        draft = draft.update(active_seconds=(draft.status.active_seconds or 0) + ran)
    return draft.tell(RUNNING, False, reason, message)

"""Conditions of a status as metav1 means them: one of each type, a time that marks a change.

Pure. ``lastTransitionTime`` moves only when the status of a condition changes, so it can serve as
the start of a delay that survives a restart of the operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from kubelora_api.status import Condition

ACCEPTED: Final = "Accepted"
QUEUED: Final = "Queued"
RUNNING: Final = "Running"
SUSPENDED: Final = "Suspended"
RESTARTING: Final = "Restarting"
COMPLETE: Final = "Complete"
FAILED: Final = "Failed"
HEALTHY: Final = "NumericallyHealthy"
TYPES: Final = (ACCEPTED, QUEUED, RUNNING, SUSPENDED, RESTARTING, COMPLETE, FAILED, HEALTHY)
MESSAGE_MAX: Final = 4096
"""Characters of a message. The API takes 32,768; a terminal does not."""

Truth = Literal["True", "False", "Unknown"]


def time_text(moment: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as metav1.Time is written."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: str) -> datetime:
    """A metav1.Time or MicroTime as an aware datetime; ValueError where it is none."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Conditions:
    """The conditions of one job, with the generation and the time that a change is stamped with."""

    items: tuple[Condition, ...]
    generation: int
    now: datetime

    @classmethod
    def start(cls, items: Iterable[Condition], generation: int, now: datetime) -> "Conditions":
        """From what the status holds; conditions that are not ours are dropped."""
        known = {c.type: c for c in items if c.type in TYPES}
        return cls(tuple(known[t] for t in TYPES if t in known), generation, now)

    def get(self, kind: str) -> Condition | None:
        """The condition of a type."""
        return next((c for c in self.items if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Whether the condition is there and True."""
        found = self.get(kind)
        return found is not None and found.status == "True"

    def reason(self, kind: str) -> str:
        """Its reason, or an empty string."""
        found = self.get(kind)
        return found.reason if found else ""

    def set(self, kind: str, status: Truth, reason: str, message: str) -> "Conditions":
        """With the condition set; its time moves only when its status changes."""
        old = self.get(kind)
        changed = old is None or old.status != status
        fresh = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=shortened(message),
            observed_generation=self.generation,
            last_transition_time=time_text(self.now)
            if changed or old is None
            else old.last_transition_time,
        )
        others = {c.type: c for c in self.items} | {kind: fresh}
        return Conditions(tuple(others[t] for t in TYPES if t in others), self.generation, self.now)

    def clear(self, kind: str, reason: str, message: str) -> "Conditions":
        """False where it is True or doubtful; a condition that was never told stays untold."""
        return self.set(kind, "False", reason, message) if self.get(kind) else self


def shortened(message: str) -> str:
    """A message that fits, its end cut off."""
    return message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 1] + "…"

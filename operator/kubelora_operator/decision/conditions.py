"""Status conditions with the semantics of metav1.Condition: one per type.

Pure. ``lastTransitionTime`` moves only when the status of a condition changes, so it can serve as
the start of a delay that survives a restart of the operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, get_args

from kubelora_api.status import Condition, ConditionType

ACCEPTED: Final = "Accepted"
QUEUED: Final = "Queued"
RUNNING: Final = "Running"
SUSPENDED: Final = "Suspended"
RESTARTING: Final = "Restarting"
COMPLETE: Final = "Complete"
FAILED: Final = "Failed"
HEALTHY: Final = "NumericallyHealthy"
TYPES: Final[tuple[ConditionType, ...]] = get_args(ConditionType)
MESSAGE_MAX: Final = 4096
"""Maximum characters of a message. The API allows 32,768, which no terminal can show."""

Truth = Literal["True", "False", "Unknown"]


def format_time(moment: datetime) -> str:
    """Format a time as metav1.Time does: RFC 3339 in UTC with whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Parse a metav1.Time or MicroTime into an aware datetime; raise ValueError otherwise."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Conditions:
    """Conditions of one job, with the generation and the time recorded for a change."""

    items: tuple[Condition, ...]
    generation: int
    now: datetime

    @classmethod
    def start(cls, items: Iterable[Condition], generation: int, now: datetime) -> "Conditions":
        """Start from the conditions in the status; drop types that are not ours."""
        known = {c.type: c for c in items if c.type in TYPES}
        return cls(tuple(known[t] for t in TYPES if t in known), generation, now)

    def get(self, kind: str) -> Condition | None:
        """Return the condition of this type, or None."""
        return next((c for c in self.items if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Return whether the condition is present and True."""
        found = self.get(kind)
        return found is not None and found.status == "True"

    def reason(self, kind: str) -> str:
        """Return the condition's reason, or an empty string."""
        found = self.get(kind)
        return found.reason if found else ""

    def set(self, kind: ConditionType, status: Truth, reason: str, message: str) -> "Conditions":
        """Set the condition and return the result; its time moves only when its status changes.

        Args:
            kind: Type of the condition.
            status: ``True``, ``False`` or ``Unknown``.
            reason: CamelCase reason.
            message: Sentence for the user; truncated where it is too long.
        """
        old = self.get(kind)
        changed = old is None or old.status != status
        fresh = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=truncate_message(message),
            observed_generation=self.generation,
            last_transition_time=format_time(self.now)
            if changed or old is None
            else old.last_transition_time,
        )
        others = {c.type: c for c in self.items} | {kind: fresh}
        return Conditions(tuple(others[t] for t in TYPES if t in others), self.generation, self.now)

    def observed(self, except_for: Iterable[str]) -> "Conditions":
        """Return the conditions, true for this generation but for those of the given types."""
        items = tuple(
            c
            if c.type in except_for
            else c.model_copy(update={"observed_generation": self.generation})
            for c in self.items
        )
        return Conditions(items, self.generation, self.now)

    def clear(self, kind: ConditionType, reason: str, message: str) -> "Conditions":
        """Set the condition to False if it is present; a condition never set stays absent.

        Args:
            kind: Type of the condition.
            reason: CamelCase reason.
            message: Sentence for the user.
        """
        return self.set(kind, "False", reason, message) if self.get(kind) else self


def truncate_message(message: str) -> str:
    """Cut off the end of a message that is too long."""
    return message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 1] + "…"

"""A refusal: the sentence about one thing that a podTemplate may not ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from kubelora_operator.admission.policy import PodPolicy

_SHOWN = 80
"""Characters of a value that a message repeats; a condition has room for several refusals."""


@dataclass(frozen=True)
class Refusal:
    """A field, what was found there, and the advice."""

    path: str
    found: str
    advice: str

    def __str__(self) -> str:
        found = self.found if len(self.found) <= _SHOWN else self.found[: _SHOWN - 3] + "..."
        return f"{self.path}: {found} is not allowed; {self.advice}"


def not_listed(path: str, found: str, policy: PodPolicy, value: str) -> Refusal:
    """Refuse what an allow-list does not have.

    Args:
        path: Path of the field.
        found: What it asks for.
        policy: The policy.
        value: Name of the policy's field.
    """
    listed: Sequence[str] = getattr(policy, value)
    allowed = ", ".join(listed) if listed else "nothing"
    return Refusal(
        path,
        found,
        f"allowed: {allowed}. Remove it, or ask the platform team to add it to the chart value "
        f"podPolicy.{to_camel(value)}",
    )


def too_large(path: str, found: str, policy: PodPolicy, value: str) -> Refusal:
    """Refuse what exceeds a limit.

    Args:
        path: Path of the field.
        found: What it asks for.
        policy: The policy.
        value: Name of the policy's field.
    """
    return Refusal(
        path,
        found,
        f"set at most {getattr(policy, value)}, or ask the platform team to raise the chart value "
        f"podPolicy.{to_camel(value)}",
    )

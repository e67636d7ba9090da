"""The watchdog's knowledge of a run: findings, verdict, and the state of its detectors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import PlainSerializer, TypeAdapter

from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding, HealthStatus, Verdict
from kubelora_api.thresholds import THRESHOLDS, by_precedence

MAX_FINDINGS = 10
"""As many as the status may hold: with their sentences they fit the termination message."""
CAUSE = " Cause: "
"""What begins the sentence of a finding's cause, behind what was found."""
MAX_MESSAGE = 1024
"""Characters of a finding's message in the status."""
Names = Annotated[frozenset[str], PlainSerializer(sorted)]
"""A set that is saved sorted, so that equal sets are saved as the same bytes."""


@dataclass(frozen=True)
class WatchState:
    """The watchdog's knowledge.

    judged: findings that every run can be judged by, once they were compared.
    found: by finding, as last raised and with the worst value since; never removed.
    active: findings that the newest step still shows.
    accepted: active findings that the user resumed the run with; dropped once they clear.
    detectors: the detectors' own state, by their own keys; filled in only for a checkpoint.
    """

    judged: Names = frozenset()
    found: Mapping[str, Finding] = field(default_factory=dict)
    active: Names = frozenset()
    accepted: Names = frozenset()
    detectors: JsonObject = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst finding so far; Unknown until every limit has been compared once."""
        severities = {f.severity for f in self.found.values()}
        if "critical" in severities:
            return "Critical"
        if severities:
            return "Warning"
        wanted = {t.finding for t in THRESHOLDS if t.everywhere}
        return "Healthy" if self.judged >= wanted else "Unknown"

    @property
    def due(self) -> Finding | None:
        """A critical finding that the newest step still shows and nobody has accepted."""
        shown = (f for f in self._ordered() if f.name in self.active - self.accepted)
        return next((f for f in shown if f.severity == "critical"), None)

    def shown(self, name: str) -> Finding | None:
        """Return the finding of this name if it is active."""
        return self.found.get(name) if name in self.active else None

    def status(self) -> HealthStatus:
        """Build the health of the job's status, the likeliest cause first."""
        return HealthStatus(verdict=self.verdict, findings=self._ordered()[:MAX_FINDINGS])

    def _ordered(self) -> list[Finding]:
        """Return the findings, critical ones first and causes before what follows from them."""
        return sorted(
            self.found.values(), key=lambda f: (f.severity != "critical", by_precedence(f.name))
        )


def with_cause(message: str, why: str) -> str:
    """Add the sentence of the cause; where both are too long, the first is cut."""
    ending = f"{CAUSE}{why}"
    return message[: MAX_MESSAGE - len(ending)] + ending


_STATE = TypeAdapter(WatchState)
_OWN = frozenset({"judged", "found", "active", "accepted"})


def to_json(state: WatchState) -> JsonObject:
    """Return the state as plain JSON, for a checkpoint: the detectors' keys next to its own."""
    own = _STATE.dump_python(state, mode="json", by_alias=True, include=set(_OWN))
    return {**state.detectors, **own}


def from_json(saved: JsonObject) -> WatchState:
    """Return the state that ``to_json`` wrote. Raises ValueError for anything else."""
    state = _STATE.validate_python({key: saved[key] for key in saved.keys() & _OWN})
    return replace(state, detectors={k: v for k, v in saved.items() if k not in _OWN})

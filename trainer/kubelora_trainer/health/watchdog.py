"""The watchdog: from the stream of step numbers to findings and a verdict.

Pure: state in, state out. Its limits are the table that the alert rules read too, judged on
medians over a few steps, so that one wild micro-batch raises no alarm; the first steps, where
lora_A has no gradient because lora_B is 0, are not judged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated

from pydantic import PlainSerializer, TypeAdapter

from kubelora_api.status import Finding, HealthStatus, Verdict
from kubelora_api.thresholds import GRADIENT_NONFINITE, THRESHOLDS, Threshold
from kubelora_trainer.health.baseline_envelope import Passage
from kubelora_trainer.health.quantities import Memory, RunFacts, at_resume, remembered, values_of
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.text import ranks_named

MAX_FINDINGS = 10
Names = Annotated[frozenset[str], PlainSerializer(sorted)]
"""The same bytes for the same set, whatever the order of its hashes."""


@dataclass(frozen=True)
class WatchState:
    """What the watchdog remembers.

    recent: newest values by finding and group (empty: of the whole step), at most the finding's
    window.
    judged: findings that every run can be judged by, once they were compared.
    found: by finding, as last raised and with the worst value since; never taken back.
    active: findings that the newest step still shows.
    accepted: active findings that the user went on from; dropped once they clear.
    memory: what single steps are compared with.
    passage: where the run is in the range of its baseline.
    """

    recent: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    judged: Names = frozenset()
    found: Mapping[str, Finding] = field(default_factory=dict)
    active: Names = frozenset()
    accepted: Names = frozenset()
    memory: Memory = field(default_factory=Memory)
    passage: Passage = field(default_factory=Passage)

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
        shown = (f for n, f in self.found.items() if n in self.active - self.accepted)
        return next((f for f in shown if f.severity == "critical"), None)

    def status(self) -> HealthStatus:
        """As the job's status tells it."""
        return HealthStatus(verdict=self.verdict, findings=list(self.found.values())[:MAX_FINDINGS])


def observe(state: WatchState, numbers: StepNumbers, facts: RunFacts) -> WatchState:
    """The state after one more optimizer step; one that the loss scaler skipped tells nothing."""
    if numbers.skipped:
        return state
    for threshold in THRESHOLDS:
        if numbers.step > threshold.skip_steps:
            values = values_of(threshold, numbers, facts, state.memory)
            named = {group or "": value for group, value in values.items()}
            state = _observe_one(state, threshold, named, numbers.step, facts.compute)
    return replace(
        state,
        found=_with_origin(state.found, numbers),
        accepted=state.accepted & state.active,
        memory=remembered(state.memory, numbers),
    )


def _with_origin(found: Mapping[str, Finding], numbers: StepNumbers) -> Mapping[str, Finding]:
    """``found``, where what is not finite tells the ranks that it came from."""
    name = GRADIENT_NONFINITE.finding
    finding = found.get(name)
    if not numbers.broken_ranks or finding is None or finding.since_step != numbers.step:
        return found
    who = ranks_named(numbers.broken_ranks, "")
    told = f"{finding.message} It came from the micro-batches of {who}."
    return {**found, name: finding.model_copy(update={"message": told})}


def resumed(state: WatchState) -> WatchState:
    """The state of a run that has just been resumed from a checkpoint."""
    return replace(state, memory=at_resume(state.memory))


def accept(state: WatchState) -> WatchState:
    """The state of a run that its user goes on with, knowing what is active.

    What a single step shows is an event, and the next one is another.
    """
    lasting = {t.finding for t in THRESHOLDS if t.window > 1}
    return replace(state, accepted=state.active & lasting)


def with_finding(state: WatchState, finding: Finding) -> WatchState:
    """The state with something found elsewhere; it stays."""
    return replace(
        state,
        found={**state.found, finding.name: finding},
        active=state.active | {finding.name},
    )


def last_healthy_step(finding: Finding) -> int:
    """The last optimizer step that no value behind the finding was measured at, or after."""
    windows = {t.finding: t.window for t in THRESHOLDS}
    return max(0, (finding.since_step or 0) - windows.get(finding.name, 1))


HINDSIGHT_STEPS = max(t.window for t in THRESHOLDS) + 1
"""Steps after which a fault has shown: the longest window, and the step that numbers come late."""


def _observe_one(
    state: WatchState, threshold: Threshold, values: Mapping[str, float], step: int, compute: str
) -> WatchState:
    name, limit = threshold.finding, threshold.limit_for(compute)
    recent = dict(state.recent.get(name, {}))
    medians: dict[str, float] = {}
    for group, value in values.items():
        if not math.isnan(value):
            recent[group] = (*recent.get(group, ()), value)[-threshold.window :]
        if len(recent.get(group, ())) == threshold.window:
            medians[group] = median(recent[group])
    broken = {g: v for g, v in medians.items() if _beyond(threshold, v, limit)}
    found = dict(state.found)
    if broken:
        worst = (min if threshold.op == "<" else max)(broken, key=lambda g: broken[g])
        earlier = found.get(name) if name in state.active else None
        found[name] = _finding(threshold, limit, worst, broken[worst], step, earlier)
    judged = {name} if medians and threshold.everywhere else set()
    # What a single step shows is over with the next: nothing of it is kept.
    kept = {**state.recent, name: recent} if recent and threshold.window > 1 else state.recent
    return replace(
        state,
        recent=kept,
        judged=state.judged | judged,
        found=found,
        active=(state.active | {name}) if broken else (state.active - {name}),
    )


def _beyond(threshold: Threshold, value: float, limit: float) -> bool:
    match threshold.op:
        case ">":
            return value > limit
        case "<":
            return value < limit
        case "==":
            return value == limit


def _finding(
    threshold: Threshold,
    limit: float,
    group: str,
    value: float,
    step: int,
    earlier: Finding | None,
) -> Finding:
    """The finding at this step; it keeps the step that showed it first and the worst value."""
    if earlier is not None and earlier.value is not None:
        worse = value < earlier.value if threshold.op == "<" else value > earlier.value
        if not worse:
            return earlier
    return Finding(
        name=threshold.finding,
        severity=threshold.severity,
        group=group or None,
        value=value,
        threshold=limit,
        since_step=earlier.since_step if earlier else step,
        message=threshold.sentence,
    )


_STATE = TypeAdapter(WatchState)
_OF_THIS_ATTEMPT = {"memory": {"before", "since"}}
"""Begins anew with every resume."""


def to_json(state: WatchState) -> dict[str, object]:
    """The state as plain JSON, for a checkpoint."""
    plain: dict[str, object] = _STATE.dump_python(
        state, mode="json", by_alias=True, exclude=_OF_THIS_ATTEMPT
    )
    return plain


def from_json(saved: Mapping[str, object]) -> WatchState:
    """The state that ``to_json`` wrote. Raises ValueError for anything else."""
    return _STATE.validate_python(saved)

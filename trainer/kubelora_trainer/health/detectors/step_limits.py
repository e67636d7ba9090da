"""Detection of steps whose numbers are beyond a limit of the table that the alert rules read too.

Values are judged on medians over a few steps, so that one wild micro-batch raises no alarm; the
first steps, where lora_A has no gradient because lora_B is 0, are not judged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from pydantic import TypeAdapter

from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding
from kubelora_api.thresholds import GRADIENT_NONFINITE, THRESHOLDS, Threshold
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.detectors.quantities import (
    Memory,
    RunFacts,
    at_resume,
    remembered,
    values_of,
)
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.text import ranks_named

Recent = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Newest values by finding and group (empty: of the step), at most the finding's window."""


@dataclass(frozen=True)
class _State:
    """The state of the limits. memory: what single steps are compared with."""

    recent: Recent = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


_STATE = TypeAdapter(_State)
_OF_THIS_ATTEMPT = {"memory": {"before", "since"}}
"""Begins again with every resume."""


class StepLimits(Detector):
    """All rows of `THRESHOLDS`. A new limit on a metric is a row of that table and nothing else."""

    rows = THRESHOLDS

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._recent: dict[str, dict[str, tuple[float, ...]]] = {}
        self._memory = Memory()

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Keep what the first steps after a resume are compared with."""
        if start.reason == "resumed":
            self._memory = at_resume(self._memory)
        return NOTHING

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Compare a step with every limit; one that the loss scaler skipped shows nothing."""
        if numbers.skipped:
            return NOTHING
        raised: list[Finding] = []
        cleared: set[str] = set()
        judged: set[str] = set()
        for row in THRESHOLDS:
            if numbers.step <= row.skip_steps:
                continue
            medians = self._medians(row, numbers)
            if medians and row.everywhere:
                judged.add(row.finding)
            limit = row.limit_for(self._facts.compute)
            broken = {g: v for g, v in medians.items() if _beyond(row, v, limit)}
            if broken:
                earlier = known.shown(row.finding)
                raised.append(_finding(row, limit, broken, numbers, earlier))
            else:
                cleared.add(row.finding)
        self._memory = remembered(self._memory, numbers)
        return Judgement(tuple(raised), frozenset(cleared), frozenset(judged))

    def _medians(self, row: Threshold, numbers: StepNumbers) -> dict[str, float]:
        """Compute medians by group, of groups that were measured often enough."""
        recent = dict(self._recent.get(row.finding, {}))
        medians: dict[str, float] = {}
        for name, value in values_of(row, numbers, self._facts, self._memory).items():
            group = name or ""
            if not math.isnan(value):
                recent[group] = (*recent.get(group, ()), value)[-row.window :]
            if len(recent.get(group, ())) == row.window:
                medians[group] = median(recent[group])
        # What a single step shows is over with the next: nothing of it is kept.
        if recent and row.window > 1:
            self._recent[row.finding] = recent
        return medians

    def state(self) -> JsonObject:
        """Return the newest values, and what single steps are compared with."""
        state = _State(self._recent, self._memory)
        plain: JsonObject = _STATE.dump_python(
            state, mode="json", by_alias=True, exclude=_OF_THIS_ATTEMPT
        )
        return plain

    def load(self, saved: JsonObject) -> None:
        """Restore them."""
        state = _STATE.validate_python({k: saved[k] for k in ("recent", "memory") if k in saved})
        self._recent = {name: dict(values) for name, values in state.recent.items()}
        self._memory = state.memory


def _beyond(row: Threshold, value: float, limit: float) -> bool:
    match row.op:
        case ">":
            return value > limit
        case "<":
            return value < limit
        case "==":
            return value == limit


def _finding(
    row: Threshold,
    limit: float,
    broken: Mapping[str, float],
    numbers: StepNumbers,
    earlier: Finding | None,
) -> Finding:
    """Build the finding, with the step that showed it first and the worst value since."""
    group = (min if row.op == "<" else max)(broken, key=lambda g: broken[g])
    value = broken[group]
    if earlier is not None and earlier.value is not None:
        worse = value < earlier.value if row.op == "<" else value > earlier.value
        if not worse:
            return earlier
    since = earlier.since_step if earlier else numbers.step
    message = row.sentence
    if row is GRADIENT_NONFINITE and numbers.broken_ranks and since == numbers.step:
        who = ranks_named(numbers.broken_ranks, "")
        message = f"{message} It came from the micro-batches of {who}."
    return Finding(
        name=row.finding,
        severity=row.severity,
        group=group or None,
        value=value,
        threshold=limit,
        since_step=since,
        message=message,
    )

"""Detection of gradients that lead uphill, and of a device that computes one thing twice unequally.

Both need a micro-step to be computed again, which `training/step_audit.py` does every N steps; here
is what is made of it.
"""

from typing import Final

from kubelora_api.finding_rows import Event
from kubelora_api.findings_of_steps import COMPUTATION_UNSTABLE, GRADIENT_REVERSED
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, AuditFacts, Detector, Judgement, RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_ROWS: Final = (GRADIENT_REVERSED, COMPUTATION_UNSTABLE)


class AuditedStep(Detector):
    """A judgement of the newest audit, with the step that it was a part of."""

    rows = _ROWS

    def __init__(self) -> None:
        self._start: RunStart | None = None
        self._facts: AuditFacts | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Forget an audit of steps that a rollback has undone."""
        self._start, self._facts = start, None
        return NOTHING

    def on_audit(self, facts: AuditFacts) -> None:
        """Keep the audit for the step's own numbers."""
        self._facts = facts

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise what the audit of this step showed; it lasts until an audit shows it no more."""
        facts = self._facts
        if facts is None or facts.step != numbers.step:
            return NOTHING
        self._facts = None
        raised = [f for f in (self._reversed(facts), self._unstable(facts)) if f is not None]
        names = frozenset(row.finding for row in _ROWS)
        return Judgement(tuple(raised), names - {f.name for f in raised}, names)

    def _reversed(self, facts: AuditFacts) -> Finding | None:
        limit = GRADIENT_REVERSED.limit or 0.0
        if facts.loss < 0.0:
            what = f"The loss is {facts.loss:.3g}, and a sum of squares is never negative."
            return _finding(GRADIENT_REVERSED, facts.loss, None, facts.step, what)
        if facts.descent is not None and facts.descent < limit:
            what = (
                "Along its own gradient the loss of a micro-step changes by "
                f"{facts.descent:.2g} times what the gradient predicts."
            )
            return _finding(GRADIENT_REVERSED, facts.descent, None, facts.step, what)
        wrong = {place: ratio for place, ratio in enumerate(facts.by_factor) if ratio < limit}
        if not wrong or self._start is None:
            return None
        place = min(wrong, key=lambda place: wrong[place])
        factor = self._start.buffers.slots[place].factor
        what = (
            f"The gradient of {len(wrong)} of {len(facts.by_factor)} factors has another sign than "
            f"the gradient at their module's output gives it. The worst is {factor.name}."
        )
        return _finding(GRADIENT_REVERSED, wrong[place], factor.group, facts.step, what)

    def _unstable(self, facts: AuditFacts) -> Finding | None:
        if facts.differs <= (COMPUTATION_UNSTABLE.limit or 0.0) or self._start is None:
            return None
        groups = {s.factor.name: s.factor.group for s in self._start.buffers.slots}
        what = (
            "A micro-step that was computed again has another gradient: that of "
            f"{facts.factor} differs by {facts.differs:.3g} of its norm."
        )
        group = groups.get(facts.factor)
        return _finding(COMPUTATION_UNSTABLE, facts.differs, group, facts.step, what)


def _finding(row: Event, value: float, group: str | None, step: int, what: str) -> Finding:
    return Finding(
        name=row.finding,
        severity=row.severity,
        group=group,
        value=value,
        threshold=row.limit,
        since_step=step,
        message=f"{what} {row.sentence}",
    )

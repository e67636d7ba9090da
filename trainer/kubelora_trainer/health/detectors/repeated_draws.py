"""Detection of timesteps or noise that are not drawn again for each sample.

A generator that is seeded with the same number each time, or a timestep that is rounded away,
trains a single point of what the model must know: gradients obey every law, and the loss falls
faster than it should. Chance does not repeat itself sixteen times.
"""

from collections.abc import Mapping, Sequence

from kubelora_api.status import Finding
from kubelora_api.thresholds import DRAWS_REPEATED
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_LIMIT = int(DRAWS_REPEATED.limit or 0)


class RepeatedDraws(Detector):
    """A count of equal draws in a row, over the samples in the order of training."""

    rows = (DRAWS_REPEATED,)

    def __init__(self) -> None:
        self._micro_step: int | None = None
        self._last: dict[str, float] = {}
        self._in_a_row: dict[str, int] = {}
        self._worst: tuple[int, str] = (0, "")

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Count its timesteps and noises."""
        self._count(facts.micro_step, {"timestep": facts.timesteps, "noise": facts.noise})

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise, once, what was the same for too long."""
        if DRAWS_REPEATED.finding in known.found:
            return NOTHING
        return Judgement(self.findings(numbers.step))

    def _count(self, micro_step: int, drawn: Mapping[str, Sequence[float]]) -> None:
        """Count a micro-step's draws, by kind: one number for each of its samples.

        A micro-step that comes twice (a compiled model is compared on it) is not a repetition.
        """
        if micro_step == self._micro_step:
            return
        self._micro_step = micro_step
        for what, values in drawn.items():
            for value in values:
                again = self._last.get(what) == value
                self._in_a_row[what] = self._in_a_row.get(what, 0) + 1 if again else 1
                self._last[what] = value
            self._worst = max(self._worst, (self._in_a_row[what], what))

    def findings(self, step: int) -> tuple[Finding, ...]:
        """Return what was the same for too long, as known in ``step``."""
        count, what = self._worst
        if count < _LIMIT:
            return ()
        return (
            Finding(
                name=DRAWS_REPEATED.finding,
                severity=DRAWS_REPEATED.severity,
                value=count,
                threshold=_LIMIT,
                since_step=step,
                message=f"The {what} of {count} samples in a row was the same. "
                f"{DRAWS_REPEATED.sentence}",
            ),
        )

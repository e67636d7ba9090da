"""Detection of a single step whose loss or gradient norm is far above the steps before it.

Limits on medians ignore one wild step, as they must: it is no failure by itself. But it is how a
broken image, a flipped bit or a learning rate at its edge shows first, so it is worth a warning.
Both quantities vary by factors and not by amounts (the loss alone by 250 over the timesteps), so
they are compared in log space, with the median and the spread of the run's own recent steps.
"""

import math
from collections import deque
from statistics import median
from typing import Final

from pydantic import TypeAdapter

from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding
from kubelora_api.thresholds import STEP_SPIKED
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers

RECENT_STEPS: Final = 25
"""Steps that are compared with: few enough to follow a norm that grows with lora_B, and a median of
them is that of all timesteps."""
FEWEST_STEPS: Final = 15
"""Steps without which nothing is compared: the spread of fewer is off by half now and then."""
SETTLING_STEPS: Final = 3
"""First steps left out: lora_A has no gradient while lora_B is 0."""
LEAST_DEVIATION: Final = 0.3
"""Of a logarithm, below which a spread counts as this: runs with long windows or one image repeat
themselves to a few per cent, and an image that is twice as hard as the others is no spike."""
MAD_TO_DEVIATION: Final = 1.4826
"""Deviation of a normal distribution over its median absolute deviation."""

_RECENT = TypeAdapter(dict[str, list[float]])


class StepSpike(Detector):
    """A comparison of each step's loss and gradient norm with those of the steps before it."""

    rows = (STEP_SPIKED,)

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise a spike in the step that shows it, for as long as that step is a recent one.

        A gauge that is 1 for a single step would fall between two scrapes.
        """
        if numbers.skipped or numbers.step <= SETTLING_STEPS:
            return NOTHING
        found: list[Finding] = []
        for name, value in (("gradient norm", numbers.grad_norm), ("loss", numbers.loss)):
            if value > 0 and math.isfinite(value):
                found += self._compare(name, math.log(value), numbers.step)
        if not found:
            earlier = known.shown(STEP_SPIKED.finding)
            recent = earlier and numbers.step < (earlier.since_step or 0) + RECENT_STEPS
            return NOTHING if recent else Judgement(cleared=frozenset({STEP_SPIKED.finding}))
        return Judgement((max(found, key=lambda finding: finding.value or 0.0),))

    def _compare(self, name: str, log: float, step: int) -> list[Finding]:
        recent = self._recent.setdefault(name, deque(maxlen=RECENT_STEPS))
        before = tuple(recent)
        recent.append(log)
        if len(before) < FEWEST_STEPS:
            return []
        middle = median(before)
        spread = MAD_TO_DEVIATION * median(abs(one - middle) for one in before)
        deviations = (log - middle) / max(spread, LEAST_DEVIATION)
        limit = STEP_SPIKED.limit or math.inf
        if deviations <= limit:
            return []
        return [
            Finding(
                name=STEP_SPIKED.finding,
                severity=STEP_SPIKED.severity,
                value=deviations,
                threshold=limit,
                since_step=step,
                message=f"The {name} of step {step} is {math.exp(log - middle):.3g} times the "
                f"median of the {len(before)} steps before it. {STEP_SPIKED.sentence}",
            )
        ]

    def state(self) -> JsonObject:
        """Return the logarithms that the next step is compared with."""
        return {"spikes": {name: list(logs) for name, logs in self._recent.items()}}

    def load(self, saved: JsonObject) -> None:
        """Restore them."""
        recent = _RECENT.validate_python(saved.get("spikes", {}))
        self._recent = {name: deque(logs, maxlen=RECENT_STEPS) for name, logs in recent.items()}

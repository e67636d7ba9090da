"""Detection of a gradient element that no data can have produced: finite, and beyond all before it.

A flipped bit of an exponent makes one element 2^16 to 2^128 times what it is. The norm follows it,
clipping divides the step by the norm, and every other element's part of it is gone; Adam keeps
the trace of the one for a thousand steps. By the largest element of each slot it is known in
the step itself, after three others.
"""

from collections import deque
from typing import Final

import numpy as np

from kubelora_api.findings_of_steps import GRADIENT_CORRUPTED
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers

STEPS_BEFORE: Final = 25
"""Steps that are compared with."""
FEWEST_BEFORE: Final = 3
"""Steps without which nothing is compared: in the first, lora_A has no gradient yet."""


class GradientJump(Detector):
    """A comparison of each slot's largest element with the largest of the steps before."""

    rows = (GRADIENT_CORRUPTED,)

    def __init__(self) -> None:
        self._recent: deque[np.ndarray] = deque(maxlen=STEPS_BEFORE)
        self._start: RunStart | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Begin empty: after a resume the first steps are compared with each other."""
        self._start = start
        self._recent.clear()
        return NOTHING

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise it in the step that shows it, and leave that step out of later comparisons."""
        if numbers.skipped or numbers.nonfinite or self._start is None:
            return NOTHING
        now = np.asarray(numbers.factor_absmax)
        limit, name = GRADIENT_CORRUPTED.limit or np.inf, GRADIENT_CORRUPTED.finding
        if len(self._recent) >= FEWEST_BEFORE:
            before = np.max(self._recent, axis=0)
            ratio = np.divide(now, before, out=np.zeros_like(now), where=before > 0)
            place = int(ratio.argmax())
            if ratio[place] > limit:
                factor = self._start.buffers.slots[place].factor
                finding = Finding(
                    name=name,
                    severity=GRADIENT_CORRUPTED.severity,
                    group=factor.group,
                    value=float(ratio[place]),
                    threshold=limit,
                    since_step=numbers.step,
                    message=f"An element of {factor.name} is {ratio[place]:.3g} times the largest "
                    f"of the {len(self._recent)} steps before{_clipped(numbers)}. "
                    f"{GRADIENT_CORRUPTED.sentence}",
                )
                return Judgement((finding,))
        self._recent.append(now)
        return Judgement(cleared=frozenset({name}), judged=frozenset({name}))


def _clipped(numbers: StepNumbers) -> str:
    share = numbers.clipped_norm / numbers.grad_norm if numbers.grad_norm else 1.0
    return f", and clipping multiplied the step by {share:.3g}" if share < 1 else ""

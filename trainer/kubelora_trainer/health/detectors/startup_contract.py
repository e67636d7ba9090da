"""The start-up contract as detectors: each ends the run where it is broken, whatever the policy.

What is checked, and the sentences, are in ``health/startup_checks.py``; here it is decided when.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from kubelora_api.thresholds import ROLLED_BACK
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.startup_checks import (
    FirstGradients,
    ReachedModules,
    check_dtypes,
    check_finite,
    check_fresh_adapter,
    check_resumed,
)
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import NumericalError

KEPT_MICRO_BATCHES = 2048
"""More than two windows of any sensible length, because a step is judged while the next one runs;
a few bytes each."""
MAX_CAUSES = 5
"""Causes in a message; after the first few, more names do not help."""


class Dtypes(Detector):
    """A check that working copy, gradients, masters and optimizer state have the planned dtypes."""

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Compare them."""
        if start.reason == "rolled back":
            return NOTHING
        return Judgement(lines=(f"contract: {check_dtypes(start.buffers, start.optimizer)}",))


class FreshAdapter(Detector):
    """A check that an untrained adapter changes nothing."""

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Check that |B·A| is 0."""
        if not start.untrained:
            return NOTHING
        check_fresh_adapter(start.buffers, start.modules)
        return Judgement(lines=("contract: a fresh adapter, |B·A| = 0",))


class RestoredOptimizer(Detector):
    """A check that the optimizer has every step that the checkpoint's manifest counts."""

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Compare the two counts."""
        if start.reason == "new":
            return NOTHING
        held = check_resumed(start.optimizer, start.step, start.skipped, start.moved)
        return Judgement(lines=(f"contract: {held}",) if start.reason == "resumed" else ())


class ReachedByBackward(Detector):
    """A check that the first backward pass of an attempt reaches every adapter module."""

    def __init__(self) -> None:
        self._reached: ReachedModules | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Watch the next backward pass."""
        if self._reached is None:
            self._reached = ReachedModules(start.buffers)
        return NOTHING

    def on_backward(self) -> None:
        """Check the first one; later calls do nothing."""
        if self._reached is not None:
            self._reached.check()


class FiniteGradients(Detector):
    """A check that no gradient is NaN or infinite, except what a smaller loss scale cures."""

    def __init__(self, slots: Sequence[Slot], files: Sequence[str] = ()) -> None:
        """files: name of each sample's file."""
        self._slots, self._files = slots, files
        self._inputs: deque[tuple[tuple[int, ...], Mapping[str, Tensor]]] = deque(
            maxlen=KEPT_MICRO_BATCHES
        )

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Keep which inputs are finite; only a broken step reads them from the device."""
        self._inputs.append((facts.samples, facts.finite))

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Check the step's gradient."""
        try:
            check_finite(self._slots, numbers)
        except NumericalError as error:
            if causes := list(dict.fromkeys(self._causes())):
                raise NumericalError(
                    f"{error}. NaN or infinite values come from {'; '.join(causes[:MAX_CAUSES])}",
                    named=True,
                ) from None
            raise
        return NOTHING

    def _causes(self) -> Iterator[str]:
        for samples, finite in self._inputs:
            for what, of_samples in finite.items():
                for sample, fine in zip(samples, of_samples.tolist(), strict=True):
                    if not fine and sample < len(self._files):
                        yield f"the {what} of {self._files[sample]}"


class FirstGradientsArrive(Detector):
    """A check that each factor gets a gradient as soon as the mathematics gives it one."""

    def __init__(self, first: FirstGradients) -> None:
        self._first = first

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Set how many steps have moved a weight."""
        self._first.rewind(start.moved)
        return NOTHING

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Check the step's norms."""
        self._first.observe(numbers)
        return NOTHING


class RolledBack(Detector):
    """The warning of a run that was rolled back, which is never called healthy."""

    rows = (ROLLED_BACK,)

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Raise what the rollback left out."""
        if start.reason != "rolled back" or start.rollback is None:
            return NOTHING
        return Judgement((start.rollback.as_finding(),))

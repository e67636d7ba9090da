"""Detection of a moving average that does not follow the weights.

What a run exports is the average, if there is one, and neither gradients nor losses depend on it.
A few elements of every slot are averaged once more, from the average before and the weights after
the step, with the decay that the job asks for.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kubelora_api.findings_of_steps import AVERAGE_STALE
from kubelora_api.status import Finding
from kubelora_api.training_spec import Training
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart, UpdateFacts
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.ema import decay_at
from kubelora_trainer.telemetry.slot_sample import SAMPLES_PER_SLOT, SlotSample
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_ROUNDINGS: Final = 4.0
"""Roundings in fp32 that the result may be off by: two products and their sum make three."""
_LEAST_SHARE: Final = 1e-2
"""Share of the average's own move that it may be off by."""
_MISSED: Final = "average.missed"


class AverageCopy(Detector):
    """A comparison of the average's steps with the formula of ``training.ema``."""

    rows = (AVERAGE_STALE,)

    def __init__(self, training: Training | None) -> None:
        self._training = training
        self._start: RunStart | None = None
        self._before: tuple[int, Tensor] | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Choose the elements."""
        self._before = None
        if self._training is not None and start.average is not None:
            self._start = start
            self._sample = SlotSample(start.buffers.slots, start.buffers.masters.device)
        return NOTHING

    def before_update(self, update: UpdateFacts) -> None:
        """Take the average before the step."""
        if self._start is not None and self._start.average is not None:
            self._sample.move_to(update.step)
            self._before = update.step, self._sample.take(self._start.average.weights)

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Compare with the average after the step: by slot, elements that missed."""
        before, self._before = self._before, None
        if before is None or before[0] != step or self._start is None or self._training is None:
            return {}
        assert self._start.average is not None
        old = before[1].double()
        weight = self._sample.take(self._start.buffers.masters).double()
        now = self._sample.take(self._start.average.weights).double()
        move = (1.0 - decay_at(self._training.ema, step - 1)) * (weight - old)
        eps = torch.finfo(torch.float32).eps
        room = _LEAST_SHARE * move.abs() + _ROUNDINGS * eps * torch.maximum(old.abs(), weight.abs())
        return {_MISSED: ((now - old - move).abs() > room).sum(1)}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise it for the factor that missed most."""
        missed = numbers.extra.get(_MISSED)
        if missed is None or numbers.skipped or numbers.nonfinite or self._start is None:
            return NOTHING
        shares = [count / SAMPLES_PER_SLOT for count in missed]
        limit, name = AVERAGE_STALE.limit or 0.0, AVERAGE_STALE.finding
        wrong = sum(share > limit for share in shares)
        if not wrong:
            return Judgement(cleared=frozenset({name}), judged=frozenset({name}))
        if known.shown(name) is not None:
            return NOTHING
        factor = self._start.buffers.slots[shares.index(max(shares))].factor
        finding = Finding(
            name=name,
            severity=AVERAGE_STALE.severity,
            group=factor.group,
            value=max(shares),
            threshold=limit,
            since_step=numbers.step,
            message=f"The average of {wrong} of {len(shares)} factors did not move by its share "
            f"of the weights. The worst is {factor.name}. {AVERAGE_STALE.sentence}",
        )
        return Judgement((finding,))

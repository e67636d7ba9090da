"""Detection of a frozen base model that changes under the run, or was broken from the start.

Nothing may write into the base model while an adapter is trained; a flipped bit there is in every
loss from then on, and the adapter learns to make up for it. The bit patterns of each tensor are
summed at the start and compared now and then; integers have no tolerance.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kubelora_api.findings_of_steps import BASE_MODEL_ALTERED
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.bit_sums import bit_sum
from kubelora_trainer.utils.errors import NumericalError

COMPARED_EVERY_STEPS: Final = 20
"""Steps between two comparisons, each of which reads all weights once: 2 ms for SDXL's on an A100,
and 20 ms of the host's to start it, of steps that take seconds."""
_CHANGED: Final = "base.changed"


class FrozenModel(Detector):
    """A comparison of the frozen weights with those that the run started with."""

    rows = (BASE_MODEL_ALTERED,)

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._sums: Tensor | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Check that all weights are finite, once, and sum them."""
        if start.reason == "rolled back" or not start.frozen:
            return NOTHING
        self._names, self._tensors = list(start.frozen), list(start.frozen.values())
        if broken := _not_finite(start.frozen):
            raise NumericalError(
                f"{len(broken)} tensors of the base model hold NaN or infinite weights, the first "
                f"is {broken[0]}: no gradient can be finite with them. Look at model.uri and "
                "model.variant; the file is damaged, or its numbers do not fit precision.compute"
            )
        self._sums = self._compute()
        return NOTHING

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Compare every few steps: how many tensors changed, and which is the first."""
        if self._sums is None or step % COMPARED_EVERY_STEPS:
            return {}
        changed = self._compute() != self._sums
        return {_CHANGED: torch.stack([changed.sum(), changed.long().argmax()])}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Judge a comparison; make one at once where a gradient is not finite."""
        if numbers.nonfinite and not numbers.skipped:
            return self.on_checkpoint(numbers.step, known)
        if _CHANGED not in numbers.extra:
            return NOTHING
        count, first = (int(value) for value in numbers.extra[_CHANGED])
        return self._judge(count, first, numbers.step, known)

    def on_checkpoint(self, step: int, known: WatchState) -> Judgement:
        """Compare before the adapter is saved."""
        if self._sums is None:
            return NOTHING
        changed = (self._compute() != self._sums).nonzero().flatten().tolist()
        return self._judge(len(changed), changed[0] if changed else 0, step, known)

    def _judge(self, count: int, first: int, step: int, known: WatchState) -> Judgement:
        name = BASE_MODEL_ALTERED.finding
        if not count:
            return Judgement(judged=frozenset({name}))
        earlier = known.shown(name)
        if earlier is not None and (earlier.value or 0.0) >= count:
            return NOTHING
        finding = Finding(
            name=name,
            severity=BASE_MODEL_ALTERED.severity,
            value=float(count),
            threshold=BASE_MODEL_ALTERED.limit,
            since_step=earlier.since_step if earlier else step,
            message=f"{count} of {len(self._names)} tensors of the base model changed under the "
            f"run, the first is {self._names[first]}. {BASE_MODEL_ALTERED.sentence}",
        )
        return Judgement((finding,))

    def _compute(self) -> Tensor:
        return torch.stack([bit_sum(tensor) for tensor in self._tensors])


def _not_finite(frozen: Mapping[str, Tensor]) -> Sequence[str]:
    """Return the names of tensors that hold a NaN or an infinity; waits for the device."""
    floats = {n: t.detach() for n, t in frozen.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return ()
    ends = torch.stack([torch.stack(t.aminmax()).float() for t in floats.values()])
    wrong = (~torch.isfinite(ends)).any(1).tolist()
    return [name for name, one in zip(floats, wrong, strict=True) if one]

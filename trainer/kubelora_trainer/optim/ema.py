"""Exponential moving average (EMA) of the weights, which is smoother than those of any one step.

It costs one flat fp32 buffer and one kernel per step. The decay is a function of the optimizer
step, so the buffer is all that must be saved.
"""

from collections.abc import Mapping

from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Average
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.utils.stateful import check_like


class ExponentialMovingAverage:
    """The average of the master weights, ``weights``: flat, fp32; a `Stateful`."""

    def __init__(self, buffers: AdapterBuffers, spec: Average) -> None:
        self._masters, self._spec = buffers.masters, spec
        self.weights = buffers.masters.float().clone()

    def update(self, step: int, non_finite: Tensor) -> None:
        """Fold in the masters after optimizer step ``step`` (from 0).

        non_finite: scalar on the device, 1.0 if the step was skipped; the average is then
            unchanged.
        """
        share = (1.0 - decay_at(self._spec, step)) * (1.0 - non_finite)
        self.weights.lerp_(self._masters.float(), share)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average."""
        return {"weights": self.weights}

    def scalars(self) -> JsonObject:
        """Return nothing: the decay follows from the step."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what `tensors` returned."""
        check_like(self.tensors(), tensors)
        self.weights.copy_(tensors["weights"])


def decay_at(spec: Average, step: int) -> float:
    """Compute the share of the old average that optimizer step ``step`` (from 0) keeps.

    With warm-up it follows diffusers' EMAModel: 0 in the first step, then (1 + n) / (10 + n),
    limited by ``decay``.
    """
    if not spec.warmup:
        return spec.decay
    return min(spec.decay, (1 + step) / (10 + step)) if step else 0.0


def build_ema(buffers: AdapterBuffers, spec: Average) -> ExponentialMovingAverage | None:
    """Build the average that ``training.ema`` asks for, or return None."""
    return ExponentialMovingAverage(buffers, spec) if spec.enabled else None

"""A moving average of the weights: smoother than the weights of any one step.

One flat fp32 buffer beside the masters and one kernel a step. The decay is a function of the
optimizer step, so that the buffer is all there is to save.
"""

from collections.abc import Mapping

from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Average
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.utils.stateful import check_like


class ExponentialMovingAverage:
    """The average of the masters, ``weights``: flat, fp32. It is a `Stateful`."""

    def __init__(self, buffers: AdapterBuffers, spec: Average) -> None:
        self._masters, self._spec = buffers.masters, spec
        self.weights = buffers.masters.float().clone()

    def update(self, step: int, non_finite: Tensor) -> None:
        """Take in the masters after optimizer step ``step`` (from 0).

        non_finite: scalar on the device, 1.0 where the step moved nothing; then nothing moves here.
        """
        share = (1.0 - decay_at(self._spec, step)) * (1.0 - non_finite)
        self.weights.lerp_(self._masters.float(), share)

    def tensors(self) -> Mapping[str, Tensor]:
        """The average."""
        return {"weights": self.weights}

    def scalars(self) -> JsonObject:
        """Nothing: the decay follows from the step."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Take over what `tensors` gave."""
        check_like(self.tensors(), tensors)
        self.weights.copy_(tensors["weights"])


def decay_at(spec: Average, step: int) -> float:
    """Share of the old average that optimizer step ``step`` (from 0) keeps.

    With warm-up that of diffusers' EMAModel: nothing at first, then (1 + n) / (10 + n) up to decay.
    """
    if not spec.warmup:
        return spec.decay
    return min(spec.decay, (1 + step) / (10 + step)) if step else 0.0


def build_ema(buffers: AdapterBuffers, spec: Average) -> ExponentialMovingAverage | None:
    """The average that ``training.ema`` asks for, or None."""
    return ExponentialMovingAverage(buffers, spec) if spec.enabled else None

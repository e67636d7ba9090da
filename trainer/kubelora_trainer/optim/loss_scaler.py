"""Loss scaling for fp16: its range ends where the gradients of a LoRA begin.

    Micikevicius et al. 2018, "Mixed precision training", sec. 3.2

The loss is multiplied by a scale before the backward pass, so that gradients fit fp16's range
(6e-8 to 65,504); the accumulator is fp32 and takes the scale out again. Too large a scale makes a
gradient infinite: that step moves nothing and the scale is halved. Scales are powers of two, so
scaling itself rounds nothing. All state stays on the device; nothing waits to know.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.utils.stateful import check_like

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Good steps in a row after which the scale is doubled: PyTorch's GradScaler's."""


class LossScaler:
    """The scale, and what it has met. A `Stateful`.

    scale: fp32 scalar on the device, changed in place between windows alone. skipped: fp64 scalar,
    steps that moved nothing because the scale was too large.
    """

    def __init__(self, device: torch.device, growth_steps: int = GROWTH_STEPS) -> None:
        self._growth_steps = growth_steps
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss * self.scale

    @property
    def inverse(self) -> Tensor:
        """What the summed gradient is multiplied by; exact, for the scale is a power of two."""
        return self.scale.reciprocal()

    def update(self, non_finite: Tensor) -> None:
        """After a step: halve the scale where it failed, double it after enough good ones.

        non_finite: scalar on the device, 1.0 where the gradient was not finite.
        """
        failed = non_finite > 0
        good = torch.where(failed, 0.0, self._good_steps + 1)
        grown = good >= self._growth_steps
        factor = torch.where(failed, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(min=LEAST_SCALE)
        self._good_steps.copy_(torch.where(grown, 0.0, good))
        self.skipped.add_(failed)

    def tensors(self) -> Mapping[str, Tensor]:
        """Everything."""
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def scalars(self) -> JsonObject:
        """Nothing: all state is tensors."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Take over what ``tensors`` gave."""
        check_like(self.tensors(), tensors)
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


LEAST_SCALE: Final = 1.0
"""Of the loss; a gradient that is not finite at this scale is not the scale's fault."""

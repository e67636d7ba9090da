"""Dynamic loss scaling for fp16, whose range ends where a LoRA's gradients begin.

    Micikevicius et al. 2018, "Mixed precision training", sec. 3.2

The loss is multiplied by a scale before the backward pass, so that gradients fit fp16's range
(6e-8 to 65,504); the fp32 accumulator divides the scale out again. If the scale is too large, a
gradient becomes infinite: that step is skipped and the scale is halved. Scales are powers of two,
so scaling itself rounds nothing. All state stays on the device, and the host never waits for it.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.utils.stateful import check_like

FIRST_SCALE = 2.0**16  # PyTorch's GradScaler's init_scale
GROWTH_STEPS = 2000
"""Consecutive finite steps after which the scale is doubled, as in PyTorch's GradScaler."""


class LossScaler:
    """The scale and its history; a `Stateful`.

    Attributes:
        scale: fp32 scalar on the device, changed in place and only between windows.
        skipped: fp64 scalar, number of steps skipped because the scale was too large.
    """

    def __init__(self, device: torch.device, growth_steps: int = GROWTH_STEPS) -> None:
        self._growth_steps = growth_steps
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Scale the loss for the backward pass."""
        return loss * self.scale

    @property
    def inverse(self) -> Tensor:
        """Factor for the summed gradient; exact, because the scale is a power of two."""
        return self.scale.reciprocal()

    def update(self, non_finite: Tensor) -> None:
        """Halve the scale after a failed step, double it after enough finite ones.

        non_finite: scalar on the device, 1.0 if the gradient was not finite.
        """
        failed = non_finite > 0
        good = torch.where(failed, 0.0, self._good_steps + 1)
        grown = good >= self._growth_steps
        factor = torch.where(failed, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(min=LEAST_SCALE)
        self._good_steps.copy_(torch.where(grown, 0.0, good))
        self.skipped.add_(failed)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all state."""
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def scalars(self) -> JsonObject:
        """Return nothing: all state is tensors."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what ``tensors`` returned."""
        check_like(self.tensors(), tensors)
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


LEAST_SCALE: Final = 1.0
"""Smallest loss scale; a gradient that is not finite at this scale has another cause."""

"""The interface of an optimizer, whichever it is, and gradient clipping for it.

An optimizer works on per-factor views of the flat masters (true shapes, which Adafactor and 8-bit
states need). A gradient that is not finite moves neither weight nor state.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.optim.moments import Damping, Elements


class AdapterOptimizer(Protocol):
    """Turns the finished gradient into updated masters. It is a `Stateful` too."""

    @property
    def first_moment(self) -> Tensor | None:
        """Momentum, flat like the masters; None where the optimizer keeps none in that form."""

    @property
    def second_moment(self) -> Elements | None:
        """Mean of squared gradients, flat like the masters; None where it is not kept so."""

    @property
    def shadow_decay(self) -> float | None:
        """beta2 where second moments share a scale, and must be followed in fp32; else None."""

    @property
    def own_rate(self) -> float:
        """What the optimizer itself multiplies the schedule's rate by: 1, but for Prodigy."""

    @property
    def state_text(self) -> str:
        """In which form the state is, for people."""

    @property
    def state_bytes(self) -> int:
        """Memory of the state."""

    @property
    def damping(self) -> Damping | None:
        """How the second moment is used; None where the step has another form."""

    @property
    def steps_done(self) -> int:
        """Steps that the state has taken in, of the factor that has the fewest.

        Waits for the device.
        """

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and publish them.

        learning_rate: the schedule's; a factor's own is a fixed multiple of it.
        non_finite: scalar on the device, 1.0 where the gradient must not be used; nothing moves
        then.
        """

    def tensors(self) -> Mapping[str, Tensor]:
        """State to save."""

    def scalars(self) -> JsonObject:
        """State that is not a tensor, as plain JSON."""

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Take over what was saved. Raises ValueError, before anything moved, if it can't fit."""


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``total_norm`` down to ``max_norm``; 1 below it. 0 turns clipping off.

    total_norm: scalar, any device. The 1e-6 is that of ``torch.nn.utils.clip_grad_norm_``.
    A non-finite norm gives 1, so that the gradient is left as evidence.
    """
    if max_norm == 0:
        return torch.ones_like(total_norm)
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(total_norm), coefficient, torch.ones_like(coefficient))

"""Interfaces through which telemetry reads an optimizer's state."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Elements(Protocol):
    """A source of elements by position: a flat tensor, or a quantised one."""

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return the elements at ``index`` along dimension 0."""


@dataclass(frozen=True)
class Damping:
    """The denominator of an Adam-like step: ``sqrt(second_moment / correction) + eps``.

    Attributes:
        eps: Number, or scalar on the device.
        correction: 1 - beta2^t, or 1 without bias correction; number, or scalar on the device.
    """

    eps: float | Tensor
    correction: float | Tensor


class Moments(Protocol):
    """What telemetry reads of an optimizer: flat tensors laid out like the masters.

    It is read before and after every step. A property is None if the optimizer has no such state.
    """

    @property
    def first_moment(self) -> Tensor | None:
        """Running mean of gradients."""

    @property
    def second_moment(self) -> Elements | None:
        """Running mean of squared gradients, per element."""

    @property
    def shadow_decay(self) -> float | None:
        """beta2 if second moments are quantised and must be tracked in fp32; else None."""

    @property
    def damping(self) -> Damping | None:
        """Denominator of the step; None if the step has another form."""

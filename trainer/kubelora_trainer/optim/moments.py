"""What telemetry reads of an optimizer's state."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Elements(Protocol):
    """What elements can be taken from by their position: a flat tensor, or what stands for one."""

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Those at ``index`` along dimension 0."""


@dataclass(frozen=True)
class Damping:
    """An Adam-like step divides by ``sqrt(second_moment / correction) + eps``.

    correction: 1 - beta2^t, or 1 without bias correction. Numbers, or scalars on the device.
    """

    eps: float | Tensor
    correction: float | Tensor


class Moments(Protocol):
    """What the telemetry looks at in an optimizer: flat tensors laid out like the masters.

    Asked in every step, before and after it. None where the optimizer has no such thing.
    """

    @property
    def first_moment(self) -> Tensor | None:
        """Running mean of gradients."""

    @property
    def second_moment(self) -> Elements | None:
        """Running mean of squared gradients, element by element."""

    @property
    def shadow_decay(self) -> float | None:
        """beta2 where second moments share a scale, and must be followed in fp32; else None."""

    @property
    def damping(self) -> Damping | None:
        """How the second moment is used; None where the step has another form."""

"""Interface of the optimizers, which update the flat master weights.

An optimizer works on per-factor views of the flat master weights, in their true shapes, which
Adafactor and 8-bit states need. A non-finite gradient changes neither weights nor state.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.optim.moments import Damping, Elements
from kubelora_trainer.optim.state_sums import StateSums


class AdapterOptimizer(Protocol):
    """An optimizer that turns the finished gradient into updated masters; also a `Stateful`.

    sums: compared at each step's start and taken at its end, if set; forgotten when state is
    loaded.
    """

    sums: StateSums | None

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """All state per element as few tensors as there are; empty before the first step."""

    @property
    def step_count(self) -> Tensor | int:
        """Steps that updated the first factor's state; does not wait for the device."""

    @property
    def first_moment(self) -> Tensor | None:
        """Momentum, laid out like the masters; None if the optimizer does not store it that way."""

    @property
    def second_moment(self) -> Elements | None:
        """Mean of squared gradients, laid out like the masters; None if stored in another form."""

    @property
    def shadow_decay(self) -> float | None:
        """beta2 if second moments are quantised and must be tracked in fp32; else None."""

    @property
    def own_rate(self) -> float:
        """Factor that the optimizer itself applies to the scheduled rate: 1, except for Prodigy."""

    @property
    def ignores_zero_rate(self) -> bool:
        """Whether a step at rate 0 leaves the state as it was, its step counter included."""

    @property
    def state_text(self) -> str:
        """Format of the state, for people."""

    @property
    def state_bytes(self) -> int:
        """Memory of the state in bytes."""

    @property
    def damping(self) -> Damping | None:
        """Denominator of the step; None if the step has another form."""

    @property
    def steps_done(self) -> int:
        """Steps that updated the state, of the factor with the fewest; waits for the device."""

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and copy them to the working copy.

        Args:
            learning_rate: The scheduled rate; each factor's rate is a fixed multiple of it.
            non_finite: Scalar on the device, 1.0 if the gradient must not be used. Nothing
                changes then.
        """

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state to save."""

    def scalars(self) -> JsonObject:
        """Return the state that is not a tensor, as plain JSON."""

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore saved state. Raises ValueError before changing anything if it does not fit."""

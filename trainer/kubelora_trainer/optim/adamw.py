"""What the trainer asks of an optimizer, whichever it is, and how gradients are clipped for it.

An optimizer works on per-factor views of the flat masters (true shapes, which Adafactor and 8-bit
states need). A gradient that is not finite moves neither weight nor state.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Optimizer as OptimizerSpec
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import NAMES
from kubelora_trainer.telemetry.element_sampling import Elements
from kubelora_trainer.telemetry.update_probe import Damping
from kubelora_trainer.utils.stateful import check_like


class AdapterOptimizer(Protocol):
    """Turns the finished gradient into updated masters. It is a `CheckpointPart` too."""

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


class FlatAdamW:
    """torch.optim.AdamW (fused) on per-factor views of the flat masters.

    Moments are laid out like the masters, in their type, so that telemetry reads them and
    checkpoints save them as one tensor each. ``found_inf`` is judged on the device by the fused
    kernel, so the host need not wait to know.
    scales: what the learning rate of each factor is multiplied by, in slot order.
    """

    own_rate = 1.0
    shadow_decay = None

    def __init__(
        self, buffers: AdapterBuffers, spec: OptimizerSpec, scales: Sequence[float] | None = None
    ) -> None:
        self._buffers = buffers
        self._eps = 1e-8 if spec.eps is None else spec.eps
        self._beta2 = 0.999 if spec.beta2 is None else spec.beta2
        self.first_moment = torch.zeros_like(buffers.masters)
        self.second_moment = torch.zeros_like(buffers.masters)
        self.state_text = NAMES[buffers.plan.masters]
        self.state_bytes = self.first_moment.nbytes + self.second_moment.nbytes
        self._adamw = torch.optim.AdamW(
            rate_groups(buffers, scales or [1.0] * len(buffers.slots)),
            lr=0.0,
            betas=(0.9 if spec.beta1 is None else spec.beta1, self._beta2),
            eps=self._eps,
            weight_decay=0.01 if spec.weight_decay is None else spec.weight_decay,
            fused=True,
        )
        self._steps = [
            torch.zeros((), device=buffers.masters.device) for _ in buffers.master_parameters
        ]
        for slot, master, steps in zip(
            buffers.slots, buffers.master_parameters, self._steps, strict=True
        ):
            self._adamw.state[master] = {
                "step": steps,
                "exp_avg": slot.of(self.first_moment),
                "exp_avg_sq": slot.of(self.second_moment),
            }

    @property
    def damping(self) -> Damping:
        """What the step divides by; the count of steps is the fused kernel's own."""
        return Damping(eps=self._eps, correction=1 - self._beta2 ** self._steps[0])

    @property
    def steps_done(self) -> int:
        """Steps that the state has taken in; waits for the device."""
        return int(torch.stack(self._steps).min())

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and publish them; see `AdapterOptimizer`."""
        self._buffers.hand_to_optimizer()
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["scale"]
        # Read by the fused kernel; grad_scale must exist beside it.
        self._adamw.grad_scale = None  # type: ignore[attr-defined]
        self._adamw.found_inf = non_finite  # type: ignore[attr-defined]
        self._adamw.step()
        self._buffers.publish_masters()

    def tensors(self) -> Mapping[str, Tensor]:
        """Both moments, flat, and the count of steps that moved something (bias correction)."""
        return {
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
            "steps": self._steps[0],  # the kernel counts them all alike
        }

    def scalars(self) -> JsonObject:
        """Nothing: all state is tensors."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Take over what ``tensors`` gave."""
        check_like(self.tensors(), tensors)
        self.first_moment.copy_(tensors["first_moment"])
        self.second_moment.copy_(tensors["second_moment"])
        for steps in self._steps:
            steps.copy_(tensors["steps"])


def rate_groups(buffers: AdapterBuffers, scales: Sequence[float]) -> list[dict[str, object]]:
    """Parameter groups of equal ``scale`` (what the learning rate is multiplied by).

    Magnitudes are groups of their own without weight decay: 0 is no rest for the norm of a weight,
    it takes the base model's layer away.
    """
    groups: dict[tuple[float, bool], list[Parameter]] = {}
    for slot, master, scale in zip(buffers.slots, buffers.master_parameters, scales, strict=True):
        groups.setdefault((scale, slot.factor.is_magnitude), []).append(master)
    return [
        {"params": members, "scale": scale} | ({"weight_decay": 0.0} if magnitudes else {})
        for (scale, magnitudes), members in groups.items()
    ]


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``total_norm`` down to ``max_norm``; 1 below it. 0 turns clipping off.

    total_norm: scalar, any device. The 1e-6 is that of ``torch.nn.utils.clip_grad_norm_``.
    A non-finite norm gives 1, so that the gradient is left as evidence.
    """
    if max_norm == 0:
        return torch.ones_like(total_norm)
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(total_norm), coefficient, torch.ones_like(coefficient))

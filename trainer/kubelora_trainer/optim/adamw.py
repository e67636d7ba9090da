"""AdamW on per-factor views of the flat masters, by torch's fused kernels."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Optimizer as OptimizerSpec
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.param_groups import rate_groups
from kubelora_trainer.optim.precision import NAMES
from kubelora_trainer.utils.stateful import check_like


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

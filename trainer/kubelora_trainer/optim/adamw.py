"""AdamW on per-factor views of the flat master weights, with torch's fused kernels."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Optimizer as OptimizerSpec
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.param_groups import rate_groups
from kubelora_trainer.optim.precision import DTYPE_NAMES
from kubelora_trainer.optim.state_sums import StateSums
from kubelora_trainer.utils.stateful import check_like


class FlatAdamW:
    """torch.optim.AdamW (fused) on per-factor views of the flat master weights.

    The moments have the layout and type of the master weights, so that telemetry reads them and
    checkpoints save them as one tensor each. The fused kernel evaluates ``found_inf`` on the
    device, so the host never waits for it.

    Args:
        buffers: Flat buffers of the adapter.
        spec: The job's ``training.optimizer``.
        scales: Learning-rate multiplier of each factor in slot order; None means 1 for all.
    """

    own_rate = 1.0
    ignores_zero_rate = False
    shadow_decay = None

    def __init__(
        self, buffers: AdapterBuffers, spec: OptimizerSpec, scales: Sequence[float] | None = None
    ) -> None:
        self._buffers = buffers
        self.sums: StateSums | None = None
        self._eps = 1e-8 if spec.eps is None else spec.eps
        self._beta2 = 0.999 if spec.beta2 is None else spec.beta2
        self.first_moment = torch.zeros_like(buffers.masters)
        self.second_moment = torch.zeros_like(buffers.masters)
        self.state_text = DTYPE_NAMES[buffers.plan.masters]
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
    def state_buffers(self) -> Sequence[Tensor]:
        """Both moments."""
        return (self.first_moment, self.second_moment)

    @property
    def step_count(self) -> Tensor:
        """Steps that updated the state, on the device."""
        return self._steps[0]

    @property
    def damping(self) -> Damping:
        """Denominator of the step; the step count is the fused kernel's own."""
        return Damping(eps=self._eps, correction=1 - self._beta2 ** self._steps[0])

    @property
    def steps_done(self) -> int:
        """Steps that updated the state; waits for the device."""
        return int(torch.stack(self._steps).min())

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and publish them; see `AdapterOptimizer`."""
        if self.sums:
            self.sums.begin()
        self._buffers.cast_gradient()
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["scale"]
        # Attributes that the fused kernel reads; it requires grad_scale together with found_inf.
        self._adamw.grad_scale = None  # type: ignore[attr-defined]
        self._adamw.found_inf = non_finite  # type: ignore[attr-defined]
        self._adamw.step()
        self._buffers.publish_masters()
        if self.sums:
            self.sums.finish()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return both moments, flat, and the count of effective steps (for bias correction)."""
        return {
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
            "steps": self._steps[0],  # the kernel advances all counters together
        }

    def scalars(self) -> JsonObject:
        """Return nothing: all state is tensors."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what ``tensors`` returned."""
        check_like(self.tensors(), tensors)
        self.first_moment.copy_(tensors["first_moment"])
        self.second_moment.copy_(tensors["second_moment"])
        for steps in self._steps:
            steps.copy_(tensors["steps"])
        if self.sums:
            self.sums.forget()

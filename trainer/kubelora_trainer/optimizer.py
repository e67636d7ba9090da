"""AdamW over the masters, its moments in flat buffers, its guard against non-finite gradients.

Moments are laid out like the masters, so that telemetry reads them and checkpoints save them as
one tensor each. ``found_inf`` is judged on the device by the fused kernel: a non-finite gradient
moves no weight and no moment, and the host need not wait to know.
"""

import torch
from torch import Tensor

from kubelora_api.training_spec import Optimizer as OptimizerSpec
from kubelora_trainer.buffers import AdapterBuffers


class FlatAdamW:
    """torch.optim.AdamW (fused) on per-factor views of the flat masters.

    first_moment, second_moment: flat, in the masters' type.
    """

    def __init__(self, buffers: AdapterBuffers, spec: OptimizerSpec) -> None:
        self._buffers = buffers
        self.first_moment = torch.zeros_like(buffers.masters)
        self.second_moment = torch.zeros_like(buffers.masters)
        self._adamw = torch.optim.AdamW(
            buffers.master_parameters,
            lr=0.0,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )
        self.set_steps_taken(0)

    def set_steps_taken(self, steps: int) -> None:
        """Bind the moments and set the bias-correction count (after a resume)."""
        for slot, master in zip(self._buffers.slots, self._buffers.master_parameters, strict=True):
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                "exp_avg": slot.of(self.first_moment),
                "exp_avg_sq": slot.of(self.second_moment),
            }

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and publish them.

        non_finite: scalar on the device, 1.0 where the gradient must not be used.
        """
        self._buffers.hand_to_optimizer()
        self._adamw.param_groups[0]["lr"] = learning_rate
        # Read by the fused kernel; grad_scale must exist beside it.
        self._adamw.grad_scale = None  # type: ignore[attr-defined]
        self._adamw.found_inf = non_finite  # type: ignore[attr-defined]
        self._adamw.step()
        self._buffers.publish_masters()


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``total_norm`` down to ``max_norm``; 1 below it. 0 turns clipping off.

    total_norm: scalar, any device. The 1e-6 is that of ``torch.nn.utils.clip_grad_norm_``.
    A non-finite norm gives 1, so that the gradient is left as evidence.
    """
    if max_norm == 0:
        return torch.ones_like(total_norm)
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(total_norm), coefficient, torch.ones_like(coefficient))

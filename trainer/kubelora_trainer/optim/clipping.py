"""Gradient clipping by the total norm, without waiting for the device."""

import torch
from torch import Tensor


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Compute the factor that brings ``total_norm`` down to ``max_norm``; 1 if it is below.

    A non-finite norm gives 1, so that the gradient is kept as evidence. The 1e-6 is that of
    ``torch.nn.utils.clip_grad_norm_``.

    Args:
        total_norm: Scalar on any device.
        max_norm: Largest norm; 0 turns clipping off.
    """
    if max_norm == 0:
        return torch.ones_like(total_norm)
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(total_norm), coefficient, torch.ones_like(coefficient))

"""Copies from the host to the model's device that don't make the host wait.

From ordinary memory such a copy waits until the device has done all that was asked of it before;
the device then idles until the next operations arrive.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``: itself where it is there, else a copy in the order of the work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

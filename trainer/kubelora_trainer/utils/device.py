"""The device of a run, and copies to it that don't make the host wait.

From ordinary memory such a copy waits until the device has done all that was asked of it before;
the device then idles until the next operations arrive.
"""

import torch
from torch import Tensor

from kubelora_api.spec import JobSpec
from kubelora_trainer.utils.errors import ConfigurationError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``: itself where it is there, else a copy in the order of the work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def choose_device(spec: JobSpec, cuda: bool) -> torch.device:
    """The device that the job asks for. cuda: whether there is a usable one.

    Raises ConfigurationError rather than train on a CPU where a GPU was meant.
    """
    wanted = spec.training.device
    if wanted == "cpu" or (wanted == "auto" and not cuda and spec.workers.gpus_per_node == 0):
        return torch.device("cpu")
    if not cuda:
        why = (
            "spec.training.device is cuda"
            if wanted == "cuda"
            else f"spec.workers.gpusPerNode is {spec.workers.gpus_per_node}"
        )
        raise ConfigurationError(
            f"no usable CUDA GPU here, but {why}; to train on the CPU, say so with "
            "--set spec.training.device=cpu"
        )
    return torch.device("cuda")

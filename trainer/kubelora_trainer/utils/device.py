"""The device of a run, and copies to it that do not block the host.

A copy from pageable memory waits until the device has finished all queued work. The device is then
idle until the next operations arrive.
"""

import torch
from torch import Tensor

from kubelora_api.spec import JobSpec
from kubelora_trainer.utils.errors import ConfigurationError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor itself if it is on ``device``, else a copy in stream order."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def choose_device(spec: JobSpec, cuda: bool) -> torch.device:
    """Choose the device that the job asks for. cuda: True if a usable GPU exists.

    Raises ConfigurationError rather than train on a CPU where a GPU was intended.
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
            f"no usable CUDA GPU here, but {why}; to train on the CPU, pass "
            "--set spec.training.device=cpu"
        )
    return torch.device("cuda")

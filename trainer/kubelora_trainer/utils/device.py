"""The device of a run, and copies to it that do not block the host.

A copy from pageable memory waits until the device has finished all queued work. The device is then
idle until the next operations arrive.
"""

import os

import torch
from torch import Tensor

from kubelora_api.names import ENV_ATTEMPT
from kubelora_api.spec import JobSpec
from kubelora_trainer.utils.device_faults import NO_GPU, allotted_devices, why_unusable
from kubelora_trainer.utils.errors import ConfigurationError, DeviceError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor itself if it is on ``device``, else a copy in stream order."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def choose_device(spec: JobSpec, cuda: bool) -> torch.device:
    """Choose the device that the job asks for, and never a CPU where a GPU was intended.

    Args:
        spec: The job's spec.
        cuda: True if a usable GPU exists.

    Raises:
        ConfigurationError: This machine has no GPU.
        DeviceError: It has one that cannot be used; in a pod also if it has none, because the
            scheduler has chosen a node with GPUs.
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
        reason = why_unusable()
        if ENV_ATTEMPT in os.environ and spec.workers.gpus_per_node > 0:
            raise DeviceError(
                f"no usable CUDA GPU in this pod ({reason}), but {why}; device: "
                f"{allotted_devices() or 'unknown'}. Check the node's driver, and whether its "
                "container runtime needs podTemplate.runtimeClassName (often nvidia)"
            )
        if not NO_GPU.search(reason):
            raise DeviceError(
                f"the GPU of this machine can't be used ({reason}), but {why}; see `nvidia-smi`, "
                "and to train on the CPU meanwhile, pass --set spec.training.device=cpu"
            )
        raise ConfigurationError(
            f"no usable CUDA GPU here ({reason}), but {why}; to train on the CPU, pass "
            "--set spec.training.device=cpu"
        )
    return torch.device("cuda")

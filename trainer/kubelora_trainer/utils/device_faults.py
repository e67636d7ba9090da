"""Failures of a device: its memory ran out, or the device itself is broken or unusable.

torch has a type for some of them and only a text for the rest. Neither is "unexpected": a job that
is too large for its GPU fails again at the same step, and a broken GPU fails for any job.
"""

import os
import re
from collections.abc import Iterator
from enum import Enum
from typing import Final

import torch

from kubelora_api.spec import JobSpec


class Fault(Enum):
    """What failed."""

    DEVICE_MEMORY = "the GPU's memory ran out"
    HOST_MEMORY = "the machine's memory ran out"
    DEVICE = "the GPU failed"


_DEVICE_MEMORY: Final = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"  # cublasCreate without memory for its workspace
)
_HOST_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|HOST_ALLOCATION_FAILED"
)
_DEVICE: Final = re.compile(
    r"CUDA error|CUDA failure|CUDA unknown error|CUDA driver|CUDA GPUs? |NVIDIA driver|cuDNN error"
    r"|CUDNN_STATUS|CUBLAS_STATUS|no kernel image",
    re.IGNORECASE,
)
_ASSERTION: Final = re.compile(r"device-side assert")
"""A kernel found a wrong index: the program's or the data's fault, on any device."""
NO_GPU: Final = re.compile(
    r"no NVIDIA driver|No CUDA GPUs|has no CUDA|no CUDA-capable device|is_available", re.IGNORECASE
)
"""In `why_unusable`: there is no GPU, rather than a broken one."""
_MIN_DRIVERS: Final = {"12": "525.60.13", "13": "580.65.06"}
"""Oldest Linux driver for a major version of CUDA, from NVIDIA's table of minor compatibility."""
_GIB: Final = 2**30  # bytes


def fault_in(error: BaseException) -> tuple[Fault, BaseException] | None:
    """Return what failed, and the error of torch or Python that shows it; None for other errors.

    Also found is the cause of an error that was raised from it, since loaders of libraries
    translate any error into their own.
    """
    for one in _chain(error):
        if (fault := _fault(one)) is not None:
            return fault, one
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _fault(error: BaseException) -> Fault | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return Fault.DEVICE_MEMORY
    if isinstance(error, MemoryError):
        return Fault.HOST_MEMORY
    if not isinstance(error, RuntimeError) or _ASSERTION.search(text):
        return None
    if _HOST_MEMORY.search(text):
        return Fault.HOST_MEMORY
    if _DEVICE_MEMORY.search(text):
        return Fault.DEVICE_MEMORY
    if isinstance(error, torch.AcceleratorError) or _DEVICE.search(text):
        return Fault.DEVICE
    return None


def first_sentence(error: BaseException) -> str:
    """Return the first line of an error, without torch's advice on debugging."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.split(" Search for ")[0].removesuffix(".")[:300]


def device_label(device: torch.device) -> str:
    """Return the device's model and UUID. To be called before a fault: it asks the device."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return f"{properties.name} (GPU-{uuid})" if uuid else str(properties.name)


def allotted_devices() -> str:
    """Return the UUIDs that the device plugin allotted to this container, if it names them."""
    given = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    return given if given.startswith(("GPU-", "MIG-")) else ""


def memory_sentence(
    fault: Fault, error: BaseException, spec: JobSpec, when: str, peak: int | None
) -> str:
    """Describe where memory ran out and what to lower.

    Args:
        fault: Whose memory it was.
        error: The error of torch or Python.
        spec: The job's spec.
        when: What the run was doing.
        peak: Bytes that tensors took on the device at most; None if unknown.
    """
    highest = f" Tensors took {peak / _GIB:.1f} GiB at most." if peak else ""
    what = f"{fault.value} {when}: {first_sentence(error)}.{highest}"
    lower = "; ".join(_what_to_lower(spec))
    if fault is Fault.HOST_MEMORY:
        return f"{what} Raise podTemplate.resources.limits.memory, or in a new job: {lower}"
    return f"{what} The same settings fail again; in a new job, the cheapest first: {lower}"


def _what_to_lower(spec: JobSpec) -> Iterator[str]:
    training = spec.training
    if not training.gradient_checkpointing:
        yield "set training.gradientCheckpointing to true"
    if training.batch_size > 1:
        half = training.batch_size // 2
        more = -(-training.batch_size * training.gradient_accumulation // half)
        yield (
            f"lower training.batchSize from {training.batch_size} to {half} and raise "
            f"training.gradientAccumulation from {training.gradient_accumulation} to {more}, "
            "which trains on as many images per step"
        )
    if training.optimizer.name == "adamw":
        yield "set training.optimizer.name to adamw8bit"
    yield f"lower dataset.resolution (now {spec.dataset.resolution})"
    yield f"lower adapter.rank (now {spec.adapter.rank})"


def device_sentence(error: BaseException, label: str, in_pod: bool, resume_command: str) -> str:
    """Describe a failed device.

    Args:
        error: The error of torch.
        label: The device's model and UUID; empty if unknown.
        in_pod: Whether an operator starts the next attempt.
        resume_command: Command that resumes the run.
    """
    who = label or allotted_devices() or "unknown"
    then = (
        "the next attempt prefers another node; if this repeats, have this one's GPU checked"
        if in_pod
        else "look for Xid in `dmesg` and for errors in `nvidia-smi -q`, restart the machine or "
        f"choose another GPU with CUDA_VISIBLE_DEVICES, then resume: {resume_command}"
    )
    return f"the GPU failed ({first_sentence(error)}); device: {who}; {then}"


def why_unusable() -> str:
    """Return why torch can use no GPU here, from the error of its initialisation."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        sentence = first_sentence(error).removesuffix(".")
    else:
        sentence = "torch.cuda.is_available() is False"
    oldest = _MIN_DRIVERS.get(torch.version.cuda.split(".")[0])
    if "driver" not in sentence or oldest is None:
        return sentence
    return f"{sentence}; CUDA {torch.version.cuda} needs driver {oldest} or newer"

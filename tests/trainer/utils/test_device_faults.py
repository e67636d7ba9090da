"""Which errors mean that memory ran out or that a device is broken, in the words of torch.

The texts are those of torch's sources and of CUDA's error strings.
"""

import pytest
import torch

from kubelora_api.documents import parse_job
from kubelora_api.spec import JobSpec
from kubelora_trainer.utils import device_faults
from kubelora_trainer.utils.device import choose_device
from kubelora_trainer.utils.device_faults import Fault, fault_in, memory_sentence, why_unusable
from kubelora_trainer.utils.errors import ConfigurationError, DeviceError, ModelError

MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of "
    "which 1.10 GiB is free."
)


def accelerator(text: str) -> torch.AcceleratorError:
    return torch.AcceleratorError(
        f"CUDA error: {text}\nSearch for `cudaErrorX' in https://docs.nvidia.com for more "
        "information.\nCUDA kernel errors might be asynchronously reported at some other API call."
    )


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (MEMORY, Fault.DEVICE_MEMORY),
        (accelerator("out of memory"), Fault.DEVICE_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            Fault.DEVICE_MEMORY,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
            Fault.DEVICE_MEMORY,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Fault.DEVICE_MEMORY),
        (RuntimeError("Last error:\nCuda failure 2 'out of memory'"), Fault.DEVICE_MEMORY),
        (MemoryError(), Fault.HOST_MEMORY),
        (accelerator("an illegal memory access was encountered"), Fault.DEVICE),
        (accelerator("uncorrectable ECC error encountered"), Fault.DEVICE),
        (accelerator("unspecified launch failure"), Fault.DEVICE),
        (accelerator("CUDA-capable device(s) is/are busy or unavailable"), Fault.DEVICE),
        (
            accelerator("no kernel image is available for execution on the device"),
            Fault.DEVICE,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), Fault.DEVICE),
        (
            RuntimeError(
                "CUDA unknown error - this may be due to an incorrectly set up environment"
            ),
            Fault.DEVICE,
        ),
        (RuntimeError("CUDA driver initialization failed"), Fault.DEVICE),
        (RuntimeError("The NVIDIA driver on your system is too old"), Fault.DEVICE),
        (accelerator("device-side assert triggered"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), None),
        (RuntimeError("expected scalar type Half but found Float"), None),
        (ValueError("CUDA out of memory"), None),
        (OSError("CUDA error"), None),
    ],
)
def test_the_fault_is_told_apart_by_type_and_text(
    error: BaseException, fault: Fault | None
) -> None:
    found = fault_in(error)
    assert (found and found[0]) == fault


def test_the_hosts_allocator_really_says_what_is_looked_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    found = fault_in(caught.value)
    assert found is not None
    assert found[0] is Fault.HOST_MEMORY


def test_a_fault_is_found_behind_a_loaders_translation() -> None:
    translated = ModelError("unet can't be loaded: CUDA out of memory")
    translated.__cause__ = MEMORY
    assert fault_in(translated) == (Fault.DEVICE_MEMORY, MEMORY)
    assert fault_in(ModelError("unet can't be loaded: CUDA out of memory")) is None


def spec(**training: object) -> JobSpec:
    return parse_job(
        {
            "apiVersion": "kubelora.dev/v1alpha1",
            "kind": "LoraTrainingJob",
            "metadata": {"name": "bottles"},
            "spec": {
                "model": {"uri": "pvc://models/sdxl"},
                "dataset": {"uri": "pvc://photos/bottles"},
                "training": {"steps": 100, **training},
                "output": {"uri": "pvc://adapters/bottles"},
            },
        }
    ).spec


def test_the_sentence_for_memory_names_place_peak_and_what_to_lower_in_order() -> None:
    large = spec(batchSize=5, gradientAccumulation=3)
    sentence = memory_sentence(Fault.DEVICE_MEMORY, MEMORY, large, "after step 7", 9 * 2**30)
    assert sentence.startswith(
        "the GPU's memory ran out after step 7: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "Tensors took 9.0 GiB at most." in sentence
    named = ("gradientCheckpointing to true", "batchSize from 5 to 2", "adamw8bit", "resolution")
    assert list(map(sentence.index, named)) == sorted(map(sentence.index, named))
    assert "gradientAccumulation from 3 to 8" in sentence, "15 images in windows of 2: 8 of them"


def test_what_is_lowered_already_is_not_advised() -> None:
    small = spec(gradientCheckpointing=True, optimizer={"name": "adamw8bit"})
    sentence = memory_sentence(Fault.DEVICE_MEMORY, MEMORY, small, "after step 7", None)
    for advice in ("gradientCheckpointing", "batchSize", "adamw8bit", "GiB at most"):
        assert advice not in sentence
    assert "lower adapter.rank (now 16)" in sentence


@pytest.mark.parametrize(
    ("reason", "in_pod", "raised"),
    [
        ("Found no NVIDIA driver on your system", False, ConfigurationError),
        ("No CUDA GPUs are available", False, ConfigurationError),
        ("this build of torch has no CUDA", False, ConfigurationError),
        ("Found no NVIDIA driver on your system", True, DeviceError),
        ("No CUDA GPUs are available", True, DeviceError),
        ("The NVIDIA driver on your system is too old (found version 11040)", False, DeviceError),
        ("The NVIDIA driver on your system is too old (found version 11040)", True, DeviceError),
        ("CUDA driver initialization failed", False, DeviceError),
        ("CUDA unknown error - this may be due to an incorrectly set up", True, DeviceError),
    ],
)
def test_no_gpu_is_the_users_and_a_broken_one_the_nodes(
    monkeypatch: pytest.MonkeyPatch, reason: str, in_pod: bool, raised: type[Exception]
) -> None:
    monkeypatch.setattr("kubelora_trainer.utils.device.why_unusable", lambda: reason)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-8a7d")
    if in_pod:
        monkeypatch.setenv("KUBELORA_ATTEMPT", "1")
    with pytest.raises(raised, match=r"can't be used|no usable CUDA GPU") as caught:
        choose_device(spec(), cuda=False)
    assert reason in str(caught.value)
    assert ("GPU-8a7d" in str(caught.value)) is in_pod


def test_an_old_driver_is_told_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert why_unusable().endswith("CUDA 13.2 needs driver 580.65.06 or newer")


def test_the_oldest_driver_of_the_pinned_torch_is_known() -> None:
    cuda = torch.version.cuda
    assert cuda is None or cuda.split(".")[0] in device_faults._MIN_DRIVERS

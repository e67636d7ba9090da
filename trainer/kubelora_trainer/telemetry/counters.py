"""Counts over time: backward passes of a window, modules that no longer get a gradient."""

import resource
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot

DEAD_STEPS = 10
"""Steps in a row without any gradient that make a module dead. Empty captions can leave a
module without a gradient for a step."""


def least_travel(compute: torch.dtype) -> float:
    """Return the sum of step sizes above which a lora_B that started at 0 is not 0 in ``compute``.

    The type's smallest normal number: 6e-5 for fp16, a thousand times its smallest number, so that
    it also holds for steps that are a thousandth of the rate (Adafactor's, scaled by factors that
    are 0; LoRA gradients near Adam's eps). A long warm-up takes steps of 1e-9 at first, which
    fp16 rounds to 0. bf16 and fp32 reach down to 1e-38.
    """
    return torch.finfo(compute).smallest_normal


class BackwardPasses:
    """A count of gradients that arrive in the accumulator, on one factor of each group.

    K losses that are summed before one backward pass arrive once. The count is that of the group
    that was reached most often, so that a module left out of the loss is not mistaken for this.
    """

    def __init__(self, buffers: AdapterBuffers) -> None:
        self._counts: dict[str, int] = {}
        first = {slot.factor.group: slot for slot in reversed(buffers.slots)}
        for group, slot in first.items():
            self._watch(group, slot)

    @property
    def count(self) -> int:
        """Passes since the window began."""
        return max(self._counts.values())

    def go_on_from(self, count: int) -> None:
        """Count from ``count`` (after a resume)."""
        self._counts = dict.fromkeys(self._counts, count)

    def _watch(self, group: str, slot: Slot) -> None:
        self._counts[group] = 0

        def arrived(_: Tensor) -> None:
            self._counts[group] += 1

        slot.factor.parameter.register_post_accumulate_grad_hook(arrived)


class DeadModules:
    """A count of modules with a factor whose gradient was exactly zero for ``DEAD_STEPS`` steps.

    Counting starts when lora_B can no longer be 0 in the dtype of the passes (`least_travel`):
    until then lora_A has no gradient.
    """

    def __init__(self, slots: Sequence[Slot], compute: torch.dtype = torch.bfloat16) -> None:
        """compute: dtype of the passes."""
        self._modules = [slot.factor.module for slot in slots]
        self._silent = [0] * len(slots)
        self._least, self._travelled = least_travel(compute), 0.0

    @property
    def waiting(self) -> bool:
        """Whether weights have moved, but lora_B may still be 0 in the passes."""
        return 0.0 < self._travelled < self._least

    def to_json(self) -> JsonObject:
        """Return the state as plain JSON, for a checkpoint."""
        return {"silent": self._silent, "travelled": self._travelled}

    def load(self, saved: JsonObject) -> None:
        """Restore what ``to_json`` returned, or an earlier version's flag that weights moved."""
        self._silent = list(saved["silent"])
        self._travelled = float(saved["travelled" if "travelled" in saved else "moved"])

    def observe(self, norms: Sequence[float], step_size: float) -> int:
        """Return the count after one more step. norms: L2 norms of the gradients in slot order.

        step_size: how far this step moves a weight where the optimizer's direction is 1.
        """
        if self._travelled >= self._least:
            silent = zip(self._silent, norms, strict=True)
            self._silent = [count + 1 if norm == 0.0 else 0 for count, norm in silent]
        self._travelled += step_size
        dead = zip(self._modules, self._silent, strict=True)
        return len({module for module, count in dead if count >= DEAD_STEPS})


def host_memory_peak() -> float:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def device_memory_peak(device: torch.device) -> float:
    """Return the peak memory of tensors on ``device``, in bytes; NaN for the CPU."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else torch.nan

"""Plain counts over time: backward passes of a window, modules that get no gradient any more."""

import resource
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.buffers import AdapterBuffers, Slot

DEAD_STEPS = 10
"""Steps in a row without any gradient that make a module dead. Empty captions silence a module for
a step now and then."""


class BackwardPasses:
    """Counts how often a gradient arrives in the accumulator, on one factor of each group.

    K losses that are summed before one backward pass arrive once. Counted is the group that was
    reached most often, so that a module taken out of the loss is not mistaken for that.
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
    """Counts the modules of which a factor's gradient has been exactly zero for ``DEAD_STEPS``.

    Counting starts after the first step with a rate above 0: until lora_B moves, lora_A has no
    gradient.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._modules = [slot.factor.module for slot in slots]
        self._silent = [0] * len(slots)
        self._moved = False

    def to_json(self) -> JsonObject:
        """The state as plain JSON, for a checkpoint."""
        return {"silent": self._silent, "moved": self._moved}

    def load(self, saved: JsonObject) -> None:
        """Take over what ``to_json`` gave."""
        self._silent, self._moved = list(saved["silent"]), bool(saved["moved"])

    def observe(self, norms: Sequence[float], learning_rate: float) -> int:
        """The count after one more step. norms: L2 norms of the gradients in slot order."""
        if self._moved:
            silent = zip(self._silent, norms, strict=True)
            self._silent = [count + 1 if norm == 0.0 else 0 for count, norm in silent]
        self._moved = self._moved or learning_rate > 0
        dead = zip(self._modules, self._silent, strict=True)
        return len({module for module, count in dead if count >= DEAD_STEPS})


def host_memory_peak() -> float:
    """Most resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def device_memory_peak(device: torch.device) -> float:
    """Most memory that tensors held on ``device`` so far, in bytes; NaN for the CPU."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else torch.nan

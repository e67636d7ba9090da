"""Norms, largest values and counts of the finished gradient, by slot and by group.

There are two implementations with the same results. A GPU processes many tensors in few kernels.
On a CPU every small operation has a cost, so numpy makes one pass over the flat buffer, in parts
that stay in the cache, and sums by slot in the same pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from kubelora_trainer.optim.flat_buffers import AdapterBuffers, GroupRange

CHUNK_ELEMENTS: Final = 1 << 22
"""Elements looked at together on a device: 16 MiB of temporaries in fp32, whatever the adapter's
size."""
CACHED_ELEMENTS: Final = 1 << 17
"""The same on a CPU: few enough to stay in its cache, where reading them again is cheap."""


class GradientSums(Protocol):
    """Statistics of the gradient buffer as it is.

    norm: L2, fp64 (slots). absmax: fp32 (slots), NaN where there is one. counts: fp64 (groups, 3):
    zeros, elements that are not finite, and elements that the narrowest type in use in
    the group makes zero.
    """

    def measure(self) -> dict[str, Tensor]:
        """Compute the three, by name, on the gradient's device."""


def gradient_sums(buffers: AdapterBuffers, loss_scale: Tensor | None) -> GradientSums:
    """Choose what suits the device. loss_scale: what underflows is judged on scaled gradients."""
    if buffers.gradient.device.type == "cpu":
        return HostSums(buffers, loss_scale)
    return DeviceSums(buffers, loss_scale)


class DeviceSums:
    """Statistics by kernels over many tensors; nothing waits for the device."""

    def __init__(self, buffers: AdapterBuffers, loss_scale: Tensor | None) -> None:
        self._buffers, self._loss_scale = buffers, loss_scale
        self._views = [slot.of(buffers.gradient) for slot in buffers.slots]

    def measure(self) -> dict[str, Tensor]:
        """Measure; see `GradientSums`."""
        norms = torch._foreach_norm(self._views, 2, dtype=torch.float32)
        largest = torch._foreach_norm(self._views, torch.inf, dtype=torch.float32)
        counts = [self._count(group) for group in self._buffers.groups]
        return {
            "norm": torch.stack(norms).double(),
            "absmax": torch.stack(largest),
            "counts": torch.stack(counts),
        }

    def _count(self, group: GroupRange) -> Tensor:
        narrowest = self._buffers.plan.narrowest_in(group.name)
        counts = torch.zeros(3, dtype=torch.float64, device=self._buffers.gradient.device)
        for chunk in self._buffers.gradient[group.start : group.stop].split(CHUNK_ELEMENTS):
            there = chunk.count_nonzero()
            computed = chunk if self._loss_scale is None else chunk * self._loss_scale
            gone = there - computed.to(narrowest).count_nonzero()
            nonfinite = (chunk - chunk).count_nonzero()  # 0 for a number, else NaN
            counts += torch.stack([chunk.numel() - there, nonfinite, gone])
        return counts


@dataclass(frozen=True)
class _Part:
    """Consecutive slots. firsts: where each begins, from the part's own start.

    groups: index of each group that has a share in the part, and where that lies in it.
    """

    start: int
    stop: int
    slots: slice
    firsts: np.ndarray
    groups: Mapping[int, slice]


class HostSums:
    """Statistics by numpy, part by part."""

    def __init__(self, buffers: AdapterBuffers, loss_scale: Tensor | None) -> None:
        self._buffers, self._loss_scale = buffers, loss_scale
        self._parts = list(_parts(buffers))
        longest = max(part.stop - part.start for part in self._parts)
        self._absolute = np.empty(longest, np.float32)
        self._squares = np.empty(longest, np.float64)
        self._flags = np.empty(longest, np.bool_)
        self._rounds_to_zero = [
            _rounds_to_zero(buffers.plan.narrowest_in(group.name)) for group in buffers.groups
        ]

    def measure(self) -> dict[str, Tensor]:
        """Measure; see `GradientSums`."""
        squares = np.empty(len(self._buffers.slots), np.float64)
        largest = np.empty(len(self._buffers.slots), np.float32)
        counts = np.zeros((len(self._buffers.groups), 3), np.float64)
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale)
        for part in self._parts:
            gradient = self._buffers.gradient[part.start : part.stop].float().numpy()
            size = len(gradient)
            absolute = np.abs(gradient, out=self._absolute[:size])
            largest[part.slots] = np.maximum.reduceat(absolute, part.firsts)
            own = self._squares[:size]
            own[:] = gradient
            squares[part.slots] = np.add.reduceat(np.square(own, out=own), part.firsts)
            for group, where in part.groups.items():
                computed = absolute[where] if scale == 1.0 else absolute[where] * np.float32(scale)
                gone = self._rounds_to_zero[group]
                counts[group] += self._count(gradient[where], absolute[where], computed, gone)
        return {
            "norm": torch.from_numpy(np.sqrt(squares)),
            "absmax": torch.from_numpy(largest),
            "counts": torch.from_numpy(counts),
        }

    def _count(
        self, gradient: np.ndarray, absolute: np.ndarray, computed: np.ndarray, gone: np.float32
    ) -> tuple[int, int, int]:
        flags = self._flags[: len(absolute)]
        zeros = int(np.count_nonzero(np.equal(absolute, 0, out=flags)))
        rounded = int(np.count_nonzero(np.less_equal(computed, gone, out=flags)))
        finite = int(np.count_nonzero(np.isfinite(gradient, out=flags)))
        return zeros, len(gradient) - finite, rounded - zeros


def _rounds_to_zero(dtype: torch.dtype) -> np.float32:
    """Return the largest number that ``dtype`` rounds to 0: half of its smallest, a tie to even."""
    kind = torch.finfo(dtype)
    return np.float32(kind.smallest_normal * kind.eps / 2)


def _parts(buffers: AdapterBuffers) -> Iterator[_Part]:
    """Divide slots into parts of at most ``CACHED_ELEMENTS``; a longer slot is its own part."""
    slots, first = buffers.slots, 0
    for place, slot in enumerate(slots):
        last = place + 1 == len(slots)
        if not last and slots[place + 1].stop - slots[first].start <= CACHED_ELEMENTS:
            continue
        start = slots[first].start
        groups = {
            index: slice(max(group.start, start) - start, min(group.stop, slot.stop) - start)
            for index, group in enumerate(buffers.groups)
            if group.start < slot.stop and group.stop > start
        }
        firsts = np.asarray([s.start - start for s in slots[first : place + 1]], np.intp)
        yield _Part(start, slot.stop, slice(first, place + 1), firsts, groups)
        first = place + 1

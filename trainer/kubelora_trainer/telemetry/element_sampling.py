"""A fixed sample of every group's elements, so that measuring needs no full-size copy.

The same elements are measured in every step, spread evenly over each group. Strides share no factor
with row widths, so the sample covers all columns.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from kubelora_trainer.optim.flat_buffers import GroupRange, Slot
from kubelora_trainer.optim.moments import Elements

SAMPLES_PER_GROUP = 4_096
"""A ratio of 5 % is then known to 0.35 %."""
_FACTORS_OF_WIDTHS = 2 * 3 * 5 * 7 * 11
"""Widths of SDXL's layers (320 to 10240, 2816) have no other prime factors."""


class GroupSample:
    """Sampled positions of all groups as one matrix, so that a measurement takes a few kernels.

    index: int64 (groups, samples), positions in a flat buffer; short rows are padded with their
    own first position. weight: fp64 of the same shape, 1 for a sample and 0 for padding.
    """

    def __init__(
        self,
        groups: Sequence[GroupRange],
        device: torch.device,
        samples: int = SAMPLES_PER_GROUP,
    ) -> None:
        rows = [_positions(group, samples) for group in groups]
        width = max(len(row) for row in rows)
        index = torch.stack([torch.cat([r, r[:1].expand(width - len(r))]) for r in rows])
        counts = torch.tensor([[len(row)] for row in rows])
        self.index = index.to(device)
        self._flat_index = self.index.flatten()
        self.weight = (torch.arange(width) < counts).double().to(device)
        self._counts = counts[:, 0].double().to(device)

    def take(self, flat: Elements) -> Tensor:
        """Return the sampled elements of ``flat``, (groups, samples), in its type."""
        return flat.index_select(0, self._flat_index).view_as(self.index)

    def put(self, flat: Tensor, values: Tensor) -> None:
        """Write ``values`` (groups, samples) back to the sampled positions."""
        flat.scatter_(0, self._flat_index, values.flatten())

    def zero(self, flat: Tensor) -> None:
        """Set the sampled positions to 0."""
        flat.scatter_(0, self._flat_index, 0.0)

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values`` (groups, samples), numbers or booleans, by group: fp64 (groups)."""
        return (values * self.weight).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """Average ``values`` (groups, samples), numbers or booleans, by group: fp64 (groups)."""
        return self.total(values) / self._counts

    def share(self, of: Tensor, where: Tensor) -> Tensor:
        """Compute Σ of·where / Σ of by group: fp64 (…, groups), NaN where Σ of is 0.

        of, where: (…, groups, samples), numbers or booleans.
        """
        mass = of * self.weight
        return (mass * where).sum(-1) / mass.sum(-1)


class SlotSums:
    """Sums of sampled values by slot: over the elements of each factor that are in the sample."""

    def __init__(self, sample: GroupSample, slots: Sequence[Slot]) -> None:
        stops = torch.tensor([slot.stop for slot in slots], device=sample.index.device)
        self._slot = torch.bucketize(sample.index.flatten(), stops, right=True)
        self._sample, self._slots = sample, len(slots)
        self.counts = self.of(torch.ones_like(sample.weight))

    def spread(self, by_slot: Sequence[float]) -> Tensor:
        """Return the number of each sample's slot: fp64 (groups, samples); 1 in place of 0."""
        numbers = torch.tensor(by_slot, dtype=torch.float64, device=self._slot.device)
        numbers = torch.where(numbers == 0, 1.0, numbers)
        return numbers[self._slot].view_as(self._sample.weight)

    def of(self, values: Tensor) -> Tensor:
        """Sum ``values`` (groups, samples) by slot: fp64 (slots)."""
        weighted = (values * self._sample.weight).flatten()
        return weighted.new_zeros(self._slots).index_add_(0, self._slot, weighted)


def _positions(group: GroupRange, samples: int) -> Tensor:
    stride = _stride_from(-(-(group.stop - group.start) // samples))
    return torch.arange(group.start, group.stop, stride)


def _stride_from(least: int) -> int:
    """Find the smallest stride from ``least`` without a small prime factor of a row's width."""
    stride = least
    while gcd(stride, _FACTORS_OF_WIDTHS) != 1:
        stride += 1
    return stride

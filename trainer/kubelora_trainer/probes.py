"""What arithmetic swallows: gradients that vanish in the sum, updates that move no weight.

Both compare a value before and after one operation, on a strided sample of each group's range, so
that no full-size copy is ever made. Strides share no factor with row widths, so the sample walks
over all columns.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from kubelora_trainer.buffers import GroupRange

SAMPLES_PER_GROUP = 65_536
_FACTORS_OF_WIDTHS = 2 * 3 * 5 * 7 * 11
"""Widths of SDXL's layers (320 to 10240, 2816) have no other prime factors."""


class AbsorptionProbe:
    """Measures, around one micro-step, how much gradient mass the accumulator swallows.

    In-place accumulation never shows a micro-step's own gradient. So the sampled elements are set
    aside and zeroed before the backward pass; what stands there afterwards is that gradient, and
    the sum is then formed here by the very addition that autograd would have done.
    """

    def __init__(
        self, flat: Tensor, groups: Sequence[GroupRange], samples: int = SAMPLES_PER_GROUP
    ) -> None:
        self._views = sampled_views(flat, groups, samples)
        self._set_aside: list[Tensor] = []
        self.ratios = torch.zeros(len(groups), dtype=torch.float64, device=flat.device)

    def begin(self) -> None:
        """Right before the micro-step."""
        self._set_aside = [view.clone() for view in self._views]
        for view in self._views:
            view.zero_()

    def end(self) -> None:
        """Right after it: restore the sums and note each group's ratio, both ways, the larger."""
        ratios = []
        for view, before in zip(self._views, self._set_aside, strict=True):
            own = view.clone()
            view.add_(before)
            ratios.append(absorbed_ratio(before, own, view))
        self._set_aside = []
        self.ratios = torch.stack(ratios)

    def skip(self) -> None:
        """A window of one micro-step adds nothing to anything."""
        self.ratios = torch.zeros_like(self.ratios)


def absorbed_ratio(before: Tensor, addend: Tensor, total: Tensor) -> Tensor:
    """Share of mass lost in ``total = before + addend``, scalar fp64.

    The larger of Σ|g|·[acc+g == acc] / Σ|g| and Σ|acc|·[acc+g == g] / Σ|acc|; 0 for no mass.
    """
    new_lost = _share(addend, total == before)
    old_lost = _share(before, total == addend)
    return torch.maximum(new_lost, old_lost)


def _share(values: Tensor, lost: Tensor) -> Tensor:
    mass = values.abs().double()
    total = mass.sum()
    share = (mass * lost).sum() / total
    return torch.where(total > 0, share, torch.zeros_like(total))


class UpdateProbe:
    """Measures how many weights an optimizer step leaves as they were, although it meant to move.

    An element counts where its momentum is not zero and its value is the same bits as before.
    """

    def __init__(
        self,
        masters: Tensor,
        first_moment: Tensor,
        groups: Sequence[GroupRange],
        samples: int = SAMPLES_PER_GROUP,
    ) -> None:
        self._weights = sampled_views(masters, groups, samples)
        self._moments = sampled_views(first_moment, groups, samples)
        self._before: list[Tensor] = []
        self.ratios = torch.zeros(len(groups), dtype=torch.float64, device=masters.device)

    def begin(self) -> None:
        """Right before the optimizer step."""
        self._before = [view.clone() for view in self._weights]

    def end(self) -> None:
        """Right after it."""
        ratios = []
        for now, before, moment in zip(self._weights, self._before, self._moments, strict=True):
            lost = (now == before) & (moment != 0)
            ratios.append(lost.double().mean())
        self._before = []
        self.ratios = torch.stack(ratios)


def sampled_views(flat: Tensor, groups: Sequence[GroupRange], samples: int) -> list[Tensor]:
    """Views of at most ``samples`` elements of each group, evenly spread."""
    views = []
    for group in groups:
        stride = _stride_from(-(-(group.stop - group.start) // samples))
        views.append(flat[group.start : group.stop : stride])
    return views


def _stride_from(least: int) -> int:
    """The smallest stride from ``least`` that shares no small prime factor with a row's width."""
    stride = least
    while gcd(stride, _FACTORS_OF_WIDTHS) != 1:
        stride += 1
    return stride

"""Numbers of every optimizer step, by group and by factor, at a cost below notice.

Everything is computed on the device from the flat buffers, in chunks, packed into one tensor and
copied to the host once, asynchronously; it is read a step later, so training never waits for it.
Group numbers become metrics; factor numbers go to the run's log alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kubelora_trainer.buffers import AdapterBuffers
from kubelora_trainer.category_losses import CategorySums
from kubelora_trainer.probes import AbsorptionProbe, UpdateProbe
from kubelora_trainer.step_numbers import GroupNumbers, StepNumbers

CHUNK_ELEMENTS = 1 << 22
"""Elements looked at together: 16 MiB of temporaries in fp32, whatever the adapter's size."""


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step already.

    judge_updates: whether the rate was high enough for an unmoved weight to mean anything.
    """

    step: int
    learning_rate: float
    samples: int
    judge_updates: bool


class GradientTelemetry:
    """Measures the buffers at the points of a step where each number exists.

    first_moment: the optimizer's, flat. None where it keeps none: an element was then meant to
    move where its gradient is not zero.
    """

    def __init__(self, buffers: AdapterBuffers, first_moment: Tensor | None) -> None:
        self._buffers = buffers
        meant_to_move = buffers.optimizer_gradient if first_moment is None else first_moment
        self.absorption = AbsorptionProbe(buffers.gradient, buffers.groups)
        self.updates = UpdateProbe(buffers.masters, meant_to_move, buffers.groups)
        self._gradient_views = [slot.of(buffers.gradient) for slot in buffers.slots]
        self._norms: Tensor = torch.zeros(0)
        self._absmax: Tensor = torch.zeros(0)
        self._counts: Tensor = torch.zeros(0)

    def measure_gradient(self) -> Tensor:
        """Measure the finished gradient, before clipping.

        Returns the total L2 norm, a fp32 scalar on the device.
        """
        norms = torch._foreach_norm(self._gradient_views, 2, dtype=torch.float32)
        absmax = torch._foreach_norm(self._gradient_views, math.inf, dtype=torch.float32)
        self._norms = torch.stack(norms).double()
        self._absmax = torch.stack(absmax).double()
        self._counts = torch.stack([self._count(g.start, g.stop) for g in self._buffers.groups])
        return self._norms.square().sum().sqrt().float()

    def _count(self, start: int, stop: int) -> Tensor:
        """Zeros, non-finite elements and underflows of a range: three fp64 numbers."""
        narrowest = self._buffers.plan.narrowest
        counts = torch.zeros(3, dtype=torch.float64, device=self._buffers.gradient.device)
        for chunk in self._buffers.gradient[start:stop].split(CHUNK_ELEMENTS):
            zero = chunk == 0
            gone = (chunk.to(narrowest) == 0) & ~zero
            finite = torch.isfinite(chunk)
            counts += torch.stack([zero.sum(), chunk.numel() - finite.sum(), gone.sum()])
        return counts

    def pack(
        self, facts: StepFacts, loss_sum: Tensor, categories: CategorySums | None = None
    ) -> "PendingNumbers":
        """Start the one copy of this step's numbers to the host.

        loss_sum: scalar, the window's losses summed over samples. categories: the same by category.
        """
        packed = torch.cat(
            [
                self._counts.flatten(),
                self.absorption.ratios,
                self.updates.ratios,
                self._norms,
                self._absmax,
                loss_sum.detach().double().reshape(1),
                *([categories.sums.flatten()] if categories else []),
            ]
        )
        return PendingNumbers(self._buffers, facts, packed, categories)


class PendingNumbers:
    """A step's numbers on their way to the host."""

    def __init__(
        self,
        buffers: AdapterBuffers,
        facts: StepFacts,
        packed: Tensor,
        categories: CategorySums | None,
    ) -> None:
        self._buffers, self._facts, self._categories = buffers, facts, categories
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = packed

    def read(self) -> StepNumbers:
        """The numbers; waits for the copy where it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        groups, slots = self._buffers.groups, self._buffers.slots
        count = len(groups)
        sizes = [3 * count, count, count, len(slots), len(slots), 1]
        sizes.append(self._host.numel() - sum(sizes))
        counts, absorbed, lost, norms, absmax, loss, by_category = (
            part.tolist() for part in self._host.split(sizes)
        )
        by_group: dict[str, GroupNumbers] = {}
        for index, group in enumerate(groups):
            zeros, nonfinite, underflows = counts[3 * index : 3 * index + 3]
            members = [i for i, s in enumerate(slots) if s.factor.group == group.name]
            size = group.stop - group.start
            by_group[group.name] = GroupNumbers(
                grad_norm=math.sqrt(sum(norms[i] ** 2 for i in members)),
                grad_absmax=_largest([absmax[i] for i in members]),
                grad_zero_ratio=zeros / size,
                grad_nonfinite=int(nonfinite),
                grad_underflow_ratio=underflows / (size - zeros) if size > zeros else 0.0,
                absorbed_ratio=absorbed[index],
                update_lost_ratio=lost[index] if self._facts.judge_updates else math.nan,
            )
        return StepNumbers(
            step=self._facts.step,
            learning_rate=self._facts.learning_rate,
            loss=loss[0] / self._facts.samples,
            samples=self._facts.samples,
            grad_norm=math.sqrt(sum(n**2 for n in norms)),
            groups=by_group,
            factor_norms=norms,
            factor_absmax=absmax,
            category_losses=self._categories.read(by_category) if self._categories else {},
        )


def _largest(values: Sequence[float]) -> float:
    """The maximum, NaN where any is NaN."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)

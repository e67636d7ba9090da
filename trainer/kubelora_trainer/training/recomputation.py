"""Recomputation of micro-steps in place, without a trace in the run.

Every draw is a function of the seed, the micro-step and the sample, so a micro-step can be computed
again with the same operands in the same order. What the run itself keeps of a pass (accumulator,
counts, sums by category) is set aside meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts, ignore
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.loss_scaler import LossScaler
from kubelora_trainer.telemetry.category_losses import CategoryLosses
from kubelora_trainer.telemetry.gradient_telemetry import GradientTelemetry


class MicroBatchLosses(Protocol):
    """A micro-step's loss with a graph, and the samples' own losses without one."""

    @property
    def loss_sum(self) -> Tensor:
        """fp32 scalar with a graph."""

    @property
    def losses(self) -> Tensor:
        """fp32 (n), of each sample."""


class RecomputedObjective(Protocol):
    """The loss of any micro-step, and whoever is shown the facts of each."""

    observer: Callable[[MicroBatchFacts], None]

    def __call__(self, micro_step: int) -> MicroBatchLosses:
        """Run a micro-step's forward pass."""


@dataclass(frozen=True)
class Recomputation:
    """The components whose state a pass changes.

    own: the objective itself, without whatever the loop wraps it in.
    """

    own: RecomputedObjective
    buffers: AdapterBuffers
    telemetry: GradientTelemetry
    categories: CategoryLosses | None = None
    scaler: LossScaler | None = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Compute anything in the block; afterwards the run's own state has the same bits."""
        gradient, masters = self.buffers.gradient.clone(), self.buffers.masters.clone()
        sums = self.categories.sums.clone() if self.categories else None
        observer, self.own.observer = self.own.observer, ignore
        try:
            with self.telemetry.uncounted():
                yield
        finally:
            self.own.observer = observer
            self.buffers.gradient.copy_(gradient)
            self.buffers.masters.copy_(masters)
            if self.categories and sums is not None:
                self.categories.sums.copy_(sums)

    def gradient(self, objective: Callable[[int], object], micro_steps: Sequence[int]) -> Tensor:
        """Sum the gradients of ``micro_steps`` in their order, as the run accumulates them.

        Args:
            objective: The loop's objective, or another route to the same loss.
            micro_steps: As the data's order counts them.

        Returns:
            A copy of the accumulator; gradients are scaled as the run scales its loss.
        """
        self.buffers.gradient.zero_()
        for micro_step in micro_steps:
            loss: Tensor = objective(micro_step).loss_sum  # type: ignore[attr-defined]
            (self.scaler.scaled(loss) if self.scaler else loss).backward()
        return self.buffers.gradient.clone()

    @torch.no_grad()
    def loss(self, micro_step: int) -> float:
        """Return the micro-step's loss at the model's present weights, by a forward pass alone."""
        return float(self.own(micro_step).losses.double().sum())

    @contextmanager
    def using_bits(self, weights: Sequence[Tensor], scale: Tensor | None) -> Iterator[None]:
        """Compute with what `weights_in_use` returned at another time, and with its loss scale."""
        read = weights_in_use(self.buffers)
        own = [part.clone() for part in read]
        own_scale = self.scaler.scale.clone() if self.scaler else None
        try:
            for part, before in zip(read, weights, strict=True):
                part.copy_(before)
            if self.scaler and scale is not None:
                self.scaler.scale.copy_(scale)
            yield
        finally:
            for part, before in zip(read, own, strict=True):
                part.copy_(before)
            if self.scaler and own_scale is not None:
                self.scaler.scale.copy_(own_scale)


def weights_in_use(buffers: AdapterBuffers) -> list[Tensor]:
    """Return the tensors that passes read: the working copy, and the magnitudes' masters."""
    if buffers.working is buffers.masters:
        return [buffers.masters]
    return [buffers.working, buffers.masters[buffers.working.numel() :]]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two gradients are equal element by element; NaN equals NaN."""
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def distance(buffers: AdapterBuffers, found: Tensor, expected: Tensor) -> tuple[float, str]:
    """Return the largest relative distance of a factor's gradient, and the factor's name.

    Infinite where only one of the two is finite, and where only ``expected`` is 0.
    """
    worst, where = 0.0, buffers.slots[0].factor.name
    for slot in buffers.slots:
        got, wanted = slot.of(found).double(), slot.of(expected).double()
        if same_bits(got, wanted):
            continue
        ratio = float((got - wanted).norm() / wanted.norm())
        ratio = ratio if ratio == ratio else float("inf")
        if ratio > worst:
            worst, where = ratio, slot.factor.name
    return worst, where

"""Whether the gradients of lora_A and lora_B belong to one and the same backward pass.

A loss depends on a pair of factors through the product B·A alone, so it does not change when A
becomes M·A and B becomes B·M⁻¹. The derivative of that is an identity of the chain rule:

    A · gAᵀ = gBᵀ · B      (rank x rank, for every pair)

It holds with any scale, dropout, accumulation, DoRA, and for convolutions (the rank is a channel
between both), whatever the loss. A micro-step lost on one factor, a factor divided twice, or a sum
that was not zeroed breaks it. It is void where a loss looks at A or B itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kubelora_trainer.buffers import AdapterBuffers, Slot

DOWN, UP = "lora_A", "lora_B"


@dataclass(frozen=True)
class Pair:
    """Both factors of one module, by their place among the slots. block: of their groups."""

    block: str
    down: int
    up: int


def pairs_of(slots: Sequence[Slot]) -> tuple[Pair, ...]:
    """The modules that have both factors, in the order of their lora_A."""
    place = {slot.factor.name: index for index, slot in enumerate(slots)}
    pairs = []
    for index, slot in enumerate(slots):
        block, _, factor = slot.factor.group.rpartition(".")
        up = place.get(f"{slot.factor.module}.{UP}")
        if factor == DOWN and up is not None:
            pairs.append(Pair(block, index, up))
    return tuple(pairs)


class BalanceProbe:
    """Measures the identity on the finished gradient, before the optimizer step.

    Weights are those that the passes computed with, the working copy. Pairs of one shape are
    multiplied together, at most ``chunk_elements`` of each factor at a time.
    """

    def __init__(self, buffers: AdapterBuffers, chunk_elements: int) -> None:
        self._buffers = buffers
        self.pairs = pairs_of(buffers.slots)
        self._batches = list(_batches(buffers.slots, self.pairs, chunk_elements))
        order = [index for batch in self._batches for index in batch]
        self._place = torch.tensor(order, device=buffers.gradient.device).argsort()

    def measure(self) -> Tensor:
        """By pair: ‖A·gAᵀ - gBᵀ·B‖² and ((‖A·gAᵀ‖ + ‖gBᵀ·B‖) / 2)²; fp64 (pairs, 2)."""
        if not self._batches:
            return torch.zeros(0, 2, dtype=torch.float64, device=self._buffers.gradient.device)
        return torch.cat([self._measure(batch) for batch in self._batches])[self._place]

    def _measure(self, batch: Sequence[int]) -> Tensor:
        down = [self._buffers.slots[self.pairs[index].down] for index in batch]
        up = [self._buffers.slots[self.pairs[index].up] for index in batch]
        weights, gradient = self._buffers.working, self._buffers.gradient
        left = (_stacked(down, weights) @ _stacked(down, gradient).mT).double()
        right = (_stacked(up, gradient).mT @ _stacked(up, weights)).double()
        sizes = torch.linalg.vector_norm(left, dim=(1, 2)) + torch.linalg.vector_norm(
            right, dim=(1, 2)
        )
        return torch.stack([(left - right).square().sum((1, 2)), (sizes / 2).square()], dim=1)


def balance(off: float, size: float) -> float:
    """sqrt(off / size); NaN where there is nothing to compare."""
    return math.sqrt(off / size) if size > 0 and math.isfinite(size) else math.nan


def pooled(pairs: Sequence[Pair], measured: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """The balance of each block: √Σ‖A·gAᵀ - gBᵀ·B‖² / √Σ((‖A·gAᵀ‖ + ‖gBᵀ·B‖) / 2)²."""
    sums: dict[str, tuple[float, float]] = {}
    for pair, (off, size) in zip(pairs, measured, strict=True):
        before = sums.get(pair.block, (0.0, 0.0))
        sums[pair.block] = (before[0] + off, before[1] + size)
    return {block: balance(*both) for block, both in sums.items()}


def _stacked(slots: Sequence[Slot], flat: Tensor) -> Tensor:
    """Factors of one shape as fp32 (pairs, rows, columns); a convolution's window is columns."""
    return torch.stack([slot.of(flat).flatten(1) for slot in slots]).float()


def _batches(
    slots: Sequence[Slot], pairs: Sequence[Pair], chunk_elements: int
) -> Iterator[list[int]]:
    by_shape: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, pair in enumerate(pairs):
        shapes = (slots[pair.down].shape, slots[pair.up].shape)
        by_shape.setdefault(shapes, []).append(index)
    for (down, up), members in by_shape.items():
        count = max(1, chunk_elements // max(math.prod(down), math.prod(up)))
        for start in range(0, len(members), count):
            yield members[start : start + count]

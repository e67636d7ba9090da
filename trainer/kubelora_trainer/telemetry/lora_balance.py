"""A check that the gradients of lora_A and lora_B belong to the same backward pass.

A loss depends on a pair of factors through the product B·A alone, so it does not change when A
becomes M·A and B becomes B·M⁻¹. The derivative of that is an identity of the chain rule:

    A · gAᵀ = gBᵀ · B      (rank x rank, for every pair)

It holds with any scale, dropout, accumulation, DoRA, and for convolutions (the rank is a channel
between both), whatever the loss. A micro-step lost on one factor, a factor divided twice, or a sum
that was not zeroed breaks it. It does not hold if the loss depends on A
or B directly.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kubelora_trainer.lora.factor_names import DOWN, UP
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot


@dataclass(frozen=True)
class Pair:
    """Both factors of one module, by their place among the slots. block: of their groups."""

    block: str
    down: int
    up: int


def pairs_of(slots: Sequence[Slot]) -> tuple[Pair, ...]:
    """List the modules that have both factors, in the order of their lora_A."""
    place = {slot.factor.name: index for index, slot in enumerate(slots)}
    pairs = []
    for index, slot in enumerate(slots):
        block, _, factor = slot.factor.group.rpartition(".")
        up = place.get(f"{slot.factor.module}.{UP}")
        if factor == DOWN and up is not None:
            pairs.append(Pair(block, index, up))
    return tuple(pairs)


class BalanceProbe:
    """Measurement of the identity on the finished gradient, before the optimizer step.

    Weights are those that the passes computed with, the working copy. Pairs of one shape are
    multiplied together, at most ``chunk_elements`` of each factor at a time.
    """

    def __init__(self, buffers: AdapterBuffers, chunk_elements: int) -> None:
        self.pairs = pairs_of(buffers.slots)
        device = buffers.gradient.device
        self._none = torch.zeros(0, 2, dtype=torch.float64, device=device)
        batches = list(batches_of_one_shape(buffers.slots, self.pairs, chunk_elements))
        order = [index for batch in batches for index in batch]
        self._place = torch.tensor(order, device=device).argsort()
        self._batches = [_Batch(buffers, [self.pairs[index] for index in b]) for b in batches]

    def measure(self) -> Tensor:
        """Compute by pair: ‖A·gAᵀ - gBᵀ·B‖² and ((‖A·gAᵀ‖ + ‖gBᵀ·B‖) / 2)²; fp64 (pairs, 2).

        Products below 1e-19 count as 0: their squares are too small for fp32.
        """
        if not self._batches:
            return self._none
        return torch.cat([batch.measure() for batch in self._batches])[self._place]


class _Batch:
    """Pairs of one shape: matrices (rows, columns), of which a convolution's window is columns."""

    def __init__(self, buffers: AdapterBuffers, pairs: Sequence[Pair]) -> None:
        def views(places: list[int], flat: Tensor) -> list[Tensor]:
            return [buffers.slots[place].of(flat).flatten(1) for place in places]

        downs, ups = [pair.down for pair in pairs], [pair.up for pair in pairs]
        self._down, self._up = views(downs, buffers.working), views(ups, buffers.working)
        self._down_gradient = views(downs, buffers.gradient)
        self._up_gradient = views(ups, buffers.gradient)

    def measure(self) -> Tensor:
        left = _stacked(self._down) @ _stacked(self._down_gradient).mT
        right = _stacked(self._up_gradient).mT @ _stacked(self._up)
        off, sizes = _norms(left - right), _norms(left) + _norms(right)
        return torch.stack([off, sizes / 2], dim=1).square()


def _norms(matrices: Tensor) -> Tensor:
    """Compute the L2 norm of each of (pairs, rank, rank), fp64."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2))
    return norms.double()


def _stacked(matrices: list[Tensor]) -> Tensor:
    """Stack to fp32 (pairs, rows, columns)."""
    return torch.stack(matrices).float()


def balance(off: float, size: float) -> float:
    """Compute sqrt(off / size); NaN if there is nothing to compare."""
    return math.sqrt(off / size) if size > 0 and math.isfinite(size) else math.nan


def pooled(pairs: Sequence[Pair], measured: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """Compute the balance of each block: √Σ‖A·gAᵀ - gBᵀ·B‖² / √Σ((‖A·gAᵀ‖ + ‖gBᵀ·B‖) / 2)²."""
    sums: dict[str, tuple[float, float]] = {}
    for pair, (off, size) in zip(pairs, measured, strict=True):
        before = sums.get(pair.block, (0.0, 0.0))
        sums[pair.block] = (before[0] + off, before[1] + size)
    return {block: balance(*both) for block, both in sums.items()}


def batches_of_one_shape(
    slots: Sequence[Slot], pairs: Sequence[Pair], chunk_elements: int
) -> Iterator[list[int]]:
    """Divide the pairs into batches to multiply together.

    Args:
        slots: All slots.
        pairs: The pairs.
        chunk_elements: Elements of each factor in a batch, at most.

    Yields:
        Indices of the pairs of one batch.
    """
    by_shape: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, pair in enumerate(pairs):
        shapes = (slots[pair.down].shape, slots[pair.up].shape)
        by_shape.setdefault(shapes, []).append(index)
    for (down, up), members in by_shape.items():
        count = max(1, chunk_elements // max(math.prod(down), math.prod(up)))
        for start in range(0, len(members), count):
            yield members[start : start + count]

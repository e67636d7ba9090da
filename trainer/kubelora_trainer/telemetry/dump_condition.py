"""``spec.health.dumpGradients.when``: the condition under which a gradient is dumped.

The API has validated the text (``gradient_dump_spec.CONDITION_PATTERN``); here it is parsed and
evaluated on many tensors at once, so that the host waits for the GPU once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """``number op limit``. number: absmax, norm (L2) or zero_ratio (share of exact zeros)."""

    number: str
    op: Literal["<", ">"]
    limit: float


@dataclass(frozen=True)
class GradientCondition:
    """All ``comparisons`` hold; without any: some element is NaN or infinite.

    A comparison with NaN never holds.
    """

    comparisons: tuple[Comparison, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers that have to be known."""
        return tuple(sorted({c.number for c in self.comparisons})) or ("absmax",)

    def holds(self, gradients: Sequence[Tensor], loss_scale: Tensor | None = None) -> list[bool]:
        """Evaluate the condition for each gradient.

        loss_scale: the factor that gradients were multiplied by; numbers are divided by it.
        """
        if not gradients:
            return []
        columns = torch.stack([_measure(n, gradients, loss_scale) for n in self.numbers], dim=1)
        rows = columns.tolist()
        return [self._judge(dict(zip(self.numbers, row, strict=True))) for row in rows]

    def _judge(self, numbers: dict[str, float]) -> bool:
        if not self.comparisons:
            absmax = numbers["absmax"]
            return absmax - absmax != 0.0
        return all(
            numbers[c.number] < c.limit if c.op == "<" else numbers[c.number] > c.limit
            for c in self.comparisons
        )


def parse_condition(text: str) -> GradientCondition:
    """Parse a condition."""
    if text == "nonfinite":
        return GradientCondition()
    comparisons = []
    for part in text.split(" and "):
        number, op, limit = part.split(" ")
        comparisons.append(Comparison(number, "<" if op == "<" else ">", float(limit)))
    return GradientCondition(tuple(comparisons))


def _measure(number: str, gradients: Sequence[Tensor], loss_scale: Tensor | None) -> Tensor:
    """Compute a number of each gradient, fp64 (gradients)."""
    if number == "zero_ratio":
        return torch.stack([(gradient == 0).double().mean() for gradient in gradients])
    order = torch.inf if number == "absmax" else 2
    norms = torch._foreach_norm(list(gradients), order, dtype=torch.float32)
    found = torch.stack(norms).double()
    return found if loss_scale is None else found / loss_scale

"""Floating-point types of the adapter's copies, their memory, and what they can lose.

This is separate from the buffers, so that the choice can be printed, compared and tested without a
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kubelora_api.training_spec import Precision
from kubelora_api.types import ComputeType
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.utils.text import bytes_text

DTYPES: dict[ComputeType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
DTYPE_NAMES: dict[torch.dtype, ComputeType] = {dtype: name for name, dtype in DTYPES.items()}


def is_magnitude(group: str) -> bool:
    """Return True for a group of magnitudes, which passes read in the masters' precision."""
    return group.rpartition(".")[2] == MAGNITUDE


@dataclass(frozen=True)
class PrecisionPlan:
    """Types of the adapter's copies.

    Attributes:
        compute: The working copy that forward and backward passes read.
        accumulator: The buffer that sums gradients over a window.
        masters: The weights that the optimizer updates.
    """

    compute: torch.dtype
    accumulator: torch.dtype
    masters: torch.dtype

    def narrowest_in(self, group: str) -> torch.dtype:
        """Return the type that flushes most gradients of a group to zero; fp16 has the least range.

        Gradients of magnitudes are computed in the masters' type.
        """
        used = {self.accumulator, self.masters}
        if not is_magnitude(group):
            used.add(self.compute)
        if torch.float16 in used:
            return torch.float16
        return torch.bfloat16 if torch.bfloat16 in used else torch.float32

    @property
    def scales_loss(self) -> bool:
        """True if gradients pass through a type whose range is too narrow for them."""
        return self.compute == torch.float16

    def bytes_per_parameter(self) -> dict[str, int]:
        """Return the bytes per adapter parameter of each copy; a shared copy is counted once."""
        copies = {"working copy": self.compute.itemsize, "gradients": self.accumulator.itemsize}
        if self.masters != self.compute:
            copies["master weights"] = self.masters.itemsize
        if self.masters != self.accumulator:
            copies["gradients for the optimizer"] = self.masters.itemsize
        return copies


def plan_precision(precision: Precision) -> PrecisionPlan:
    """Convert ``spec.precision`` to torch types."""
    return PrecisionPlan(
        compute=DTYPES[precision.compute],
        accumulator=DTYPES[precision.accumulator],
        masters=DTYPES[precision.master_weights],
    )


def describe_memory(costs: Mapping[str, int]) -> str:
    """Summarise in one line what each copy of the adapter and the optimizer state cost in bytes."""
    parts = [f"{name} {bytes_text(size)}" for name, size in costs.items()]
    return f"{', '.join(parts)}; together {bytes_text(sum(costs.values()))}"


def lossy_warnings(plan: PrecisionPlan) -> list[str]:
    """Describe what the plan is known to lose, one sentence each; empty for the defaults."""
    warnings = []
    if plan.accumulator == torch.bfloat16:
        warnings.append(
            "precision.accumulator is bf16: a micro-batch's gradient that is 256 times smaller "
            "than the sum so far is lost"
        )
    if plan.masters == torch.bfloat16:
        warnings.append(
            "precision.masterWeights is bf16: an update smaller than about 1/512 of the weight "
            "is lost"
        )
    return warnings

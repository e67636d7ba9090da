"""The ten worst factors of the adapter, to look at first, for ``/status``.

Metrics can't have modules as labels because their number is unbounded; the run's log names them
all.
"""

import math
from collections.abc import Sequence
from statistics import median

from kubelora_api.report import ModuleNumbers
from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.telemetry.step_metrics import StepNumbers

WORST_MODULES = 10
"""A screen of `/status`; the metrics have every group."""
CONTRADICTION = 0.05
"""A balance above this is no rounding: bf16 passes read up to 5e-3, lost micro-steps 0.1."""
_JSON_MAX = 3.4e38
"""JSON has no infinity; a norm that is not finite is reported as fp32's largest number."""


def worst_modules(slots: Sequence[Slot], numbers: StepNumbers) -> list[ModuleNumbers]:
    """Return at most ten factors, the worst first.

    First those whose gradient is not finite, then pairs whose gradients contradict each other (the
    worst balance first), then those whose gradient norm lies farthest from their group's median,
    as a ratio in either direction; a norm of exactly 0 in a group with a gradient lies farthest.
    """
    medians = _medians(slots, numbers)
    broken: list[tuple[float, ModuleNumbers]] = []
    torn: list[tuple[float, ModuleNumbers]] = []
    apart: list[tuple[float, ModuleNumbers]] = []
    for place, slot in enumerate(slots):
        name, norm = slot.factor.name, numbers.factor_norms[place]
        balance = numbers.factor_balance[place] if numbers.factor_balance else math.nan
        told = ModuleNumbers(module=name, metric="grad_norm", value=_json(norm))
        if not math.isfinite(norm):
            broken.append((0.0, told))
        elif balance > CONTRADICTION:
            told = ModuleNumbers(module=name, metric="lora_balance", value=balance)
            torn.append((balance, told))
        else:
            apart.append((_distance(norm, medians[slot.factor.group]), told))
    ranked = [sorted(kind, key=lambda one: -one[0]) for kind in (broken, torn, apart)]
    return [told for kind in ranked for _, told in kind][:WORST_MODULES]


def _medians(slots: Sequence[Slot], numbers: StepNumbers) -> dict[str, float]:
    norms: dict[str, list[float]] = {}
    for slot, norm in zip(slots, numbers.factor_norms, strict=True):
        if math.isfinite(norm):
            norms.setdefault(slot.factor.group, []).append(norm)
    return {group: median(of_group) for group, of_group in norms.items()}


def _distance(norm: float, middle: float) -> float:
    if norm == middle:
        return 0.0
    return abs(math.log(norm / middle)) if norm > 0 and middle > 0 else math.inf


def _json(value: float) -> float:
    return value if math.isfinite(value) else _JSON_MAX

"""The numbers of one optimizer step: the telemetry's result.

Separate from the code that measures them, so that watchdog, exporter and run log need no tensor to
read them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kubelora_api import metrics
from kubelora_trainer.optim.loss_scaler import LEAST_SCALE

MODULE_SIZES: Final = "adapter.size"
"""Name, among the numbers of detectors, of each module's update over its weight."""


@dataclass(frozen=True)
class GroupNumbers:
    """One group's numbers of one optimizer step, of the gradient before clipping. Ratios 0 to 1.

    NaN means that it was not measured, or that this step is not judged by it.

    grad_zero_ratio: NaN for lora_A while lora_B may be 0 in the passes though its masters moved
    (fp16). update_lost_ratio: NaN where the step was not meant to move anything.
    accumulation_error_ratio: NaN for an fp32 accumulator. update_rms: rms(change). update_scale:
    rms(change / own rate), NaN at rate 0. optimizer_stuck_ratio, adam_eps_damping_ratio: NaN
    without second moments.
    lora_balance: of the block's pairs of factors, the same number for both its groups; NaN while
    all products are 0, as for lora_A's zeros, and for magnitudes.
    """

    grad_norm: float
    grad_absmax: float
    grad_zero_ratio: float
    grad_nonfinite: int
    grad_underflow_ratio: float
    absorbed_ratio: float
    update_lost_ratio: float
    accumulation_error_ratio: float = math.nan
    update_scale: float = math.nan
    optimizer_stuck_ratio: float = math.nan
    adam_eps_damping_ratio: float = math.nan
    lora_balance: float = math.nan
    update_rms: float = math.nan


@dataclass(frozen=True)
class CategoryLoss:
    """Mean loss of a category's samples in one window, and how many there were."""

    loss: float
    samples: int


@dataclass(frozen=True)
class StepNumbers:
    """All numbers of one optimizer step.

    step: optimizer steps done, this one included. step_size: the rate times the factor
    that the optimizer itself applies (Prodigy). loss: mean over the window's samples.
    factor_norms, factor_absmax, factor_balance, factor_update_scale: in slot order. The balance is
    that of the factor's pair; the update scale is estimated from the sampled elements.
    clipped_norm: of the gradient that the optimizer got; min(grad_norm, maxGradNorm) if clipping
    is right. backward_passes: of the window, NaN if it was resumed in its middle; equal to
    micro_steps if each micro-batch was differentiated alone.
    dead_modules: modules with a factor whose gradient was exactly zero in the last 10 steps.
    category_losses: of the categories that the window saw; empty where images have none.
    loss_scale: factor that the loss was multiplied by; NaN without a scaler.
    working_copy_stale: share of the sampled weights that differ from their masters, rounded.
    rank_divergence: NaN for a single rank. broken_ranks: of several, those whose own part of the
    gradient was not finite. host_memory_peak, device_memory_peak: bytes.
    extra: what detectors measured on the device (``Detector.measure``), flat, by their own names.
    """

    step: int
    learning_rate: float
    loss: float
    samples: int
    grad_norm: float
    groups: Mapping[str, GroupNumbers]
    factor_norms: Sequence[float]
    factor_absmax: Sequence[float]
    factor_balance: Sequence[float] = ()
    factor_update_scale: Sequence[float] = ()
    clipped_norm: float = math.nan
    backward_passes: float = math.nan
    micro_steps: int = 0
    dead_modules: int = 0
    step_size: float = 0.0
    working_copy_stale: float = math.nan
    rank_divergence: float = math.nan
    loss_scale: float = math.nan
    host_memory_peak: float = math.nan
    device_memory_peak: float = math.nan
    category_losses: Mapping[str, CategoryLoss] = field(default_factory=dict)
    broken_ranks: tuple[int, ...] = ()
    extra: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether the step moved nothing because the loss scale was too large, which is no fault.

        A loss that is not finite is not due to the scale, nor is a gradient at the least scale.
        """
        failed = self.nonfinite > 0 or not math.isfinite(self.grad_norm)
        return failed and math.isfinite(self.loss) and self.loss_scale > LEAST_SCALE

    @property
    def adapter_size(self) -> float:
        """The largest update of a module over its weight; NaN where this step did not measure."""
        return max(self.extra.get(MODULE_SIZES, ()), default=math.nan)

    @property
    def nonfinite(self) -> int:
        """Gradient elements that were NaN or infinite."""
        return sum(g.grad_nonfinite for g in self.groups.values())


GROUP_FIELDS: Final[Mapping[str, str]] = {
    metrics.GRAD_NORM.name: "grad_norm",
    metrics.GRAD_ABSMAX.name: "grad_absmax",
    metrics.GRAD_ZERO_RATIO.name: "grad_zero_ratio",
    metrics.GRAD_NONFINITE.name: "grad_nonfinite",
    metrics.GRAD_UNDERFLOW_RATIO.name: "grad_underflow_ratio",
    metrics.ABSORBED_RATIO.name: "absorbed_ratio",
    metrics.UPDATE_LOST_RATIO.name: "update_lost_ratio",
    metrics.ACCUMULATION_ERROR_RATIO.name: "accumulation_error_ratio",
    metrics.UPDATE_SCALE.name: "update_scale",
    metrics.OPTIMIZER_STUCK_RATIO.name: "optimizer_stuck_ratio",
    metrics.ADAM_EPS_DAMPING_RATIO.name: "adam_eps_damping_ratio",
    metrics.LORA_BALANCE.name: "lora_balance",
}
"""Field of ``GroupNumbers`` behind each metric that has a group."""

STEP_FIELDS: Final[Mapping[str, str]] = {
    metrics.LEARNING_RATE.name: "learning_rate",
    metrics.LOSS.name: "loss",
    metrics.LOSS_SCALE.name: "loss_scale",
    metrics.STEP.name: "step",
    metrics.CLIPPED_NORM.name: "clipped_norm",
    metrics.BACKWARD_PASSES.name: "backward_passes",
    metrics.MICRO_STEPS.name: "micro_steps",
    metrics.DEAD_MODULE_COUNT.name: "dead_modules",
    metrics.WORKING_COPY_STALE_RATIO.name: "working_copy_stale",
    metrics.RANK_DIVERGENCE.name: "rank_divergence",
    metrics.HOST_MEMORY_PEAK.name: "host_memory_peak",
    metrics.DEVICE_MEMORY_PEAK.name: "device_memory_peak",
}
"""Field of ``StepNumbers`` behind each metric of a step."""

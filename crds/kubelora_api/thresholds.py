"""The one table of numerical thresholds: the in-pod watchdog and the alert rules both read it.

Each entry says which metric is compared with what, over how many optimizer steps, and what a
person should do. A value stands here with its reason, or it does not stand.
"""

from dataclasses import dataclass
from typing import Final, Literal

from kubelora_api import metrics
from kubelora_api.metrics import Metric


@dataclass(frozen=True)
class Threshold:
    """A limit on a metric.

    finding: CamelCase name, in conditions, metrics and alert names.
    op: how the metric's value compares with ``limit`` when something is wrong.
    window: optimizer steps whose median is compared; one outlier must not raise an alarm.
    skip_steps: first optimizer steps not judged (lora_A has no gradient while lora_B is 0).
    """

    finding: str
    severity: Literal["warning", "critical"]
    metric: Metric
    op: Literal[">", "<", "=="]
    limit: float
    window: int
    skip_steps: int
    sentence: str
    reason: str


UPDATES_LOST: Final = Threshold(
    finding="UpdatesLost",
    severity="critical",
    metric=metrics.UPDATE_LOST_RATIO,
    op=">",
    limit=0.5,
    window=5,
    skip_steps=3,
    sentence="Most optimizer updates are too small for the weights' dtype and change nothing: set "
    "precision.masterWeights to fp32.",
    reason="fp32 masters lose under 3 % of updates at any usable rate; bf16 masters lose 82 % of "
    "lora_A's at 1e-4 and 96 to 99 % at 1e-5.",
)
GRADIENT_ABSORBED: Final = Threshold(
    finding="GradientAbsorbed",
    severity="critical",
    metric=metrics.ABSORBED_RATIO,
    op=">",
    limit=0.05,
    window=5,
    skip_steps=3,
    sentence="Gradients vanish while they are accumulated: set precision.accumulator to fp32.",
    reason="An fp32 sum of like-sized addends absorbs nothing; in bf16 a loss of mass above 5 % "
    "means that one addend dominates or that the window is too long for the dtype.",
)
GRADIENT_NONFINITE: Final = Threshold(
    finding="GradientNonFinite",
    severity="critical",
    metric=metrics.GRAD_NONFINITE,
    op=">",
    limit=0.0,
    window=1,
    skip_steps=0,
    sentence="A gradient is NaN or infinite; no weight was changed by it.",
    reason="No finite loss has such a gradient.",
)
GRADIENT_VANISHED: Final = Threshold(
    finding="GradientVanished",
    severity="critical",
    metric=metrics.GRAD_ZERO_RATIO,
    op=">",
    limit=0.999,
    window=5,
    skip_steps=3,
    sentence="Gradients are exactly zero: a layer is detached from the loss, or the dtype in use "
    "has no number small enough.",
    reason="After the first steps a healthy factor has a zero gradient nowhere but in single rows.",
)

THRESHOLDS: Final = (UPDATES_LOST, GRADIENT_ABSORBED, GRADIENT_NONFINITE, GRADIENT_VANISHED)

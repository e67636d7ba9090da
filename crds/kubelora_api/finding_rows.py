"""The two kinds of rows of the table of numerical limits, see ``thresholds.py``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kubelora_api.metrics import Metric


@dataclass(frozen=True)
class Threshold:
    """A limit on a value that every step reports.

    finding: CamelCase name, used in conditions, metrics and alert names.
    quantity: Description of what is compared; empty for the metric's own value.
    op: How the value compares with ``limit`` if something is wrong.
    limits: Limits by compute type, used instead of ``limit``.
    window: Optimizer steps whose median is compared, so that one outlier raises no alarm.
    skip_steps: First optimizer steps to ignore (lora_A has no gradient while lora_B is 0).
    everywhere: Whether it applies to every run; a run is not healthy before it was checked.
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
    quantity: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    everywhere: bool = False

    def limit_for(self, compute: str) -> float:
        """Return the limit for a run with this compute type."""
        return self.limits.get(compute, self.limit)

    @property
    def in_prometheus(self) -> bool:
        """Whether the alert rule compares the metric itself rather than following the watchdog."""
        return self.everywhere


@dataclass(frozen=True)
class Event:
    """A finding outside the per-step limits: at the start, at a resume, against a baseline.

    limit: Limit of the measured value, if there is one.
    """

    finding: str
    severity: Literal["warning", "critical"]
    sentence: str
    reason: str
    quantity: str
    limit: float | None = None

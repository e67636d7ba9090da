"""Which micro-steps make which optimizer step: pure arithmetic over the whole run."""

from dataclasses import dataclass

from kubelora_api.spec import Training


@dataclass(frozen=True)
class WindowPlan:
    """The run as accumulation windows.

    total_steps: optimizer steps. total_micro_steps: micro-steps, the last window may be short.
    """

    accumulation: int
    total_steps: int
    total_micro_steps: int

    def end_of_window(self, step: int) -> int:
        """The micro-step count at which optimizer step ``step`` (from 0) is due."""
        return min((step + 1) * self.accumulation, self.total_micro_steps)

    def begin_of_window(self, step: int) -> int:
        """The micro-step that window ``step`` begins with."""
        return step * self.accumulation


def plan_windows(training: Training, micro_batches_per_epoch: int) -> WindowPlan:
    """Windows for ``training.steps``, or for ``training.epochs`` passes over the data.

    With epochs the last window takes what is left; its gradient is normalised by its own samples.
    """
    accumulation = training.gradient_accumulation
    if training.steps is not None:
        return WindowPlan(accumulation, training.steps, training.steps * accumulation)
    micro_steps = (training.epochs or 1) * micro_batches_per_epoch
    return WindowPlan(accumulation, -(-micro_steps // accumulation), micro_steps)

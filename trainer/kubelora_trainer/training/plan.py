"""The plan of a run: which micro-steps belong to which optimizer step."""

from dataclasses import dataclass

from kubelora_api.training_spec import Training
from kubelora_trainer.data.sampler import SampleOrder


@dataclass(frozen=True)
class TrainingPlan:
    """Number of steps of a run. If the run is defined by epochs, its last window may be shorter."""

    optimizer_steps: int
    micro_steps: int
    accumulation: int

    def window(self, optimizer_step: int) -> range:
        """Return the micro-steps that an optimizer step (from 0) accumulates."""
        start = optimizer_step * self.accumulation
        return range(start, min(start + self.accumulation, self.micro_steps))


def build_plan(training: Training, order: SampleOrder) -> TrainingPlan:
    """Compute the number of steps: as set, or enough for ``epochs`` passes over the samples."""
    accumulation = training.gradient_accumulation
    if training.steps is not None:
        return TrainingPlan(training.steps, training.steps * accumulation, accumulation)
    micro_steps = (training.epochs or 0) * order.micro_steps_per_epoch
    return TrainingPlan(-(-micro_steps // accumulation), micro_steps, accumulation)

"""The plan of a run: which micro-steps belong to which optimizer step."""

from dataclasses import dataclass

from kubelora_api.training_spec import Training
from kubelora_trainer.data.sampler import SampleOrder


@dataclass(frozen=True)
class TrainingPlan:
    """How many steps a run has. The last window of a run by epochs may be shorter."""

    optimizer_steps: int
    micro_steps: int
    accumulation: int

    def window(self, optimizer_step: int) -> range:
        """Micro-steps that an optimizer step (from 0) sums."""
        start = optimizer_step * self.accumulation
        return range(start, min(start + self.accumulation, self.micro_steps))


def build_plan(training: Training, order: SampleOrder) -> TrainingPlan:
    """Steps to run: as told, or as many as ``epochs`` passes over the samples need."""
    accumulation = training.gradient_accumulation
    if training.steps is not None:
        return TrainingPlan(training.steps, training.steps * accumulation, accumulation)
    micro_steps = (training.epochs or 0) * order.micro_steps_per_epoch
    return TrainingPlan(-(-micro_steps // accumulation), micro_steps, accumulation)

"""Learning rate as a pure function of the optimizer step.

No scheduler object, hence no state to save: a resumed run computes the same rates.
"""

import math

from kubelora_api.training_spec import Training


def learning_rate(training: Training, step: int, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Warm-up rises linearly from 0 over ``warmupSteps``; then the rate stays (constant) or follows
    half a cosine towards 0, which it would reach right after the last step.
    """
    schedule = training.schedule
    peak = training.peak_rate
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    remaining = max(1, total_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / remaining)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))


def steps_that_moved(training: Training, step: int) -> int:
    """How many of the first ``step`` optimizer steps had a rate above 0: warm-up begins with 0."""
    return max(0, step - 1) if training.schedule.warmup_steps else step

"""Learning rate as a pure function of the optimizer step.

There is no scheduler object and hence no state to save: a resumed run computes the same rates. The
formulas are those of the schedulers of the same names in diffusers and transformers.
"""

import math

from kubelora_api.training_spec import Schedule, Training


def learning_rate(training: Training, step: int, total_steps: int) -> float:
    """Compute the rate of optimizer step ``step`` (from 0).

    Args:
        training: The job's ``spec.training``.
        step: Optimizer step, from 0.
        total_steps: Number of optimizer steps of the run.
    """
    return training.peak_rate * rate_share(training.schedule, step, total_steps)


def rate_share(schedule: Schedule, step: int, total_steps: int) -> float:
    """Compute the fraction of the peak rate, 0 to 1.

    Warm-up rises linearly from 0 over ``warmupSteps``. Then the rate stays (constant) or decays so
    that it would reach its end right after the last step.

    Args:
        schedule: The job's ``training.schedule``.
        step: Optimizer step, from 0.
        total_steps: Number of optimizer steps of the run.
    """
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    remaining = max(1, total_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / remaining)
    match schedule.name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return _half_cosine(done)
        case "cosine_with_restarts":
            return _half_cosine((schedule.cycles or 1) * done % 1.0) if done < 1.0 else 0.0
        case "polynomial":
            end = schedule.end_factor or 0.0
            return float(end + (1.0 - end) * (1.0 - done) ** (schedule.power or 1.0))


def steps_that_moved(training: Training, step: int, skipped: int = 0) -> int:
    """Count those of the first ``step`` optimizer steps that changed weights, at least.

    Args:
        training: The job's ``spec.training``; warm-up begins with a rate of 0.
        step: Number of optimizer steps done.
        skipped: Number of steps that the loss scaler skipped.
    """
    still = 1 if training.schedule.warmup_steps else 0
    return max(0, step - skipped - still)


def _half_cosine(done: float) -> float:
    """Fall from 1 to 0 while ``done`` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * done))

"""Learning rate as a pure function of the optimizer step.

No scheduler object, hence no state to save: a resumed run computes the same rates. The formulas
are those of diffusers' and transformers' schedulers of the same names.
"""

import math

from kubelora_api.training_spec import Schedule, Training


def learning_rate(training: Training, step: int, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``total_steps``."""
    return training.peak_rate * rate_share(training.schedule, step, total_steps)


def rate_share(schedule: Schedule, step: int, total_steps: int) -> float:
    """Share of the peak rate, 0 to 1.

    Warm-up rises linearly from 0 over ``warmupSteps``; then the rate stays (constant) or falls, so
    that it would reach its end right after the last step.
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
    """How many of the first ``step`` optimizer steps moved something, at least.

    Warm-up begins with a rate of 0. skipped: those that a loss scaler skipped.
    """
    still = 1 if training.schedule.warmup_steps else 0
    return max(0, step - skipped - still)


def _half_cosine(done: float) -> float:
    """From 1 to 0 while ``done`` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * done))

"""Runs whose length is changed after they were started.

On a constant schedule the number of steps does not affect any step: a run of 10 steps extended to
20 is bit-identical to a run of 20. On every other schedule it determines the learning rate of each
step, so the steps already done would belong to a different run.
"""

from dataclasses import dataclass

from kubelora_api.decides import declarations
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_api.training_spec import Schedule
from kubelora_trainer.storage.run_settings import differing_leaves
from kubelora_trainer.utils.errors import OutputError

_LENGTHS = frozenset(
    f"spec.{path}"
    for path, decides in declarations(JobSpec)
    if decides is not None and decides.resume == "length"
)


@dataclass(frozen=True)
class LengthChange:
    """A change of length: the field, its old and its new value."""

    field: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.after}"


def length_change(before: JsonObject, after: JsonObject) -> LengthChange | None:
    """Return the change between a run's deciding settings if only its length changed, else None."""
    found = list(differing_leaves(before, after))
    if len(found) != 1:
        return None
    field, old, new = found[0]
    if field not in _LENGTHS or not isinstance(old, int) or not isinstance(new, int):
        return None  # from steps to epochs, or back: two fields differ
    return LengthChange(field, old, new)


def depends_on_length(schedule: Schedule) -> bool:
    """Return True if a step's learning rate depends on the number of steps; warm-up does not."""
    return schedule.name != "constant"


def fixed_length_reason(schedule: Schedule, output: str) -> str:
    """Explain why a run on this schedule has a fixed length, and what to do. output: its URI."""
    return (
        f"With the schedule {schedule.name} every step's learning rate depends on the number of "
        "steps, so the steps done would belong to a different run. To continue training, create a "
        f"new job with spec.adapter.from: {output.rstrip('/')}/adapter and another "
        "spec.output.uri; only a run with the schedule constant can be extended"
    )


def check_end_not_passed(step: int, total: int) -> None:
    """Check that a run is not already beyond its new end. Raises OutputError."""
    if step > total:
        raise OutputError(
            f"{step} steps of this run are done, so it can't end at {total}: set "
            f"spec.training.steps to {step} or more"
        )

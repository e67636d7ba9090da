"""A run that is to be longer, or shorter, than it was begun with.

On a constant schedule the number of steps decides no step: a run of 10, lengthened to 20, is the
run of 20 to the bit. On every other schedule the rate of each step depends on it, so that the steps
done would belong to another run.
"""

from dataclasses import dataclass

from kubelora_api.decides import declarations
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_api.training_spec import Schedule
from kubelora_trainer.storage.run_settings import leaves_that_differ
from kubelora_trainer.utils.errors import OutputError

_LENGTHS = frozenset(
    f"spec.{path}"
    for path, decides in declarations(JobSpec)
    if decides is not None and decides.resume == "length"
)


@dataclass(frozen=True)
class OtherLength:
    """The field of the length, what it was and what it is to be."""

    field: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.after}"


def other_length(before: JsonObject, after: JsonObject) -> OtherLength | None:
    """What changed between a run's deciding settings, where it is the length alone."""
    found = list(leaves_that_differ(before, after))
    if len(found) != 1:
        return None
    field, old, new = found[0]
    if field not in _LENGTHS or not isinstance(old, int) or not isinstance(new, int):
        return None  # from steps to epochs, or back: two fields differ
    return OtherLength(field, old, new)


def follows_the_length(schedule: Schedule) -> bool:
    """Whether the rate of a step depends on how many steps there are; a warm-up does not."""
    return schedule.name != "constant"


def why_it_stays(schedule: Schedule, output: str) -> str:
    """Why a run on this schedule can't change its length, and what to do. output: its URI."""
    return (
        f"The schedule {schedule.name} gives every step another rate when the number of steps "
        "changes, so the steps done would be another run's. To train on, create a new job with "
        f"spec.adapter.from: {output.rstrip('/')}/adapter and another spec.output.uri; a run on "
        "the schedule constant can be lengthened"
    )


def assert_not_passed(step: int, total: int) -> None:
    """Raise OutputError for a run that is already beyond its new end."""
    if step > total:
        raise OutputError(
            f"{step} steps of this run are done, so it can't end at {total}: set "
            f"spec.training.steps to {step} or more"
        )

"""Times that other clocks have stamped, compared with this operator's. Pure.

A clock that was ahead for a moment must not delay a job until that time has come. So a time in the
future counts as the present, and every delay is bounded by its own length.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from typing import Final, TypeVar

from pydantic import BaseModel

from kubelora_api.schema import metadata_of, model_below
from kubelora_api.status import DATE_TIME, JobStatus
from kubelora_operator.decision.conditions import format_time, parse_time

_Status = TypeVar("_Status", bound=BaseModel)
MAX_SKEW: Final = timedelta(minutes=1)
"""Clocks that are kept by NTP differ by less; more is a clock that was wrong."""
_IN_THE_FUTURE: Final = frozenset({"estimated_completion_time"})
"""The only times of a status that are meant to be in the future."""


def elapsed_since(moment: datetime, now: datetime) -> timedelta:
    """Return the time since ``moment``; the longest possible if its clock was ahead."""
    return timedelta.max if moment - now > MAX_SKEW else now - moment


def largest_lead(status: JobStatus, now: datetime) -> timedelta:
    """Return how far the status's times are ahead of ``now``; zero within a minute."""
    latest = max((parse_time(text) for text in _times(status)), default=now)
    return latest - now if latest - now > MAX_SKEW else timedelta()


def without_future_times(model: _Status, now: datetime) -> _Status:
    """Return the status, or a part of it, with each time in the future set to ``now``."""
    times, below = _fields(type(model))
    changed: dict[str, object] = {
        name: format_time(now)
        for name in times
        if (text := getattr(model, name)) and parse_time(text) - now > MAX_SKEW
    }
    for name in below:
        value = getattr(model, name)
        if isinstance(value, list):
            changed[name] = [without_future_times(item, now) for item in value]
        elif value is not None:
            changed[name] = without_future_times(value, now)
    return model.model_copy(update=changed)


def _times(model: BaseModel) -> Iterator[str]:
    times, below = _fields(type(model))
    yield from (text for name in times if (text := getattr(model, name)))
    for name in below:
        value = getattr(model, name)
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield from _times(item)


@cache
def _fields(model: type[BaseModel]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a model's fields that are times, and those that hold other models."""
    fields = model.model_fields.items()
    times = (n for n, i in fields if DATE_TIME in metadata_of(i) and n not in _IN_THE_FUTURE)
    return tuple(times), tuple(n for n, i in fields if model_below(i.annotation))

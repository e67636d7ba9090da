"""A limit on how often the same attempt is created.

A policy that rewrites or removes what was created makes each look create it again, and each create
causes events that lead to the next look. So creates of one attempt wait, whatever the events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kubelora_operator.decision.snapshot import JobKey

FIRST_WAIT: Final = 1.0
"""Seconds: long enough for the watch to show what became of the first create."""
LONGEST_WAIT: Final = 300.0
"""Seconds, like the longest wait after a refusal: only a person can end either loop."""


@dataclass(frozen=True)
class Creation:
    """What was created: an attempt of a job, from one generation of its spec."""

    uid: str
    attempt: int
    generation: int


@dataclass(frozen=True)
class _Last:
    creation: Creation
    count: int
    allowed_at: float


class CreatePacer:
    """The last create of each job. A changed spec or another attempt waits for nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[JobKey, _Last] = {}

    def wait(self, key: JobKey, creation: Creation) -> float:
        """Return the seconds until this may be created; 0 if it may be now."""
        last = self._last.get(key)
        if last is None or last.creation != creation:
            return 0.0
        return max(last.allowed_at - self._clock(), 0.0)

    def record(self, key: JobKey, creation: Creation) -> None:
        """Record a create; the wait before the next of the same doubles."""
        last = self._last.get(key)
        count = last.count + 1 if last and last.creation == creation else 0
        wait = min(FIRST_WAIT * 2 ** min(count, 32), LONGEST_WAIT)
        self._last[key] = _Last(creation, count, self._clock() + wait)

    def forget(self, key: JobKey) -> None:
        """Forget a job that is gone."""
        self._last.pop(key, None)

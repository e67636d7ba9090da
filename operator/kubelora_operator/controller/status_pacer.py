"""A limit on how often the status of a job is written for its progress alone.

A change of state, a condition, an attempt or a finding is written at once. What changes with every
report of a pod (steps, loss, running time, a condition's wording) is written at an interval, which
grows with the number of jobs that report.
"""

from collections.abc import Callable
from typing import Final

from kubelora_api.status import HealthStatus, JobStatus
from kubelora_operator.decision.snapshot import JobKey

WRITES_PER_SECOND: Final = 20.0
"""Writes of progress of all jobs: with 1,000 running jobs, each is written every 50 s."""
_PACED: Final = ("progress", "checkpoint", "child_uid", "active_seconds", "counted_run")
"""Fields of the status that a write of another field carries along."""


class StatusPacer:
    """The last write of each job's status. ``seconds`` is the interval for a few jobs."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._written: dict[JobKey, float] = {}

    @property
    def interval(self) -> float:
        """Seconds between two writes of a job's progress."""
        return max(self._seconds, len(self._written) / WRITES_PER_SECOND)

    def wait(self, key: JobKey, old: JobStatus, new: JobStatus) -> float:
        """Return the seconds for which the change of a status can wait; 0 to write it now.

        Args:
            key: The job.
            old: Its status as stored.
            new: Its status as decided.
        """
        if old == new or urgent_part(old) != urgent_part(new):
            return 0.0
        now = self._clock()
        return max(self._written.setdefault(key, now) + self.interval - now, 0.0)

    def record(self, key: JobKey) -> None:
        """Record a write of the job's status."""
        self._written[key] = self._clock()

    def forget(self, key: JobKey) -> None:
        """Forget a job that reports nothing more."""
        self._written.pop(key, None)


def urgent_part(status: JobStatus) -> object:
    """Return the part of the status whose change is written at once."""
    rest = {
        name: getattr(status, name)
        for name in JobStatus.model_fields
        if name not in (*_PACED, "conditions", "health")
    }
    conditions = [
        (c.type, c.status, c.reason, c.observed_generation, c.last_transition_time)
        for c in status.conditions
    ]
    return rest, conditions, _verdict(status.health)


def _verdict(health: HealthStatus | None) -> object:
    return health and (health.verdict, [(f.name, f.severity, f.group) for f in health.findings])

"""The operator's metrics, in a registry that is passed in.

Names, help texts and labels come from the contract, so rules and dashboards can't diverge.
"""

from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.status import JobStatus
from kubelora_operator.decision.snapshot import JobKey

_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Seconds: from a look that writes nothing to one that waits for a slow API server."""


@dataclass(frozen=True)
class _JobSeries:
    """The series of a job, remembered so that they can be removed."""

    state: str
    has_step: bool
    failure: str | None


class OperatorMetrics:
    """Metrics of the operator's work, and the last known values of each job."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(metric: Metric) -> Gauge:
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)

        def counter(metric: Metric) -> Counter:
            return Counter(metric.name, metric.help, metric.labels, registry=registry)

        duration = metrics.OPERATOR_RECONCILE_DURATION
        self.registry = registry
        self.reconciles = counter(metrics.OPERATOR_RECONCILES)
        self.duration = Histogram(duration.name, duration.help, registry=registry, buckets=_BUCKETS)
        self.queue_depth = gauge(metrics.OPERATOR_QUEUE_DEPTH)
        self.is_leader = gauge(metrics.OPERATOR_IS_LEADER)
        self._api_errors = counter(metrics.OPERATOR_API_ERRORS)
        self._jobs = gauge(metrics.JOBS)
        self._step = gauge(metrics.JOB_STEP)
        self._failed = gauge(metrics.JOB_FAILED)
        self._series: dict[JobKey, _JobSeries] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def api_error(self, code: int) -> None:
        """Count a failed request to the API server; code 0 means no response."""
        self._api_errors.labels(code=str(code)).inc()

    def set_job(self, key: JobKey, status: JobStatus) -> None:
        """Set the series of a job from its status."""
        failure = next(
            (c.reason for c in status.conditions if c.type == "Failed" and c.status == "True"), None
        )
        step = status.progress.step if status.progress else None
        fresh = _JobSeries(status.state or "Unknown", step is not None, failure)
        old = self._series.get(key)
        if old != fresh:
            self.remove_job(key)
            self._series[key] = fresh
            self._count(key[0], fresh.state, +1)
        if step is not None:
            self._step.labels(*key).set(step)
        if failure:
            self._failed.labels(*key, failure).set(1)

    def remove_job(self, key: JobKey) -> None:
        """Remove the series of a deleted job."""
        old = self._series.pop(key, None)
        if old is None:
            return
        self._count(key[0], old.state, -1)
        if old.has_step:
            self._step.remove(*key)
        if old.failure:
            self._failed.remove(*key, old.failure)

    def _count(self, namespace: str, state: str, change: int) -> None:
        key = (namespace, state)
        number = self._counts.get(key, 0) + change
        if number > 0:
            self._counts[key] = number
            self._jobs.labels(*key).set(number)
        elif self._counts.pop(key, None):
            self._jobs.remove(*key)

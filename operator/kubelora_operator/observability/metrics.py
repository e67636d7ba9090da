"""The operator's metrics, in a registry that is passed in.

Names, help texts and labels come from the contract, so rules and dashboards can't diverge.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.observability.job_series import JobSeries, job_samples

_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Seconds: from a look that writes nothing to one that waits for a slow API server."""


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
        self.watch_lag = gauge(metrics.OPERATOR_WATCH_LAG)
        self._jobs = JobSeries()
        registry.register(self._jobs)

    def api_error(self, code: int) -> None:
        """Count a failed request to the API server; code 0 means no response."""
        self._api_errors.labels(code=str(code)).inc()

    def set_job(
        self,
        key: JobKey,
        status: JobStatus,
        spec: JobSpec | None = None,
        annotation: str | None = None,
    ) -> None:
        """Set the series of a job from its object.

        Args:
            key: Namespace and name of the job.
            status: Its status.
            spec: Its spec; None if it is invalid.
            annotation: Its annotation `kubelora.dev/acknowledged`.
        """
        self._jobs.set(key, status.state or "Unknown", job_samples(status, spec, annotation))

    def remove_job(self, key: JobKey) -> None:
        """Remove the series of a deleted job."""
        self._jobs.remove(key)

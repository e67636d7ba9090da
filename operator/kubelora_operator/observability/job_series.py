"""The series of each job, derived from its object alone.

A trainer's own metrics end with its pod, and a finding may be what ends the pod. These series are
read from ``.status`` and so live as long as the object, also over a restart of the operator.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.spec import JobSpec
from kubelora_api.status import Condition, Finding, JobStatus
from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    parse_time,
)
from kubelora_operator.decision.snapshot import JobKey

_STATE_CONDITIONS: Final = (COMPLETE, FAILED, SUSPENDED, RESTARTING, QUEUED, RUNNING)
"""Conditions with a state of their name; of any other state, Running=False names the reason."""
_ACKNOWLEDGED: Final = re.compile(r"(?:Kubelora)?([A-Z][A-Za-z]{1,63})(?:@([0-9]{1,9}))?")
_MOST_ACKNOWLEDGED: Final = 64
"""A user writes the annotation, and each name in it is a series; there are fewer alerts."""


@dataclass(frozen=True)
class JobSample:
    """One series: its metric, the labels after namespace and name, and its value."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class JobSeries(Collector):
    """A collector of all jobs' series."""

    def __init__(self) -> None:
        self._samples: dict[JobKey, tuple[JobSample, ...]] = {}
        self._states: dict[JobKey, str] = {}

    def set(self, key: JobKey, state: str, samples: Iterable[JobSample]) -> None:
        """Replace the series of a job.

        Args:
            key: Namespace and name of the job.
            state: Its state, for the count of jobs.
            samples: Its series.
        """
        self._states[key] = state
        self._samples[key] = tuple(samples)

    def remove(self, key: JobKey) -> None:
        """Remove the series of a deleted job."""
        self._states.pop(key, None)
        self._samples.pop(key, None)

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the families without their series."""
        return list(_families().values())

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the families with the series of all jobs."""
        families = _families()
        counts: dict[tuple[str, str], int] = {}
        for (namespace, name), samples in self._samples.items():
            of_state = (namespace, self._states[namespace, name])
            counts[of_state] = counts.get(of_state, 0) + 1
            for sample in samples:
                labels = (namespace, name, *sample.labels)
                families[sample.metric.name].add_metric(labels, sample.value)
        for of_state, number in counts.items():
            families[metrics.JOBS.name].add_metric(of_state, number)
        return list(families.values())


def job_samples(
    status: JobStatus, spec: JobSpec | None, annotation: str | None
) -> Iterator[JobSample]:
    """Derive the series of a job.

    Args:
        status: Its status.
        spec: Its spec; None if it is invalid.
        annotation: Its annotation `kubelora.dev/acknowledged`.
    """
    condition = _state_condition(status)
    state, reason = status.state or "Unknown", condition.reason if condition else ""
    yield JobSample(metrics.JOB_STATE, (state, reason), 1)
    if condition:
        since = parse_time(condition.last_transition_time).timestamp()
        yield JobSample(metrics.JOB_STATE_SINCE, (), since)
    if spec:
        yield from _spec_samples(spec)
    yield from _progress_samples(status)
    if status.health:
        yield JobSample(metrics.JOB_VERDICT, (status.health.verdict,), 1)
        for finding in {f.name: f for f in reversed(status.health.findings)}.values():
            yield from _finding_samples(finding, status.attempt)
    for alert in acknowledged(annotation, status.attempt):
        yield JobSample(metrics.JOB_ACKNOWLEDGED, (alert,), 1)


def acknowledged(annotation: str | None, attempt: int) -> list[str]:
    """Return the names of the alerts that the annotation acknowledges for this attempt.

    ``UpdatesLost@2`` acknowledges what attempt 2 found, so that the same finding of a later attempt
    alerts again; ``UpdatesLost`` acknowledges it for good.

    Args:
        annotation: Names separated by commas, with or without the prefix ``Kubelora``.
        attempt: Number of the current attempt.
    """
    entries = (_ACKNOWLEDGED.fullmatch(entry.strip()) for entry in (annotation or "").split(","))
    found = {f"Kubelora{e[1]}" for e in entries if e and (e[2] is None or int(e[2]) == attempt)}
    return sorted(found)[:_MOST_ACKNOWLEDGED]


def _state_condition(status: JobStatus) -> Condition | None:
    conditions: Mapping[str, Condition] = {c.type: c for c in status.conditions}
    if status.state in _STATE_CONDITIONS:
        return conditions.get(status.state)
    if status.state == "Invalid":
        return conditions.get(ACCEPTED)
    return conditions.get(RUNNING) or conditions.get(ACCEPTED)


def _spec_samples(spec: JobSpec) -> Iterator[JobSample]:
    precision = spec.precision
    dtypes = (precision.compute, precision.accumulator, precision.master_weights)
    yield JobSample(metrics.JOB_INFO, (*dtypes, spec.health.policy), 1)
    yield JobSample(metrics.JOB_GPUS, (), spec.workers.nodes * spec.workers.gpus_per_node)
    yield JobSample(metrics.JOB_CHECKPOINT_INTERVAL, (), spec.checkpoint.every_steps)


def _goodput(status: JobStatus) -> float | None:
    useful = status.progress.useful_seconds if status.progress else None
    if useful is None or not status.active_seconds:
        return None
    return min(useful / status.active_seconds, 1.0)


def _progress_samples(status: JobStatus) -> Iterator[JobSample]:
    yield JobSample(metrics.JOB_ATTEMPT, (), status.attempt)
    yield JobSample(metrics.JOB_RESTARTS, (), status.restarts)
    progress = status.progress
    values = {
        metrics.JOB_ACTIVE_SECONDS: status.active_seconds,
        metrics.JOB_GOODPUT: _goodput(status),
        metrics.JOB_CHECKPOINT_STEP: status.checkpoint.step if status.checkpoint else None,
        metrics.JOB_STEP: progress.step if progress else None,
        metrics.JOB_STEPS_PLANNED: progress.total_steps if progress else None,
        metrics.JOB_LOSS: progress.loss if progress else None,
        metrics.JOB_SAMPLES_PER_SECOND: progress.samples_per_second if progress else None,
        metrics.JOB_REPORT_TIME: parse_time(progress.last_report_time).timestamp()
        if progress and progress.last_report_time
        else None,
    }
    yield from (
        JobSample(metric, (), value) for metric, value in values.items() if value is not None
    )


def _finding_samples(finding: Finding, attempt: int) -> Iterator[JobSample]:
    labels = (finding.name, finding.severity, finding.group or "", str(attempt))
    value = math.nan if finding.value is None else finding.value
    yield JobSample(metrics.JOB_FINDING, labels, value)
    if finding.threshold is not None:
        yield JobSample(metrics.JOB_FINDING_LIMIT, (finding.name,), finding.threshold)
    if finding.since_step is not None:
        yield JobSample(metrics.JOB_FINDING_SINCE, (finding.name,), finding.since_step)


def _families() -> dict[str, GaugeMetricFamily]:
    return {
        m.name: GaugeMetricFamily(m.name, m.help, labels=m.labels)
        for m in (metrics.JOBS, *metrics.JOB_METRICS)
    }

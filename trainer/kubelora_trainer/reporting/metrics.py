"""Prometheus metric families of a run."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.thresholds import FINDINGS
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.precision import DTYPE_NAMES, PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import (
    GROUP_FIELDS,
    STEP_FIELDS,
    GroupNumbers,
    StepNumbers,
)

_METRICS: Final = {metric.name: metric for metric in metrics.TRAINER_METRICS}


class TrainerMetrics(Collector):
    """The metric families of ``kubelora_api.metrics.TRAINER_METRICS`` in one registry.

    Steps are frequent and scrapes are rare, so gauges are set only when the registry is read: this
    collector is registered before all families and updates them.
    """

    def __init__(self, registry: CollectorRegistry, plan: PrecisionPlan) -> None:
        self.registry = registry
        self._newest: _Step | None = None
        self.data_wait: Callable[[], float] = lambda: 0.0
        """Returns the seconds spent waiting for images so far; read at each scrape."""
        self._waited = 0.0
        self._showing = threading.Lock()
        registry.register(self)  # first, so that collect() runs before the families are read
        self._plan = plan
        self._gauges: dict[str, Gauge] = {}
        self._series: dict[tuple[str, ...], Gauge] = {}
        self._counters: dict[str, Counter] = {}
        for metric in metrics.TRAINER_METRICS:
            if metric.type == "counter":
                self._counters[metric.name] = Counter(
                    metric.name.removesuffix("_total"),
                    metric.help,
                    metric.labels,
                    registry=registry,
                )
            else:
                self._gauges[metric.name] = Gauge(
                    metric.name, metric.help, metric.labels, registry=registry
                )
        self._set(
            metrics.NUMERICS_INFO,
            1,
            compute=DTYPE_NAMES[plan.compute],
            accumulator=DTYPE_NAMES[plan.accumulator],
            master_weights=DTYPE_NAMES[plan.masters],
        )

    def plan_steps(self, step: int, total: int) -> None:
        """Set the current step and the planned number of steps."""
        self._set(metrics.STEP, step)
        self._set(metrics.STEPS_PLANNED, total)

    def publish(self, numbers: StepNumbers, watch: WatchState, seconds: float) -> None:
        """Publish one optimizer step.

        Args:
            numbers: The step's measurements.
            watch: State of the watchdog.
            seconds: Wall time of the step.
        """
        if numbers.skipped:
            self._counters[metrics.STEPS_SKIPPED.name].inc()
        self._counters[metrics.SAMPLES.name].inc(numbers.samples)
        groups = {} if numbers.skipped else numbers.groups  # a skipped step has no measurements
        for group, of_group in groups.items():
            if of_group.grad_nonfinite:
                self._nonfinite(group).inc(of_group.grad_nonfinite)
        if not math.isnan(numbers.adapter_size):  # measured every few steps
            self._set(metrics.ADAPTER_SIZE, numbers.adapter_size)
        # Set at once: the next step may have other categories.
        for category, of_category in numbers.category_losses.items():
            self._set(metrics.CATEGORY_LOSS, of_category.loss, category=category)
        with self._showing:
            before = self._newest
            shown = before.groups if before and numbers.skipped else groups
            self._newest = _Step(numbers, shown, watch, seconds)

    def describe(self) -> list[Family]:
        """Return nothing: the families describe themselves."""
        return []

    def collect(self) -> list[Family]:
        """Update the families before they are collected."""
        with self._showing:
            waited, before = self.data_wait(), self._waited
            self._counters[metrics.DATA_WAIT.name].inc(waited - before)
            self._waited = waited
            newest, self._newest = self._newest, None
            if newest is not None:
                self._show(newest)
        return []

    def _show(self, newest: "_Step") -> None:
        for group, of_group in newest.groups.items():
            self._nonfinite(group)  # create the series, so that it starts at 0
            for metric, value in _shown(of_group, GROUP_FIELDS):
                if metric.type == "counter":
                    continue
                if "dtype" in metric.labels:
                    dtype = DTYPE_NAMES[self._plan.narrowest_in(group)]
                    self._set(metric, value, group=group, dtype=dtype)
                else:
                    self._set(metric, value, group=group)
        for metric, value in _shown(newest.numbers, STEP_FIELDS):
            self._set(metric, value)
        self._set(metrics.STEP_DURATION, newest.seconds)
        for known in FINDINGS:
            self._set(
                metrics.HEALTH_FINDING,
                float(known.finding in newest.watch.active),
                finding=known.finding,
                severity=known.severity,
            )

    def checkpointed(self, step: int, unix_time: float) -> None:
        """Publish the newest checkpoint."""
        self._set(metrics.CHECKPOINT_STEP, step)
        self._set(metrics.CHECKPOINT_TIME, unix_time)

    def tracker_failed(self) -> None:
        """Count an experiment tracker that has been disabled."""
        self._gauges[metrics.TRACKERS_FAILED.name].inc()

    def _nonfinite(self, group: str) -> Counter:
        return self._counters[metrics.GRAD_NONFINITE.name].labels(group=group)

    def _set(self, metric: Metric, value: float, **labels: str) -> None:
        series = (metric.name, *labels.values())
        if series not in self._series:
            gauge = self._gauges[metric.name]
            self._series[series] = gauge.labels(**labels) if labels else gauge
        self._series[series].set(value)


@dataclass(frozen=True)
class _Step:
    """Values that the gauges do not show yet. groups: of the newest step that was not skipped."""

    numbers: StepNumbers
    groups: Mapping[str, GroupNumbers]
    watch: WatchState
    seconds: float


def _shown(
    numbers: GroupNumbers | StepNumbers, fields: Mapping[str, str]
) -> Iterator[tuple[Metric, float]]:
    for name, field in fields.items():
        yield _METRICS[name], getattr(numbers, field)

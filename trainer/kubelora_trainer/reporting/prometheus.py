"""The pod's window on itself: ``/metrics``, ``/status`` and ``/healthz`` on one port.

Served by daemon threads that only read what training published last (an immutable report, gauges
of a registry of our own), so a slow or hostile reader can't disturb a step.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.report import ModuleNumbers, RunReport
from kubelora_api.thresholds import FINDINGS
from kubelora_trainer.health.watchdog import WatchState
from kubelora_trainer.optim.precision import NAMES, PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import (
    GROUP_FIELDS,
    STEP_FIELDS,
    GroupNumbers,
    StepNumbers,
)

PROMETHEUS_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
LAST_SCRAPE_MAX_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 10.0


_METRICS: Final = {metric.name: metric for metric in metrics.TRAINER_METRICS}


class TrainerMetrics(Collector):
    """The metric families of ``kubelora_api.metrics.TRAINER_METRICS`` in one registry.

    Steps are many and scrapes few, so gauges are set when the registry is read: this object stands
    in it before all families, and brings them up to date.
    """

    def __init__(self, registry: CollectorRegistry, plan: PrecisionPlan) -> None:
        self.registry = registry
        self._newest: _Step | None = None
        self._showing = threading.Lock()
        registry.register(self)
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
            compute=NAMES[plan.compute],
            accumulator=NAMES[plan.accumulator],
            master_weights=NAMES[plan.masters],
        )

    def plan_steps(self, step: int, total: int) -> None:
        """Tell how far the run is at its start and how far it will go."""
        self._set(metrics.STEP, step)
        self._set(metrics.STEPS_PLANNED, total)

    def publish(self, numbers: StepNumbers, watch: WatchState, seconds: float) -> None:
        """Show one optimizer step. seconds: its wall time."""
        if numbers.skipped:
            self._counters[metrics.STEPS_SKIPPED.name].inc()
        groups = {} if numbers.skipped else numbers.groups  # of a step that never was
        for group, of_group in groups.items():
            if of_group.grad_nonfinite:
                self._nonfinite(group).inc(of_group.grad_nonfinite)
        for category, of_category in numbers.category_losses.items():  # others in every step
            self._set(metrics.CATEGORY_LOSS, of_category.loss, category=category)
        with self._showing:
            before = self._newest
            shown = before.groups if before and numbers.skipped else groups
            self._newest = _Step(numbers, shown, watch, seconds)

    def describe(self) -> list[Family]:
        """Nothing: the families describe themselves."""
        return []

    def collect(self) -> list[Family]:
        """Bring the families up to date, before they are collected."""
        with self._showing:
            newest, self._newest = self._newest, None
            if newest is not None:
                self._show(newest)
        return []

    def _show(self, newest: "_Step") -> None:
        for group, of_group in newest.groups.items():
            self._nonfinite(group)  # a counter begins at 0
            for metric, value in _shown(of_group, GROUP_FIELDS):
                if metric.type == "counter":
                    continue
                if "dtype" in metric.labels:
                    dtype = NAMES[self._plan.narrowest_in(group)]
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
        """Show the newest checkpoint."""
        self._set(metrics.CHECKPOINT_STEP, step)
        self._set(metrics.CHECKPOINT_TIME, unix_time)

    def tracker_failed(self) -> None:
        """Count one experiment tracker that is left out from here on."""
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
    """What gauges are still to show. groups: of the newest step that was not skipped."""

    numbers: StepNumbers
    groups: Mapping[str, GroupNumbers]
    watch: WatchState
    seconds: float


def _shown(
    numbers: GroupNumbers | StepNumbers, fields: Mapping[str, str]
) -> Iterator[tuple[Metric, float]]:
    for name, field in fields.items():
        yield _METRICS[name], getattr(numbers, field)


@dataclass(frozen=True)
class _Answer:
    status: int
    content_type: str
    body: bytes


@dataclass
class Board:
    """What ``/status`` tells, where another rank of the node serves it.

    worst_modules: found when it is asked for, for that is seldom and a step is often.
    """

    report: RunReport
    worst_modules: Callable[[], list[ModuleNumbers]] = list


class Exporter:
    """The HTTP server.

    report: what ``/status`` tells; assign a new one at any time. worst_modules: as in ``Board``.
    scrapes_seen: completed scrapes.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        report: RunReport,
        port: int,
        *,
        any_port: bool,
        everywhere: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to serve on ``port`` (0: a free one).

        any_port: take a free port where ``port`` is taken. Raises OSError otherwise.
        everywhere: listen on every address (a pod), not on this machine's own alone.
        """
        self.report = report
        self.worst_modules: Callable[[], list[ModuleNumbers]] = list
        self._registry = registry
        self._clock = clock
        self._scrapes: list[float] = []
        self.scrapes_seen = 0
        self._scraped = threading.Condition()
        handler = _handler_for(self)
        try:
            self._server = _serve(everywhere, port, handler)
        except OSError as error:
            if not any_port or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            self._server = _serve(everywhere, 0, handler)
        threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},  # how fast close() is
            name="exporter",
            daemon=True,
        ).start()

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._server.server_address[1])

    def answer(self, path: str) -> _Answer:
        """The response to ``GET path``."""
        match path.partition("?")[0]:
            case "/metrics":
                return _Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
            case "/status":
                told = self.report.model_copy(update={"worst_modules": self.worst_modules()})
                body = told.model_dump_json(by_alias=True, exclude_none=True).encode()
                return _Answer(200, "application/json", body)
            case "/healthz":
                return _Answer(200, "text/plain; charset=utf-8", b"ok\n")
            case _:
                text = b"not found; this port serves /metrics, /status and /healthz\n"
                return _Answer(404, "text/plain; charset=utf-8", text)

    def note_scrape(self, path: str, headers: Mapping[str, str]) -> None:
        """Remember a completed scrape by Prometheus (told by its timeout header)."""
        if path.partition("?")[0] == "/metrics" and PROMETHEUS_HEADER in headers:
            with self._scraped:
                self._scrapes = [*self._scrapes, self._clock()][-8:]
                self.scrapes_seen += 1
                self._scraped.notify_all()

    def last_scrape_budget(self) -> float:
        """Seconds worth waiting for one more scrape; 0 for a run that nobody scraped."""
        scrapes = self._scrapes
        if not scrapes:
            return 0.0
        if len(scrapes) < 2:
            return LAST_SCRAPE_MAX_SECONDS
        interval = max(b - a for a, b in pairwise(scrapes))
        return min(2 * interval, LAST_SCRAPE_MAX_SECONDS)

    def wait_for_scrape(self, stop: Callable[[], bool]) -> bool:
        """Wait until the last numbers have been scraped once; whether they were.

        stop: polled; true ends the wait (after SIGTERM nobody is to be kept waiting).
        """
        with self._scraped:
            deadline = self._clock() + self.last_scrape_budget()
            seen = self.scrapes_seen
            while not stop():
                if self.scrapes_seen > seen:
                    return True
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._scraped.wait(min(left, 0.5))
        return False

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _serve(everywhere: bool, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    if not everywhere:
        return _Server(("127.0.0.1", port), handler)
    if socket.has_dualstack_ipv6():
        try:
            return _DualStackServer(("::", port), handler)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return _Server(("0.0.0.0", port), handler)


def _handler_for(exporter: Exporter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_SECONDS

        def do_GET(self) -> None:
            answer = exporter.answer(self.path)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)
            exporter.note_scrape(self.path, dict(self.headers.items()))

        def log_message(self, format: str, *args: object) -> None:
            """Silence: a scrape every few seconds is no news."""

    return Handler

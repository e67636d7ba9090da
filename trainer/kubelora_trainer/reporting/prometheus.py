"""HTTP server for ``/metrics``, ``/status`` and ``/healthz``, on one port.

Daemon threads serve only what training published last (an immutable report, and gauges in a
registry of our own), so a slow or hostile client cannot delay a step.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kubelora_api.report import ModuleNumbers, RunReport

PROMETHEUS_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
LAST_SCRAPE_MAX_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class _Answer:
    status: int
    content_type: str
    body: bytes


@dataclass
class Board:
    """Data of ``/status`` where another rank of the node serves it.

    worst_modules: computed on request, because requests are rare and steps are frequent.
    """

    report: RunReport
    worst_modules: Callable[[], list[ModuleNumbers]] = list


class Exporter:
    """The HTTP server.

    Attributes:
        report: Content of ``/status``; assign a new one at any time.
        worst_modules: See `Board`.
        scrapes_seen: Number of completed scrapes.
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
        """Start serving.

        Args:
            registry: Registry of ``/metrics``.
            report: First content of ``/status``.
            port: Port; 0 chooses a free one.
            any_port: Choose a free port if ``port`` is taken.
            everywhere: Listen on every address (in a pod), not only on loopback.
            clock: Monotonic clock in seconds.

        Raises:
            OSError: The port cannot be opened.
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
            kwargs={"poll_interval": 0.05},  # bounds the time that close() takes
            name="exporter",
            daemon=True,
        ).start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def answer(self, path: str) -> _Answer:
        """Build the response to ``GET path``."""
        match path.partition("?")[0]:
            case "/metrics":
                return _Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
            case "/status":
                report = self.report.model_copy(update={"worst_modules": self.worst_modules()})
                body = report.model_dump_json(by_alias=True, exclude_none=True).encode()
                return _Answer(200, "application/json", body)
            case "/healthz":
                return _Answer(200, "text/plain; charset=utf-8", b"ok\n")
            case _:
                text = b"not found; this port serves /metrics, /status and /healthz\n"
                return _Answer(404, "text/plain; charset=utf-8", text)

    def note_scrape(self, path: str, headers: Mapping[str, str]) -> None:
        """Record a completed scrape by Prometheus, which its timeout header identifies."""
        if path.partition("?")[0] == "/metrics" and PROMETHEUS_HEADER in headers:
            with self._scraped:
                self._scrapes = [*self._scrapes, self._clock()][-8:]
                self.scrapes_seen += 1
                self._scraped.notify_all()

    def last_scrape_budget(self) -> float:
        """Return how many seconds to wait for one more scrape; 0 if the run was never scraped."""
        scrapes = self._scrapes
        if not scrapes:
            return 0.0
        if len(scrapes) < 2:
            return LAST_SCRAPE_MAX_SECONDS
        interval = max(b - a for a, b in pairwise(scrapes))
        return min(2 * interval, LAST_SCRAPE_MAX_SECONDS)

    def wait_for_scrape(self, stop: Callable[[], bool]) -> bool:
        """Wait until the final values have been scraped, and return whether they were.

        stop: polled; True ends the wait, because after SIGTERM the pod must not linger.
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
            """Log nothing: scrapes every few seconds would flood the log."""

    return Handler

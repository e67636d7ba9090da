"""HTTP server for ``/metrics``, ``/status`` and ``/healthz``, on one port.

``/metrics`` is prometheus_client's own WSGI application, which negotiates OpenMetrics and gzip.
Daemon threads serve only what training published last (an immutable report, and gauges in a
registry of our own), so a slow or hostile client cannot delay a step.
"""

import errno
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kubelora_api.report import ModuleNumbers, RunReport

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

PROMETHEUS_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_SCRAPE_KEY = f"HTTP_{PROMETHEUS_HEADER.upper().replace('-', '_')}"
LAST_SCRAPE_MAX_SECONDS = 60.0
"""Prometheus's default scrape interval, used until two scrapes show the real one."""
REQUEST_TIMEOUT_SECONDS = 10.0
"""Prometheus's default scrape timeout: nobody waits longer for the answer."""


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
        self._clock = clock
        self._scrapes: list[float] = []
        self.scrapes_seen = 0
        self._scraped = threading.Condition()
        routes: dict[str, WSGIApplication] = {
            "/metrics": make_wsgi_app(registry),
            "/status": self._status,
            "/healthz": _healthy,
        }
        try:
            self._server = _serve(everywhere, port)
        except OSError as error:
            if not any_port or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            self._server = _serve(everywhere, 0)
        self._server.set_app(_application(routes, self._note_scrape))
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

    def _status(self, _: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
        report = self.report.model_copy(update={"worst_modules": self.worst_modules()})
        start_response("200 OK", [("Content-Type", "application/json")])
        return [report.model_dump_json(by_alias=True, exclude_none=True).encode()]

    def _note_scrape(self, environ: "WSGIEnvironment") -> None:
        """Record a completed scrape by Prometheus, which its timeout header identifies."""
        if environ["PATH_INFO"] == "/metrics" and _SCRAPE_KEY in environ:
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


def _application(
    routes: "dict[str, WSGIApplication]", sent: "Callable[[WSGIEnvironment], None]"
) -> "WSGIApplication":
    """Combine the routes, and answer HEAD as GET without the body.

    Args:
        routes: Application of each path.
        sent: Called after the response to a GET was sent completely.
    """

    def application(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        route = routes.get(environ["PATH_INFO"], _not_found)
        if method not in ("GET", "HEAD"):
            route = _method_not_allowed
        response: list[Any] = []

        def hold(status: str, headers: list[tuple[str, str]], *_: object) -> Any:
            response[:] = status, headers

        try:
            asked = environ | {"REQUEST_METHOD": "GET"} if method == "HEAD" else environ
            body = b"".join(route(asked, hold))
        except Exception:
            logger.exception("%s could not be answered", environ["PATH_INFO"])
            body = b"internal error; see the log\n"
            hold("500 Internal Server Error", [_PLAIN_TEXT])
        status, headers = response
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return send(body, environ) if method == "GET" else [b"" if method == "HEAD" else body]

    def send(body: bytes, environ: "WSGIEnvironment") -> Iterator[bytes]:
        yield body
        sent(environ)  # reached only after the body was written

    return application


_PLAIN_TEXT = ("Content-Type", "text/plain; charset=utf-8")


def _healthy(_: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
    start_response("200 OK", [_PLAIN_TEXT])
    return [b"ok\n"]


def _not_found(_: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
    start_response("404 Not Found", [_PLAIN_TEXT])
    return [b"not found; this port serves /metrics, /status and /healthz\n"]


def _method_not_allowed(_: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
    start_response("405 Method Not Allowed", [_PLAIN_TEXT, ("Allow", "GET, HEAD")])
    return [b"method not allowed; use GET or HEAD\n"]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes every few seconds would flood the log."""

    def get_stderr(self) -> Any:
        """Drop tracebacks of broken connections; the application logs its own errors."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that send nothing or leave early."""


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _serve(everywhere: bool, port: int) -> _Server:
    if not everywhere:
        return _Server(("127.0.0.1", port), _Handler)
    if socket.has_dualstack_ipv6():
        try:
            return _DualStackServer(("::", port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return _Server(("0.0.0.0", port), _Handler)

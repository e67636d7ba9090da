"""A receiver for Alertmanager's webhooks that remembers every alert it was sent."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .probes import wait_until


@dataclass(frozen=True)
class Alert:
    """One alert of one notification."""

    status: str
    """`firing` or `resolved`."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")


@dataclass
class Receiver:
    """What has arrived so far, oldest first."""

    url: str
    alerts: list[Alert] = field(default_factory=list)

    def named(self, name: str, /, **labels: str) -> list[Alert]:
        """Alerts with this name and these labels that were reported as firing."""
        return [
            alert
            for alert in list(self.alerts)
            if alert.name == name
            and alert.status == "firing"
            and labels.items() <= alert.labels.items()
        ]

    def wait_for(self, name: str, seconds: float, /, **labels: str) -> Alert:
        """The first firing alert with this name and labels; raises TimeoutError with what came."""
        if not wait_until(lambda: bool(self.named(name, **labels)), seconds, pause=0.2):
            seen = sorted({alert.name for alert in self.alerts}) or "none"
            raise TimeoutError(
                f"No alert {name} {labels} reached the webhook in {seconds:g} s; arrived: {seen}."
            )
        return self.named(name, **labels)[0]


@contextlib.contextmanager
def receive_alerts() -> Iterator[Receiver]:
    """Listen on a free port of the loopback for as long as the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.alerts.extend(
                Alert(entry["status"], entry["labels"], entry["annotations"])
                for entry in body["alerts"]
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not worth a line of a test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(url=f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

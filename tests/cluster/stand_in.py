"""A stand-in for `kubelora train` in pods that are about the operator and not about training.

It keeps the pod's side of the contract (report, final report, exit codes, SIGTERM) and takes orders
from the variable STAND_IN: a number of seconds to "train", or ``exit N``.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

job = json.loads(Path("/kubelora/job/job.json").read_text())
ATTEMPT = int(os.environ["KUBELORA_ATTEMPT"])
ABOUT = {"runId": job["metadata"]["uid"], "attempt": ATTEMPT, "totalSteps": 100}
began = time.monotonic()
step = 0


class Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        report = ABOUT | {"phase": "Training", "step": step, "loss": 0.25, "secondsLeft": 90.0}
        report |= {"health": {"verdict": "Healthy"}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(report).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def leave(code: int, message: str) -> None:
    artifact = {"uri": "pvc://adapters/out/adapter/x.safetensors", "sha256": "ab" * 32, "bytes": 7}
    final = ABOUT | {"exitCode": code, "message": message, "step": 100 if code == 0 else step}
    final |= {"health": {"verdict": "Healthy"}, "artifacts": [artifact] if code == 0 else []}
    Path(os.environ["KUBELORA_TERMINATION_LOG"]).write_text(json.dumps(final))
    os._exit(code)


signal.signal(signal.SIGTERM, lambda *_: leave(75, "interrupted after a checkpoint"))
order = os.environ.get("STAND_IN", "0")
if order.startswith("exit "):
    leave(int(order.removeprefix("exit ")), "the stand-in was told to end like this")
server = HTTPServer(("", 9464), Status)
threading.Thread(target=server.serve_forever, daemon=True).start()
seconds = float(order)
while (passed := time.monotonic() - began) < seconds:
    step = int(100 * passed / seconds)
    time.sleep(0.1)
leave(0, "100 steps done")
sys.exit(1)

"""The trainers of the simulated pods: one server of ``/status`` for all their addresses."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from benchmarks.operator_scale.api import Api, BenchError, Object
from kubelora_api import names
from kubelora_api.report import RunReport

_TOTAL_STEPS: Final = 100_000
_STEPS_PER_SECOND: Final = 1.0


@dataclass(frozen=True)
class _Run:
    uid: str
    attempt: int
    started: float


class Trainers:
    """Runs by the address of their pod; a step is done each second."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self.answered = 0
        """Reports given so far."""

    async def follow(self, api: Api, path: str) -> None:
        """Watch the pods until cancelled."""
        async for event in api.list_and_watch(path):
            pod = event["object"]
            address = pod.get("status", {}).get("podIP")
            if address and event["type"] != "DELETED":
                self._runs.setdefault(address, _run(pod))

    async def answer(self, request: web.Request) -> web.Response:
        """Answer for the pod whose address was asked."""
        address = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        run = self._runs.get(address)
        if run is None:
            return web.Response(status=404)
        self.answered += 1
        seconds = time.monotonic() - run.started
        report = RunReport(
            run_id=run.uid,
            attempt=run.attempt,
            phase="Training",
            step=int(seconds * _STEPS_PER_SECOND),
            total_steps=_TOTAL_STEPS,
            loss=round(0.1 / (1.0 + seconds), 4),
            grad_norm=0.25,
            learning_rate=1e-4,
            samples_per_second=4.0,
            seconds_left=_TOTAL_STEPS / _STEPS_PER_SECOND - seconds,
        )
        return web.Response(
            text=report.model_dump_json(by_alias=True), content_type="application/json"
        )


@asynccontextmanager
async def serving_trainers() -> AsyncIterator[Trainers]:
    """Serve the trainers' port on loopback, for every address of it, and on no other interface.

    Raises:
        BenchError: The port is in use, or this user may not bind a socket to an interface.
    """
    trainers = Trainers()
    app = web.Application()
    app.router.add_get("/status", trainers.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, _loopback_socket(names.METRICS_PORT), backlog=1024).start()
        yield trainers
    finally:
        await runner.cleanup()


def _loopback_socket(port: int) -> socket.socket:
    """Bind one socket to 127.0.0.0/8, instead of one to each pod's address."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        bound.bind(("0.0.0.0", port))
    except OSError as error:
        bound.close()
        hint = (
            "stop the trainer or the other benchmark that uses it"
            if error.errno == errno.EADDRINUSE
            else "run the benchmark as root"
        )
        raise BenchError(
            f"The simulated pods can't serve port {port} on loopback ({error.strerror}): {hint}."
        ) from error
    return bound


def _run(pod: Object) -> _Run:
    labels = pod["metadata"]["labels"]
    uid = str(labels.get(names.LABEL_JOB_UID, ""))
    return _Run(uid, int(labels.get(names.LABEL_ATTEMPT, "1")), time.monotonic())

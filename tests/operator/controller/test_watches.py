"""Watches over HTTP against a server that answers as an API server does, or does not."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import kopf
import pytest
from aiohttp import web

from kubelora_api.schema import JsonObject
from kubelora_operator.controller import watches
from kubelora_operator.controller.object_store import ObjectStore
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watch_health import WatchHealth
from kubelora_operator.controller.watches import Watches, sources_of
from kubelora_operator.decision.snapshot import JobKey
from tests.operator.controller.test_object_store import CHILD, KEY, child, job, pod
from tests.operator.world import UID

_PATHS = {
    "/apis/kubelora.dev/v1alpha1/namespaces/studio/loratrainingjobs": Kind.JOB,
    "/apis/batch/v1/namespaces/studio/jobs": Kind.CHILD,
    "/api/v1/namespaces/studio/pods": Kind.POD,
}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """An API server with one list per kind, and faults to come, one for each next request."""

    def __init__(self) -> None:
        self.lists: dict[Kind, list[JsonObject]] = {
            Kind.JOB: [job(1)],
            Kind.CHILD: [child(2)],
            Kind.POD: [pod(3)],
        }
        self.list_faults: dict[Kind, list[Answer]] = {kind: [] for kind in Kind}
        self.list_counts = dict.fromkeys(Kind, 0)
        self.streams: dict[Kind, asyncio.Queue[bytes | None]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = _PATHS[request.path]
        if "watch" in request.query:
            return await self._stream(request, kind)
        self.list_counts[kind] += 1
        if self.list_faults[kind]:
            return await self.list_faults[kind].pop(0)(request)
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": self.lists[kind]})

    async def _stream(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        lines = self.streams[kind] = asyncio.Queue()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while (line := await lines.get()) is not None:
            await response.write(line)
        return response

    async def send(self, kind: Kind, type: str, document: JsonObject) -> None:
        """Send an event of a kind once it is watched."""
        while kind not in self.streams:
            await asyncio.sleep(0.01)
        line = json.dumps({"type": type, "object": document}) + "\n"
        await self.streams[kind].put(line.encode())


@asynccontextmanager
async def watched(server: Server) -> AsyncIterator[tuple[ObjectStore, Watches, list[JobKey]]]:
    """Run the watches of one namespace against the server."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    reports: list[JobKey] = []
    sources, clock = sources_of(("studio",)), asyncio.get_running_loop().time
    store = ObjectStore(sources, lambda key, urgent: reports.append(key), clock)
    health = WatchHealth(sources, 60, clock)
    running = Watches(store, sources, health, lambda: kopf.ConnectionInfo(server=url), lambda: 1.0)
    task = asyncio.create_task(running.run())
    try:
        yield store, running, reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for lines in server.streams.values():
            lines.put_nowait(None)
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(15):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "FIRST_WATCH_BACKOFF", 0.05)


async def test_lists_and_events_reach_the_store() -> None:
    server = Server()
    async with watched(server) as (store, _, reports):
        await until(lambda: store.synced("studio"))
        assert reports == [KEY]
        await server.send(Kind.POD, "MODIFIED", pod(10, phase="Running"))
        await until(lambda: len(reports) == 2)
        await server.send(Kind.POD, "BOOKMARK", {"metadata": {"resourceVersion": "11"}})
        await server.send(Kind.CHILD, "DELETED", child(12))
        await until(lambda: len(reports) == 3)
        assert store.children_of("studio", UID) == []
        assert len(store.pods_of("studio", CHILD.rpartition("-")[0])) == 1


async def _html(request: web.Request) -> web.Response:
    return web.Response(text="<html>a proxy's page</html>", content_type="text/html")


async def _gone(request: web.Request) -> web.Response:
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    return web.json_response(status, status=410)


async def _forbidden(request: web.Request) -> web.Response:
    status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no"}
    return web.json_response(status, status=403)


@pytest.mark.parametrize("fault", [_html, _gone, _forbidden])
async def test_a_list_that_fails_is_tried_again_and_ends_no_other_watch(fault: Answer) -> None:
    server = Server()
    server.list_faults[Kind.POD] = [fault, fault]
    async with watched(server) as (store, _, reports):
        await until(lambda: store.synced("studio"))
        assert server.list_counts == {Kind.JOB: 1, Kind.CHILD: 1, Kind.POD: 3}
        assert reports == [KEY]


_ERROR = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd is away"}


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"type": "ERROR", "object": _ERROR}).encode() + b"\n",
        json.dumps({"type": "ERROR", "object": _ERROR | {"code": 410}}).encode() + b"\n",
        b"<html>\n",
        b'{"type": "MODIFIED", "object": {"metada\n',
    ],
)
async def test_a_watch_that_breaks_lists_again_and_finds_what_changed(line: bytes) -> None:
    server = Server()
    async with watched(server) as (store, _, reports):
        await until(lambda: store.synced("studio") and len(server.streams) == 3)
        store.deliver(Kind.CHILD, child(4))  # stored before the next list, and not in it
        server.lists[Kind.CHILD] = [child(20, name=f"bottles-{UID[:5]}-2", uid="c2")]
        await server.streams[Kind.CHILD].put(line)
        await until(lambda: len(store.children_of("studio", UID)) > 1 or len(reports) > 2)
        assert "c2" in [c["metadata"]["uid"] for c in store.children_of("studio", UID)]
        assert server.list_counts == {Kind.JOB: 1, Kind.CHILD: 2, Kind.POD: 1}


async def test_a_restarted_watch_evicts_ghosts() -> None:
    server = Server()
    async with watched(server) as (store, running, reports):
        await until(lambda: store.synced("studio") and len(server.streams) == 3)
        server.lists[Kind.POD] = []
        running.restart(sources_of(("studio",))[2])
        await until(lambda: not store.pods_of("studio", CHILD.rpartition("-")[0]))
        assert reports == [KEY, KEY]

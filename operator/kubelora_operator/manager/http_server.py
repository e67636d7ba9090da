"""``/healthz``, ``/readyz`` and ``/metrics`` of the operator, on one port."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Check = Callable[[], str | None]
"""None where all is well, else a sentence."""


async def serve_http(
    port: int, registry: CollectorRegistry, check_health: Check
) -> tuple[web.AppRunner, int]:
    """Serve until the runner is cleaned up; returns it and the port taken (``port`` 0: any).

    A standby answers like a leader: it is live, and ready to take over.
    """

    async def health(_: web.Request) -> web.Response:
        problem = check_health()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def expose(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", expose)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner, int(runner.addresses[0][1])

"""HTTP server for the operator's ``/healthz``, ``/readyz`` and ``/metrics``."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Check = Callable[[], str | None]
"""Health check: returns None if healthy, else the problem as a sentence."""


async def serve_http(
    port: int, registry: CollectorRegistry, check_health: Check
) -> tuple[web.AppRunner, int]:
    """Start the server. A standby replica answers like the leader: it is ready to take over.

    Args:
        port: Port to listen on; 0 for any free one.
        registry: The metrics to expose.
        check_health: Called for ``/healthz``.

    Returns:
        The runner, which serves until it is cleaned up, and the port in use.
    """

    async def health(_: web.Request) -> web.Response:
        problem = check_health()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def expose(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        response = web.Response(body=encode(registry), headers={"Content-Type": content_type})
        response.enable_compression()  # gzip, if the client accepts it
        return response

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", expose)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner, int(runner.addresses[0][1])

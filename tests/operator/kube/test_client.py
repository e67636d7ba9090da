"""The API client over HTTP, where an API server's answer is not what one would guess."""

import asyncio

from aiohttp import web
from kubernetes.aio import client

from kubelora_operator.kube.client import Cluster


def test_a_list_of_metadata_without_items_is_empty() -> None:
    """Go's API server answers ``"items": null``, not an empty list, to a metadata-only list."""

    async def answer(request: web.Request) -> web.Response:
        assert "PartialObjectMetadataList" in request.headers["Accept"]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": None})

    async def listed() -> dict[tuple[str, str], tuple[str, str]]:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        cluster = Cluster(client.ApiClient(configuration=settings), lambda code: None)
        try:
            return await cluster.list_versions(False, "jobs", None)
        finally:
            await cluster.close()
            await runner.cleanup()

    assert asyncio.run(listed()) == {}

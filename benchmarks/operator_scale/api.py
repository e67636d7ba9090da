"""The benchmark's own client of the API server: plain JSON over HTTP, many requests at a time."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from benchmarks.operator_scale.control_plane import ControlPlane

Object = dict[str, Any]
CONNECTIONS: Final = 64
"""Requests at a time. More make the API server no faster on a few cores."""

_PAUSE: Final = 0.2
"""Seconds between two tries of a watch that was cut off."""


class BenchError(Exception):
    """What did not happen, and where to look."""


class Api:
    """Requests with an administrator's rights."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session, self._server = session, server

    async def create(self, path: str, document: Object) -> Object:
        """Create an object in the collection at ``path``."""
        return await self._request("POST", path, document)

    async def create_all(self, path: str, documents: Iterable[Object]) -> None:
        """Create all objects, `CONNECTIONS` at a time."""
        await asyncio.gather(*(self.create(path, document) for document in documents))

    async def get(self, path: str) -> Object:
        """Get the object or list at ``path``."""
        return await self._request("GET", path)

    async def put(self, path: str, document: Object) -> Object:
        """Replace the object at ``path``."""
        return await self._request("PUT", path, document)

    async def merge_patch(self, path: str, patch: Object) -> Object:
        """Apply a merge patch to the object at ``path``."""
        return await self._request("PATCH", path, patch, "application/merge-patch+json")

    async def list_and_watch(self, path: str) -> AsyncIterator[Object]:
        """Yield each object that is there as an event ``ADDED``, and events from then on.

        The API server ends a watch when its client is slow, or when a CRD's status changes; it is
        continued where it ended, and after an answer ``ERROR`` all is listed again.
        """
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.get(path)
                    for item in listed["items"]:
                        yield {"type": "ADDED", "object": item}
                    version = listed["metadata"]["resourceVersion"]
                async for event in self._watch(path, version):
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event
            except aiohttp.ClientError:
                await asyncio.sleep(_PAUSE)

    async def _watch(self, path: str, version: str) -> AsyncIterator[Object]:
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": "86400",
        }
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            self._server + path, params=query, timeout=timeout, read_bufsize=2**20
        ) as answer:
            if answer.status == 410:
                yield {"type": "ERROR"}
            answer.raise_for_status()
            async for line in answer.content:
                yield json.loads(line)

    async def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._server + path, data=data, headers={"Content-Type": content}
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise BenchError(f"{method} {path} gave {answer.status}: {text[:500]}")
            found: Object = json.loads(text)
            return found


@asynccontextmanager
async def connect(plane: ControlPlane) -> AsyncIterator[Api]:
    """Open a client of the control plane."""
    # Watches hold connections of their own, next to those of the requests.
    connector = aiohttp.TCPConnector(
        limit=CONNECTIONS + 8, ssl=ssl.create_default_context(cafile=str(plane.authority))
    )
    headers = {"Authorization": f"Bearer {plane.admin_token}"}
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        yield Api(session, plane.server)

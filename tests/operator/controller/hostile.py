"""Pods that accept a connection and never answer, on loopback addresses."""

import asyncio
from typing import Self

from kubelora_api import names


class SilentPods:
    """Listening sockets at the port of the trainers' metrics; ``accepted`` after a connection."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"127.0.3.{n + 1}" for n in range(count)]
        self.accepted = asyncio.Event()
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.addresses, names.METRICS_PORT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        self._server.close()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        await self._closed.wait()
        writer.close()

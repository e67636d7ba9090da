"""The operator's own port: health, readiness and metrics."""

import gzip
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kubelora_operator.manager.http_server import serve_http
from kubelora_operator.observability.metrics import OperatorMetrics

PROBLEMS: list[str] = []


@pytest.fixture
async def url() -> AsyncIterator[str]:
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    runner, _ = await serve_http(0, registry, lambda: PROBLEMS[0] if PROBLEMS else None)
    # Port 0 is another port for each family of addresses.
    port = next(address[1] for address in runner.addresses if len(address) == 2)
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as client:
        yield client


async def test_head_is_get_without_the_body(url: str, session: aiohttp.ClientSession) -> None:
    for path in ("/metrics", "/healthz", "/readyz"):
        async with session.head(url + path) as head, session.get(url + path) as get:
            assert (head.status, head.content_type) == (200, get.content_type)
            assert await head.read() == b""
            assert await get.read()


async def test_metrics_are_compressed_and_openmetrics_if_that_is_accepted(
    url: str, session: aiohttp.ClientSession
) -> None:
    asked = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    async with session.get(f"{url}/metrics", headers=asked) as answer:
        assert answer.content_type == "application/openmetrics-text"
        assert answer.headers["Content-Encoding"] == "gzip"
        text = gzip.decompress(await answer.read()).decode()
    assert text.endswith("# EOF\n")
    async with session.get(f"{url}/metrics", headers={"Accept-Encoding": "identity"}) as answer:
        assert answer.content_type == "text/plain"
        assert "Content-Encoding" not in answer.headers
        assert "kubelora_jobs" in await answer.text()


async def test_a_problem_is_a_503_with_its_sentence(
    url: str, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PROBLEMS", ["no lease for 40 s"])
    async with session.get(f"{url}/healthz") as answer:
        assert (answer.status, await answer.text()) == (503, "no lease for 40 s\n")
    async with session.get(f"{url}/readyz") as answer:
        assert answer.status == 200

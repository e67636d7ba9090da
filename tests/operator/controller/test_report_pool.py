"""Requests of reports: bounded, ever rarer after failures, and never waited for by a worker."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import cast

import aiohttp
import pytest

from kubelora_operator.controller import report_pool
from kubelora_operator.controller.pod_reports import fetch_report
from kubelora_operator.controller.report_pool import Report, ReportPool
from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.decision.snapshot import JobKey, TrainerPod, Unreachable
from kubelora_operator.kube.client import Cluster
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.hostile import SilentPods
from tests.operator.world import START

A = ("studio", "a")
POD = TrainerPod("a-0", "pod-a", 1, address="127.0.2.1", running=True)
NO = Unreachable("no answer")


class Asked:
    """A pool over a clock of the test whose requests end when the test answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requests: list[asyncio.Future[Report]] = []
        self.events: list[JobKey] = []
        self.pool = ReportPool(self._fetch, self.events.append, 10, lambda: self.now, lambda: 0.0)

    async def _fetch(self, pod: TrainerPod, run_id: str) -> Report:
        self.requests.append(asyncio.get_running_loop().create_future())
        return await self.requests[-1]

    async def answer(self, report: Report) -> None:
        self.requests[-1].set_result(report)
        await _settle()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_answer_is_an_event_and_is_read_until_it_is_recorded() -> None:
    asked = Asked()
    assert asked.pool.read(A, "u", POD) is None
    await _settle()
    assert asked.pool.read(A, "u", POD) is None  # one request at a time
    await asked.answer(NO)
    assert asked.events == [A]
    assert asked.pool.read(A, "u", POD) is NO
    assert asked.pool.read(A, "u", POD) is NO
    asked.pool.acknowledge(A, NO)
    assert asked.pool.read(A, "u", POD) is None
    assert len(asked.requests) == 1


async def test_a_pod_that_fails_is_asked_ever_more_rarely_until_it_is_ready() -> None:
    asked = Asked()
    waits = []
    for _ in range(6):
        began = asked.now
        count = len(asked.requests)
        while len(asked.requests) == count:
            asked.pool.read(A, "u", POD)
            await _settle()
            asked.now += 1
        asked.now -= 1
        waits.append(asked.now - began)
        await asked.answer(NO)
    assert waits == [0, 9, 20, 40, 60, 60]
    asked.pool.read(A, "u", replace(POD, ready=True))
    asked.now += 10
    asked.pool.read(A, "u", replace(POD, ready=True))
    await _settle()
    assert len(asked.requests) == 7
    await asked.pool.close()


async def test_an_entry_of_a_pod_that_is_gone_is_dropped_with_its_request() -> None:
    asked = Asked()
    asked.pool.read(A, "u", POD)
    await _settle()
    asked.pool.read(A, "u", replace(POD, uid="pod-b"))
    await _settle()
    assert asked.requests[0].cancelled()
    assert (len(asked.pool), asked.pool.in_flight) == (1, {"studio": 1})
    asked.pool.forget(A)
    await _settle()
    assert (len(asked.pool), asked.pool.in_flight, asked.events) == (0, {}, [])


async def test_the_limits_hold_per_namespace_and_in_all() -> None:
    asked = Asked()
    for number in range(16 * 20):
        key = (f"tenant-{number % 16}", f"job-{number}")
        asked.pool.read(key, "u", replace(POD, uid=f"pod-{number}"))
    await _settle()
    assert len(asked.requests) == report_pool.IN_FLIGHT
    assert max(asked.pool.in_flight.values()) == report_pool.IN_FLIGHT_PER_NAMESPACE
    while waiting := [r for r in asked.requests if not r.done()]:
        for request in waiting:
            request.set_result(NO)
        await _settle()
        assert sum(asked.pool.in_flight.values()) <= report_pool.IN_FLIGHT
    assert len(asked.requests) == len(asked.events) == 320
    assert asked.pool.in_flight == {}


@pytest.fixture
async def silent() -> AsyncIterator[SilentPods]:
    async with SilentPods(30) as pods:
        yield pods


async def test_no_look_waits_for_a_pod_that_accepts_and_never_answers(silent: SilentPods) -> None:
    cluster = FakeCluster()
    names = [f"job-{n}" for n in range(30)]
    for name, address in zip(names, silent.addresses, strict=True):
        cluster.add_running_job(name, address)
    answered: list[JobKey] = []
    clock = asyncio.get_running_loop().time
    async with aiohttp.ClientSession(trust_env=False) as session:
        pool = ReportPool(partial(fetch_report, session), answered.append, 10, clock)
        reader = SnapshotReader(cast(Cluster, cluster), cluster.store, pool)
        fetched = [await reader.read("studio", name, START) for name in names]
        await silent.accepted.wait()
        # Each look has ended while the requests are still open.
        assert all(f is not None and f.snapshot.report is None for f in fetched)
        assert (len(pool), answered) == (30, [])
        assert pool.in_flight == {"studio": report_pool.IN_FLIGHT_PER_NAMESPACE}
        await pool.close()

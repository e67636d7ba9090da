"""The reconciler's waits, over a clock of the test: no fault makes it loop without one."""

import asyncio
import itertools
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kubelora_api.schema import JsonObject
from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.controller.create_pacer import CreatePacer, Creation
from kubelora_operator.controller.reconciler import Reconciler
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.workqueue import QueueState, WorkQueue
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube.client import ApiError, Cluster, parse_retry_after
from kubelora_operator.observability.metrics import OperatorMetrics
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.rig import make_reader

KEY = ("studio", "bottles")


class Rig:
    """A reconciler over a cluster in memory whose clock moves only to the next wish."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.now = 0.0
        self.cluster = cluster
        self.state: QueueState[JobKey] = QueueState(lambda: 0.0)
        self.queue = WorkQueue(lambda: self.now, self.state)
        cluster.connect(
            lambda key, urgent: self.queue.add(key, urgent=urgent), clock=lambda: self.now
        )
        api = cast(Cluster, cluster)
        self.reconciler = Reconciler(
            make_reader(cluster),
            PlanApplier(api, cluster.store, "trainer:dev", "me"),
            OperatorMetrics(CollectorRegistry()),
            lambda: 10.0,
            clock=lambda: self.now,
        )

    async def look(self) -> str | None:
        """Move the clock to the next wish and reconcile once; None if there is none."""
        ready_at = self.state.next_ready_at()
        if ready_at is None:
            return None
        self.now = max(self.now, ready_at)
        key = await self.queue.get()
        return await self.reconciler._reconcile_and_requeue(self.queue, key)

    async def run_until(self, end: float) -> None:
        for _ in range(2000):
            ready_at = self.state.next_ready_at()
            if ready_at is None or ready_at > end:
                return
            await self.look()
        raise AssertionError("a hot loop: 2000 looks")


@pytest.fixture
def rig() -> Rig:
    cluster = FakeCluster()
    rig = Rig(cluster)
    cluster.add_job("bottles")
    return rig


async def test_a_refusal_whose_text_varies_is_retried_after_its_backoff_only(rig: Rig) -> None:
    serial = itertools.count()

    def refuse(verb: str, body: JsonObject) -> None:
        if verb == "create_child":
            raise ApiError(403, "Forbidden", f"denied by a webhook, request id {next(serial)}")

    rig.cluster.fault = refuse
    await rig.run_until(10)
    # At 0, 1, 3 and 7 s.
    assert rig.cluster.requests["create_child"] == 4
    rig.cluster.fault = lambda verb, body: None
    rig.queue.add(KEY, urgent=True)
    await rig.run_until(10)
    assert len(rig.cluster.children) == 1


async def test_a_conflict_on_every_write_is_retried_ever_later(rig: Rig) -> None:
    def conflict(verb: str, body: JsonObject) -> None:
        if verb == "put_status":
            rig.queue.add(KEY)  # the write of another that caused the conflict
            raise ApiError(409, "Conflict", "the object has been modified")

    rig.cluster.fault = conflict
    await rig.run_until(10)
    # At 0, 0.2, 0.6, 1.4, 3 and 6.2 s.
    assert rig.cluster.requests["put_status"] == 6


async def test_after_a_storm_the_next_try_comes_within_30_s(rig: Rig) -> None:
    def storm(verb: str, body: JsonObject) -> None:
        if rig.now < 130:
            raise ApiError(500, "InternalError", "etcdserver: request timed out")

    rig.cluster.fault = storm
    await rig.run_until(160)
    assert len(rig.cluster.children) == 1


async def test_retry_after_is_waited_for(rig: Rig) -> None:
    def overloaded(verb: str, body: JsonObject) -> None:
        if rig.now < 20:
            raise ApiError(429, "TooManyRequests", "try again later", retry_after=20)

    rig.cluster.fault = overloaded
    assert await rig.look() == "api_error"
    rig.queue.add(KEY, urgent=True)
    assert rig.state.next_ready_at() == 20


async def test_a_job_that_vanishes_after_each_create_is_not_created_in_a_loop(rig: Rig) -> None:
    for _ in range(200):
        rig.now += 0.05
        await asyncio.wait_for(rig.look(), 10)
        for name in list(rig.cluster.children):
            rig.cluster.take(Kind.CHILD, name)
        rig.queue.add(KEY, urgent=True)
    assert rig.cluster.requests["create_child"] <= 6


def test_creates_of_the_same_attempt_wait_twice_as_long_each_time() -> None:
    now = 0.0
    pacer = CreatePacer(lambda: now)
    first = Creation("u", attempt=1, generation=1)
    waits = []
    for _ in range(11):
        pacer.record(KEY, first)
        waits.append(pacer.wait(KEY, first))
        now += waits[-1]
        assert pacer.wait(KEY, first) == 0
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    pacer.record(KEY, first)
    for other in (Creation("u", 2, 1), Creation("u", 1, 2), Creation("v", 1, 1)):
        assert pacer.wait(KEY, other) == 0


def test_retry_after_is_read_in_seconds_and_bounded() -> None:
    read = [parse_retry_after(h) for h in (None, "", "7", "Wed, 21 Oct 2026", "-1", "9" * 30)]
    assert read == [None, None, 7, None, None, 300]

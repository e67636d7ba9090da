"""The periodic lists against what the watches have brought."""

import itertools
from collections.abc import Callable
from typing import cast

from kubelora_operator.controller.object_store import WatchSource
from kubelora_operator.controller.resync import LAG, Resync
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watch_health import WatchHealth
from kubelora_operator.controller.watches import sources_of
from kubelora_operator.kube.client import ApiError, Cluster
from tests.operator.controller.fake_cluster import FakeCluster

JOBS, CHILDREN, PODS = sources_of(())


class Rig:
    """A resync over a cluster in memory whose clock moves by what is slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cluster = FakeCluster()
        self.cluster.connect(lambda key, urgent: None, clock=lambda: self.now)
        self.restarted: list[WatchSource] = []
        self.health = WatchHealth(sources_of(()), 60, lambda: self.now)
        self.resync = Resync(
            cast(Cluster, self.cluster),
            self.cluster.store,
            sources_of(()),
            self.health,
            self.restarted.append,
            60,
            lambda: self.now,
            self.sleep,
        )
        self.cluster.add_running_job("bottles", "127.0.0.9")
        self.now += 1

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_list_that_shows_what_the_watches_brought_restarts_nothing() -> None:
    rig = Rig()
    await rig.resync.run_once()
    assert rig.restarted == []
    assert rig.now == 101


async def test_a_missed_event_of_any_kind_restarts_the_watch_of_that_kind_alone() -> None:
    rig = Rig()
    changes: dict[WatchSource, Callable[[], object]] = {
        JOBS: lambda: rig.cluster.add_job("cans"),
        CHILDREN: lambda: rig.cluster.put(Kind.CHILD, next(iter(rig.cluster.children.values()))),
        PODS: lambda: rig.cluster.take(Kind.POD, next(iter(rig.cluster.pods))),
    }
    for source, change in changes.items():
        rig.cluster.watching = False
        change()
        rig.cluster.watching = True
        rig.restarted.clear()
        await rig.resync.run_once()
        assert rig.restarted == [source]
        rig.cluster.connect(lambda key, urgent: None, clock=lambda: rig.now)
        rig.resync._store = rig.cluster.store
        rig.now += 1


async def test_an_event_that_arrives_soon_after_the_list_was_not_missed() -> None:
    rig = Rig()
    rig.cluster.watching = False
    late = rig.cluster.add_job("cans")

    async def arrive(seconds: float) -> None:
        assert seconds == LAG
        rig.cluster.store.deliver(Kind.JOB, late)

    rig.resync._sleep = arrive
    await rig.resync.run_once()
    assert rig.restarted == []


async def test_an_object_that_left_the_watch_is_not_missed() -> None:
    """A list that began before the deletion shows the object; its event has come since."""
    rig = Rig()
    listed = await rig.cluster.list_versions(False, "pods", None)
    rig.cluster.take(Kind.POD, next(iter(rig.cluster.pods)))

    async def earlier(job: bool, plural: str, namespace: str | None) -> object:
        return (
            listed
            if plural == "pods"
            else await FakeCluster.list_versions(rig.cluster, job, plural, namespace)
        )

    rig.cluster.list_versions = earlier  # type: ignore[method-assign,assignment]
    await rig.resync.run_once()
    assert rig.restarted == []


async def test_a_refused_kind_leaves_the_others_and_is_reported() -> None:
    rig = Rig()

    def refuse(verb: str, body: object) -> None:
        if verb == "list_pods":
            raise ApiError(403, "Forbidden", "pods is forbidden")

    rig.cluster.fault = refuse
    for _ in range(4):
        rig.now += 60
        await rig.resync.run_once()
    assert rig.cluster.requests["list_jobs"] == 4
    problem = rig.health.problem()
    assert problem is not None
    assert problem.startswith("pods in all namespaces can't be listed for 241 s")
    assert "pods is forbidden" in problem
    assert not rig.health.blind()
    rig.cluster.fault = lambda verb, body: None
    await rig.resync.run_once()
    assert rig.health.problem() is None


def test_a_refused_namespace_is_named_and_is_not_the_operators_end() -> None:
    now = itertools.count(0.0, 1000.0)
    clock = [next(now)]
    sources = sources_of(("studio", "lab"))
    health = WatchHealth(sources, 60, lambda: clock[0])
    clock[0] = next(now)
    assert health.blind()
    for source in sources:
        if source.namespace == "studio":
            health.listed(source)
    assert health.problem() is None
    assert [sentence.split(" can't")[0] for sentence in health.stale()] == [
        "loratrainingjobs in lab",
        "jobs in lab",
        "pods in lab",
    ]
    assert not health.blind()


def test_missed_changes_that_a_restarted_watch_does_not_bring_are_unhealthy() -> None:
    now = 0.0
    health = WatchHealth(sources_of(()), 60, lambda: now)
    health.compared(PODS, 3)
    assert health.problem() is None
    now = 31.0
    assert health.problem() == (
        "the watch of pods in all namespaces misses changes that a list finds"
    )
    health.compared(PODS, 0)
    assert health.problem() is None

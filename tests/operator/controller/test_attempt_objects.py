"""The objects of an attempt: created before its Job, and deleted when it is old."""

import asyncio
from datetime import UTC, datetime
from typing import cast

from kubelora_api.status import JobStatus
from kubelora_operator.attempt.network_policy import NetworkSettings
from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.decision.plan import ReconcilePlan
from kubelora_operator.kube.client import Cluster
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.rig import make_reader

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
JOB = "bottles"
SETTINGS = NetworkSettings(operator={"podSelector": {}})


def start(cluster: FakeCluster, attempt: int, network: NetworkSettings | None = SETTINGS) -> None:
    async def _start() -> None:
        fetched = await make_reader(cluster).read("studio", JOB, NOW)
        assert fetched
        applier = PlanApplier(cast(Cluster, cluster), cluster.store, "trainer:1", "me", network)
        plan = ReconcilePlan(JobStatus(attempt=attempt), create=attempt)
        outcome = await applier.apply(fetched, plan, NOW)
        assert outcome.rejection is None

    asyncio.run(_start())


def with_job() -> FakeCluster:
    cluster = FakeCluster()
    cluster.add_job(JOB)
    return cluster


def attempts(cluster: FakeCluster) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kind, name in sorted(cluster.objects):
        found.setdefault(kind, []).append(int(name.rpartition("-")[2]))
    return found


def test_a_network_policy_is_created_with_each_attempt_unless_turned_off() -> None:
    cluster = with_job()
    start(cluster, 1)
    assert attempts(cluster) == {"ConfigMap": [1], "NetworkPolicy": [1]}
    cluster = with_job()
    start(cluster, 1, network=None)
    assert attempts(cluster) == {"ConfigMap": [1]}


def test_the_last_three_attempts_keep_their_objects_and_the_first_its_config_map() -> None:
    cluster = with_job()
    for attempt in range(1, 7):
        start(cluster, attempt)
    assert attempts(cluster) == {"ConfigMap": [1, 4, 5, 6], "NetworkPolicy": [4, 5, 6]}
    start(cluster, 6)  # again, as after a crash: nothing is left to delete
    assert cluster.requests["delete_object"] == 5


def test_an_object_of_another_owner_is_not_deleted() -> None:
    cluster = with_job()
    start(cluster, 1)
    [key] = [k for k in cluster.objects if k[0] == "NetworkPolicy"]
    cluster.objects[key]["metadata"]["ownerReferences"] = []
    start(cluster, 4)
    assert key in cluster.objects

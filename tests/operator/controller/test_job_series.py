"""The series of a job through the reconciler: an operator that starts again exports them again."""

from typing import cast

from prometheus_client import CollectorRegistry

from kubelora_api import names
from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.controller.reconciler import Reconciler
from kubelora_operator.controller.workqueue import WorkQueue
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube.client import Cluster
from kubelora_operator.observability.metrics import OperatorMetrics
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.rig import make_reader

LABELS = {"job_namespace": "studio", "name": "bottles"}
FINDING = LABELS | {"finding": "UpdatesLost", "severity": "critical", "group": "", "attempt": "1"}
SUSPENDED = {
    "state": "Suspended",
    "attempt": 1,
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Suspended",
            "status": "True",
            "reason": "HealthPolicy",
            "message": "found",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-03-01T12:00:00Z",
        }
    ],
    "health": {
        "verdict": "Critical",
        "findings": [
            {"name": "UpdatesLost", "severity": "critical", "value": 0.96, "message": "lost"}
        ],
    },
}


def suspended_job(cluster: FakeCluster) -> None:
    """A job that its health policy has suspended."""
    cluster.add_job("bottles")
    job = cluster.jobs["bottles"]
    job["spec"]["health"] = {"policy": "Suspend"}
    job["status"] = SUSPENDED


async def exported_by_a_new_operator(cluster: FakeCluster) -> CollectorRegistry:
    """The registry of an operator that has just started and looked at the job once."""
    cluster.connect(lambda key, urgent: None)
    registry = CollectorRegistry()
    queue: WorkQueue[JobKey] = WorkQueue(lambda: 0.0)
    queue.add(("studio", "bottles"))
    reconciler = Reconciler(
        make_reader(cluster),
        PlanApplier(cast(Cluster, cluster), cluster.store, "trainer:dev", "me"),
        OperatorMetrics(registry),
        lambda: 10.0,
    )
    await reconciler._reconcile_and_requeue(queue, await queue.get())
    return registry


async def test_an_operator_that_starts_again_exports_what_ended_jobs_found_before() -> None:
    cluster = FakeCluster()
    suspended_job(cluster)
    for _ in range(2):
        registry = await exported_by_a_new_operator(cluster)
        assert registry.get_sample_value("kubelora_job_finding", FINDING) == 0.96
        state = {"state": "Suspended", "reason": "HealthPolicy"}
        assert registry.get_sample_value("kubelora_job_state", LABELS | state) == 1


async def test_an_acknowledgement_is_read_from_the_jobs_annotation() -> None:
    cluster = FakeCluster()
    suspended_job(cluster)
    alert = LABELS | {"alert": "KubeloraUpdatesLost"}
    registry = await exported_by_a_new_operator(cluster)
    assert registry.get_sample_value("kubelora_job_acknowledged", alert) is None
    cluster.jobs["bottles"]["metadata"]["annotations"] = {
        names.ANNOTATION_ACKNOWLEDGED: "UpdatesLost@1"
    }
    registry = await exported_by_a_new_operator(cluster)
    assert registry.get_sample_value("kubelora_job_acknowledged", alert) == 1

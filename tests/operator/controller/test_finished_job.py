"""A finished job is deleted through the reconciler, once, and only as it was looked at."""

import pytest

from kubelora_operator.controller.trim import Kind
from kubelora_operator.kube.client import ApiError
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.test_backoff import Rig

COMPLETE = {
    "type": "Complete",
    "status": "True",
    "reason": "TrainingDone",
    "message": "",
    "lastTransitionTime": "2026-03-01T12:00:00Z",
}


def finished(cluster: FakeCluster, **spec: object) -> None:
    """Store a job that completed long ago."""
    job = cluster.add_job("bottles")
    status = {"attempt": 1, "completionTime": "2026-03-01T12:00:00Z", "conditions": [COMPLETE]}
    cluster.put(Kind.JOB, job | {"spec": job["spec"] | spec, "status": status})


@pytest.mark.parametrize(
    ("spec", "kept"),
    [({"ttlSecondsAfterFinished": 60}, False), ({}, True), ({"suspend": True}, True)],
)
async def test_a_job_is_deleted_after_its_ttl(spec: dict[str, object], kept: bool) -> None:
    rig = Rig(FakeCluster())
    finished(rig.cluster, **spec)
    await rig.run_until(60)
    assert ("bottles" in rig.cluster.jobs) == kept
    assert rig.cluster.requests["delete_job"] == (0 if kept else 1)


async def test_a_refused_deletion_is_an_event() -> None:
    def refuse(verb: str, body: object) -> None:
        if verb == "delete_job":
            raise ApiError(403, "Forbidden", "a policy keeps finished jobs")

    rig = Rig(FakeCluster(refuse))
    finished(rig.cluster, ttlSecondsAfterFinished=0)
    assert await rig.look() == "api_error"
    assert "bottles" in rig.cluster.jobs
    assert rig.cluster.requests["create_event"] == 1

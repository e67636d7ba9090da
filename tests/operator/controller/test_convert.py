"""What is read out of Jobs and pods, from documents as a real cluster returned them."""

from datetime import UTC, datetime, timedelta

import pytest

from kubelora_api.schema import JsonObject
from kubelora_operator.controller import convert
from kubelora_operator.controller.convert import warning_from
from kubelora_operator.controller.trim import Kind, trim
from kubelora_operator.decision.snapshot import Child, TrainerPod
from tests.operator.world import UID

OWNERS = frozenset({"j"})
OWNER = {"kind": "LoraTrainingJob", "name": "bottles", "uid": UID, "controller": True}


def child_from(document: JsonObject, job: str, uid: str) -> Child | None:
    """Convert a Job; the store keeps all that is read of it."""
    child = convert.child_from(document, job, uid)
    assert convert.child_from(trim(Kind.CHILD, document), job, uid) == child
    return child


def pod_from(document: JsonObject, job: str, uid: str, owners: frozenset[str]) -> TrainerPod | None:
    """Convert a pod; the store keeps all that is read of it."""
    pod = convert.pod_from(document, job, uid, owners)
    assert convert.pod_from(trim(Kind.POD, document), job, uid, owners) == pod
    return pod


def pod(status: JsonObject, owner: str = "bottles-0b5e7-2") -> JsonObject:
    owners = [{"kind": "Job", "name": owner, "uid": "j", "controller": True}]
    return {"metadata": {"name": "p", "uid": "u", "ownerReferences": owners}, "status": status}


def waiting(reason: str, message: str) -> JsonObject:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]}


def unscheduled(message: str) -> JsonObject:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [condition]}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (
            unscheduled(
                '0/1 nodes are available: persistentvolumeclaim "photos" not found. not found'
            ),
            "ClaimNotFound",
            "PersistentVolumeClaim photos does not exist",
        ),
        (
            unscheduled(
                "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
            ),
            "ClaimNotBound",
            "is not bound yet",
        ),
        (
            unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
            "Unschedulable",
            "Insufficient nvidia.com/gpu",
        ),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "a/b:c"'),
            "ImagePullFailed",
            "a/b:c",
        ),
        (
            waiting("CreateContainerConfigError", 'secret "s3" not found'),
            "ContainerConfigError",
            's3" not found',
        ),
    ],
)
def test_why_a_pod_does_not_run(status: JsonObject, reason: str, words: str) -> None:
    found = pod_from(pod(status), "bottles", UID, OWNERS)
    assert found is not None
    assert found.waiting is not None
    assert found.waiting.reason == reason
    assert words in found.waiting.message


def test_a_pod_whose_owner_is_not_one_of_our_jobs_is_not_ours() -> None:
    assert pod_from(pod({}, owner="other-0b5e7-2"), "bottles", UID, OWNERS) is None
    assert pod_from({"metadata": {"name": "p"}}, "bottles", UID, OWNERS) is None


def test_a_pod_of_an_unknown_job_is_believed_nothing_but_that_it_lives() -> None:
    ended = {"terminated": {"exitCode": 0, "message": "done"}}
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": ended}]}
    status["podIP"] = "10.0.0.9"
    found = pod_from(pod(status), "bottles", UID, frozenset({"another"}))
    assert found is not None
    assert (found.live, found.exit_code, found.address, found.running) == (True, None, None, False)
    assert found.waiting is not None
    assert found.waiting.reason == "UnknownOwner"
    assert pod_from(pod(status | {"phase": "Failed"}), "bottles", UID, frozenset()) is None


def test_how_a_container_ended() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "last\x00 line"}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": ended}]}
    found = pod_from(pod(status), "bottles", UID, OWNERS)
    assert found is not None
    assert (found.attempt, found.exit_code, found.out_of_memory, found.live) == (
        2,
        137,
        True,
        False,
    )
    assert (found.final, found.termination_message) == (None, "last  line")


def test_a_failed_job_tells_its_cause_and_when() -> None:
    document = {
        "metadata": {"name": "bottles-0b5e7-1", "uid": "j", "ownerReferences": [OWNER]},
        "spec": {"suspend": False},
        "status": {
            "startTime": "2026-03-01T12:00:00Z",
            "conditions": [
                {
                    "type": "Failed",
                    "status": "True",
                    "reason": "PodFailurePolicy",
                    "message": "exit code 2",
                    "lastTransitionTime": "2026-03-01T12:01:00Z",
                }
            ],
        },
    }
    child = child_from(document, "bottles", UID)
    assert child is not None
    assert (child.state, child.live, child.attempt) == ("failed", False, 1)
    assert child.finished == datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    assert child.failure is not None
    assert child.failure.reason == "PodFailurePolicy"


def test_a_job_of_another_owner_is_not_ours_whatever_its_name_or_labels() -> None:
    foreign = [OWNER | {"uid": "someone-else"}]
    metadata = {"name": "bottles-0b5e7-1", "ownerReferences": foreign, "labels": {}}
    assert child_from({"metadata": metadata}, "bottles", UID) is None


def test_an_old_warning_is_not_taken_for_what_holds_now() -> None:
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

    def event(minutes: int, message: str, reason: str = "FailedMount") -> JsonObject:
        when = (now - timedelta(minutes=minutes)).isoformat()
        return {"reason": reason, "message": message, "lastTimestamp": when}

    assert warning_from([event(30, "old")], now) is None
    assert warning_from([event(3, "older"), event(1, "newest"), event(2, "old")], now) == "newest"
    assert warning_from([event(1, "x", reason="FailedScheduling")], now) is None

"""Ends that are not the job's fault: known by their cause, delayed, and not endless; by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kubelora_api.status import JobStatus
from kubelora_operator.controller.convert import pod_from
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.failure import RestartCost, classify_failure
from kubelora_operator.decision.snapshot import Explanation
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.decision.test_decide_accounts import running_world, told
from tests.operator.decision.test_gang import FAILED, ended, gang
from tests.operator.world import START, UID, World, condition, make_snapshot, truth

GPU = Explanation("Unschedulable", "the pod cannot be scheduled: 0/9 nodes have a GPU left")
WAITING = told("Running", "False", GPU.reason).model_copy(update={"message": GPU.message})
KNOWN = "it ended before all its pods ran: the pod cannot be scheduled: 0/9 nodes have a GPU left"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present"),
        ("OutOfnvidia.com/gpu", "Node didn't have enough resource: nvidia.com/gpu"),
        ("OutOfcpu", ""),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ("Terminated", "Pod was terminated in response to imminent node shutdown."),
        ("NodeAffinity", "Predicate NodeAffinity failed"),
        ("NodeLost", "Node gpu-3 which was running pod is unresponsive"),
        ("Preempting", "Preempted in order to admit critical pod"),
        ("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi"),
    ],
)
@pytest.mark.parametrize("code", [None, 137])
def test_what_a_node_did_to_a_pod_is_free_and_names_the_nodes_reason(
    reason: str, message: str, code: int | None
) -> None:
    state = {"terminated": {"exitCode": code}} if code else {}
    containers = [{"name": "trainer", "state": state}]
    document = pod_document(
        {"phase": "Failed", "reason": reason, "message": message, "containerStatuses": containers},
        owner="bottles-0b5e7-1",
    )
    pod = pod_from(document, "bottles", UID, OWNERS)
    assert pod is not None
    failure = classify_failure(gang(pod), FAILED)
    assert (failure.cost, failure.explanation.reason) == (RestartCost.FREE, "NodeFailure")
    assert reason in failure.explanation.message
    assert message in failure.explanation.message


@pytest.mark.parametrize(
    "message",
    [
        "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
        'Container trainer exceeded its local ephemeral storage limit "1Gi". ',
        'Usage of EmptyDir volume "kubelora-scratch" exceeds the limit "1Gi". ',
    ],
)
def test_a_pod_evicted_for_its_own_limit_counts(message: str) -> None:
    pod = replace(ended(0, 137, 1), verdict=Explanation("Evicted", message))
    failure = classify_failure(gang(pod), FAILED)
    assert failure.cost is RestartCost.COUNTED
    assert failure.explanation.reason == "StorageLimitExceeded"
    assert message.strip() in failure.explanation.message


def test_a_configuration_error_on_a_node_that_shuts_down_is_still_one() -> None:
    code = Explanation("PodFailurePolicy", "Container trainer failed with exit code 2 matching")
    pod = replace(ended(0, 2, 1), verdict=Explanation("Terminated", "node shutdown"))
    failure = classify_failure(gang(pod), replace(FAILED, failure=code))
    assert failure.cost is RestartCost.FINAL


def test_a_known_cause_is_kept_when_the_pod_is_gone() -> None:
    seen = gang()
    status = seen.status.model_copy(update={"conditions": [WAITING]})
    failure = classify_failure(replace(seen, status=status), FAILED)
    assert failure.explanation == Explanation("Unschedulable", KNOWN)
    assert failure.cost is RestartCost.FREE


def test_a_gang_whose_second_pod_was_never_scheduled_does_not_blame_the_network() -> None:
    for pods in ((ended(0, 4, 1),), (ended(0, 4, 1), ended(1, 4, 1))):
        seen = gang(*pods)
        status = seen.status.model_copy(update={"conditions": [WAITING]})
        failure = classify_failure(replace(seen, status=status), FAILED)
        assert (failure.cost, failure.explanation.message) == (RestartCost.FREE, KNOWN)


def test_a_job_deleted_while_its_pod_waited_is_told_why_it_waited() -> None:
    status = JobStatus(attempt=1, child_uid="job-1", conditions=[WAITING])
    after = decide(make_snapshot(status=status), START).status
    assert condition(after, "Restarting").reason == "Unschedulable"
    assert "0/9 nodes have a GPU left" in condition(after, "Restarting").message
    assert after.unknown_ends == 0


def crash_unseen(world: World) -> float:
    """The Job is gone before anyone saw its end; returns the seconds until the next attempt."""
    world.delete_child(world.status.attempt)
    world.pods_end()
    wait = world.reconcile().requeue_after
    seconds = wait.total_seconds() if wait else 0.0
    world.wait(seconds=seconds)
    world.settle()
    if truth(world.status, "Failed") != "True":
        world.pod_runs()
        world.settle()
    return seconds


def test_an_unknown_end_waits_and_counts_from_the_second_time() -> None:
    world = running_world(max_restarts=2)
    assert (crash_unseen(world), world.status.restarts) == (10, 0)
    assert (crash_unseen(world), world.status.restarts) == (10, 1)
    assert (crash_unseen(world), world.status.restarts) == (20, 2)
    crash_unseen(world)
    failed = condition(world.status, "Failed")
    assert failed.reason == "MaxRestartsExceeded"
    assert "its outcome is unknown" in failed.message


def test_an_unknown_end_a_day_later_is_a_first_one_again() -> None:
    world = running_world(max_restarts=0)
    for _ in range(3):
        crash_unseen(world)
        world.wait(hours=24)
    assert (world.status.restarts, truth(world.status, "Failed")) == (0, None)


def lose_to_the_node(world: World) -> float:
    """The node refuses the pod; returns the seconds until the next attempt."""
    world.pod_exits(137)
    refused = Explanation("UnexpectedAdmissionError", "no healthy devices present")
    world.pods[-1] = replace(world.pods[-1], verdict=refused)
    wait = world.reconcile().requeue_after
    seconds = wait.total_seconds() if wait else 0.0
    world.wait(seconds=seconds)
    world.settle()
    return seconds


def test_a_broken_device_plugin_waits_longer_and_longer_and_then_for_the_user() -> None:
    world = World(max_restarts=0)
    world.settle()
    delays = [lose_to_the_node(world) for _ in range(50)]
    assert delays[:9] == [0, 10, 20, 40, 80, 160, 320, 600, 600]
    assert sum(delays) == 630 + 43 * 600
    lose_to_the_node(world)
    suspended = condition(world.status, "Suspended")
    assert (suspended.status, suspended.reason) == ("True", "FreeRestartsExceeded")
    assert suspended.message == (
        "50 restarts in 24 h did not count against maxRestarts, the last because the node refused "
        "or ended the pod (UnexpectedAdmissionError: no healthy devices present). Once the cause "
        "is removed, set spec.suspend to true and then to false to resume from the last checkpoint"
    )
    world.wait(hours=99)
    world.settle()
    assert (len(world.created), world.status.restarts) == (51, 0)
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert (len(world.created), world.status.free_restarts) == (52, 0)


def test_a_day_of_preemptions_of_long_runs_waits_for_nothing() -> None:
    world = running_world(max_restarts=0)
    for _ in range(60):
        world.wait(minutes=30)
        world.pod_exits(75)
        plan = world.reconcile()
        assert plan.requeue_after == timedelta()
        world.settle()
        world.pod_runs()
        world.settle()
    assert truth(world.status, "Suspended") != "True"

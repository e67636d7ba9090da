"""Deadlines of running and of waiting, and the deletion of finished jobs; times by hand."""

from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kubelora_api.report import FinalReport
from kubelora_api.status import CheckpointStatus
from kubelora_operator.controller.convert import pod_from
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Explanation
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.decision.test_decide_accounts import running_world
from tests.operator.decision.test_decide_properties import HAPPENINGS, History, check
from tests.operator.world import START, UID, World, condition, truth

HOUR = {"activeDeadlineSeconds": 3600}
PULL = Explanation("ImagePullFailed", "the image can't be pulled: no such image x:y.")
NO_GPU = Explanation("Unschedulable", "the pod cannot be scheduled: 0/9 nodes have a GPU left")
CHECKPOINT = CheckpointStatus(step=47, uri="pvc://adapters/x/step-000047")


def stop(world: World) -> None:
    """The pods answer SIGTERM: they save a checkpoint, exit with 75 and are gone."""
    final = FinalReport(
        run_id=UID, attempt=1, exit_code=75, message="", step=47, checkpoint=CHECKPOINT
    )
    world.pods = [
        replace(p, exit_code=75, running=False, ended=world.now, final=final) for p in world.pods
    ]
    world.settle()
    world.pods_end()
    world.settle()


def test_a_job_that_ran_for_its_deadline_saves_a_checkpoint_and_fails() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(minutes=59, seconds=55)
    assert world.settle().requeue_after == timedelta(seconds=5)
    world.wait(seconds=5)
    world.settle()
    assert (world.status.state, world.children) == ("Stopping", {})
    assert [p.deleting for p in world.pods] == [True], "stopped as by a suspension"
    world.wait(seconds=20)
    stop(world)
    failed = condition(world.status, "Failed")
    assert (world.status.state, failed.reason) == ("Failed", "DeadlineExceeded")
    assert failed.message == (
        "the job ran for 1h0m (3620 s) in 1 attempt, and activeDeadlineSeconds is 3600. To "
        "continue from the checkpoint of step 47, raise or remove activeDeadlineSeconds"
    )
    world.wait(hours=99)
    assert world.settle().requeue_after is None
    assert world.created == [1]


@pytest.mark.parametrize("raised", [{"activeDeadlineSeconds": 7200}, {}])
def test_a_job_whose_deadline_is_raised_continues(raised: dict[str, int]) -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=1)
    world.settle()
    stop(world)
    world.edit(deadlines=raised)
    world.settle()
    assert (world.created, truth(world.status, "Failed")) == ([1, 2], "False")
    assert (world.status.completion_time, world.status.restarts) == (None, 0)
    world.pod_runs()
    world.wait(minutes=59)
    world.settle()
    assert world.status.state == "Running"
    world.pod_exits(0)
    world.settle()
    assert world.status.state == "Complete"


def test_a_deadline_raised_too_little_changes_nothing() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=2)
    world.settle()
    stop(world)
    world.edit(deadlines={"activeDeadlineSeconds": 7199})
    world.settle()
    assert (world.created, world.status.state) == ([1], "Failed")


def test_a_deadline_raised_while_the_pods_stop_starts_the_next_attempt() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=1)
    world.settle()
    world.edit(deadlines={})
    world.settle()
    stop(world)
    assert (world.created, truth(world.status, "Failed")) == ([1, 2], "False")


def test_the_deadline_counts_over_restarts_and_neither_suspension_nor_queue() -> None:
    world = World(deadlines=HOUR, queue="team-studio")
    for exit_code in (1, 75):
        world.settle()
        world.wait(hours=9)  # in the queue
        world.admit()
        world.pod_runs()
        world.settle()
        world.wait(minutes=25)
        world.pod_exits(exit_code)
        world.settle()
        world.edit(suspend=True)
        world.settle()
        world.wait(hours=9)
        world.edit(suspend=False)
    world.settle()
    world.admit()
    world.pod_runs()
    world.wait(minutes=9)
    world.settle()
    assert world.status.state == "Running"
    world.wait(minutes=1)
    world.settle()
    assert world.status.state == "Stopping"


def test_a_result_counts_for_more_than_a_deadline() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=1)
    world.pod_exits(0)
    world.settle()
    assert world.status.state == "Complete"


def test_an_own_failure_at_the_deadline_names_its_cause() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=1)
    world.pod_exits(2)
    world.settle()
    assert condition(world.status, "Failed").reason == "ConfigurationError"


def test_a_job_suspended_while_it_stops_is_suspended() -> None:
    world = running_world(deadlines=HOUR)
    world.wait(hours=1)
    world.settle()
    world.edit(suspend=True)
    world.settle()
    stop(world)
    assert (world.status.state, truth(world.status, "Failed")) == ("Suspended", "False")


# ---- waiting for pods ----


def waiting_world(why: Explanation, scheduled: bool, **deadlines: int) -> World:
    world = World(deadlines=deadlines)
    world.settle()
    at = START if scheduled else None
    world.pods = [replace(p, waiting=why, scheduled=at) for p in world.pods]
    world.settle()
    return world


def test_a_pod_that_holds_its_gpu_and_cannot_start_is_given_up_after_an_hour() -> None:
    world = waiting_world(PULL, scheduled=True)
    world.wait(minutes=59)
    world.settle()
    assert world.status.state == "Pending"
    world.wait(minutes=1)
    world.settle()
    world.pods_end()
    world.settle()
    failed = condition(world.status, "Failed")
    assert (world.status.state, failed.reason) == ("Failed", "PendingDeadlineExceeded")
    assert failed.message == (
        "not all pods ran within 1h0m with its GPUs held: the image can't be pulled: no such image "
        "x:y. Remove the cause, then change the spec (such as podTemplate or "
        "pendingDeadlineSeconds) to continue the job"
    )


def test_a_job_that_was_given_up_continues_when_its_spec_is_changed() -> None:
    world = waiting_world(PULL, scheduled=True)
    world.wait(hours=1)
    world.settle()
    world.pods_end()
    world.settle()
    world.wait(hours=7)
    world.settle()
    assert world.created == [1]
    world.edit()
    world.settle()
    world.pod_runs()
    world.settle()
    assert (world.created, world.status.state) == ([1, 2], "Running")


def test_a_pod_that_waits_for_a_gpu_is_given_up_only_if_that_was_asked_for() -> None:
    patient = waiting_world(NO_GPU, scheduled=False)
    patient.wait(hours=999)
    patient.settle()
    assert (patient.status.state, patient.created) == ("Pending", [1])
    asked = waiting_world(NO_GPU, scheduled=False, pendingDeadlineSeconds=600)
    asked.wait(seconds=600)
    asked.settle()
    asked.pods_end()
    asked.settle()
    assert "within pendingDeadlineSeconds (600): the pod cannot be scheduled: 0/9" in (
        condition(asked.status, "Failed").message
    )


def test_time_in_a_queue_is_no_waiting_for_pods() -> None:
    world = World(queue="team-studio", deadlines={"pendingDeadlineSeconds": 600})
    world.settle()
    world.wait(hours=9)
    world.settle()
    world.admit()
    world.settle()
    world.wait(seconds=599)
    world.settle()
    assert (world.status.state, world.status.pending_since) == ("Pending", "2026-03-01T21:00:00Z")
    world.pod_runs()
    world.settle()
    assert (world.status.state, world.status.pending_since) == ("Running", None)


def test_when_a_pod_got_its_node_is_read_from_its_condition() -> None:
    when = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-03-01T12:00:00Z"}
    found = pod_from(pod_document({"conditions": [when]}), "bottles", UID, OWNERS)
    assert found is not None
    assert found.scheduled == START


# ---- the deletion of finished jobs ----


@pytest.mark.parametrize(("code", "state"), [(0, "Complete"), (2, "Failed")])
def test_a_finished_job_is_deleted_when_its_time_is_over(code: int, state: str) -> None:
    world = running_world(deadlines={"ttlSecondsAfterFinished": 7200})
    world.wait(minutes=5)
    world.pod_exits(code)
    world.settle()
    assert world.status.state == state
    assert world.settle().requeue_after == timedelta(hours=1), "a clock may jump meanwhile"
    world.wait(seconds=7199)
    assert world.settle().requeue_after == timedelta(seconds=1)
    assert not world.deleted
    world.wait(seconds=1)
    plan = decide(world.snapshot(), world.now)
    assert (plan.delete_job, plan.requeue_after, plan.delete) == (True, None, ())


def test_a_ttl_of_0_deletes_at_once_and_only_what_has_ended() -> None:
    world = running_world(deadlines={"ttlSecondsAfterFinished": 0})
    world.settle()
    assert not world.deleted
    world.pod_exits(0)
    world.reconcile()
    assert (world.status.state, world.deleted) == ("Complete", False), "its end is shown first"
    world.pods.append(replace(world.pods[0], uid="sidecar", phase="Running", exit_code=0))
    assert not decide(world.snapshot(), world.now).delete_job
    world.pods.pop()
    assert decide(world.snapshot(), world.now).delete_job


def test_a_finished_job_that_its_user_suspends_is_kept() -> None:
    world = running_world(deadlines={"ttlSecondsAfterFinished": 0})
    world.pod_exits(0)
    world.edit(suspend=True)
    world.settle()
    world.wait(hours=9)
    world.settle()
    assert not world.deleted


# ---- any history ----


def raise_deadline(history: History) -> None:
    continues = condition_reason(history.world, "Failed") == "DeadlineExceeded"
    limit = history.world.deadlines["activeDeadlineSeconds"]
    history.world.edit(deadlines={"activeDeadlineSeconds": limit + 3600})
    history.ended = None if continues else history.ended


def condition_reason(world: World, kind: str) -> str:
    return next((c.reason for c in world.status.conditions if c.type == kind), "")


@settings(max_examples=200, deadline=None)
@given(
    queue=st.sampled_from([None, "team-studio"]),
    happenings=st.lists(
        st.sampled_from([*sorted(HAPPENINGS), "deadline raised"]), min_size=40, max_size=60
    ),
)
def test_the_promises_hold_with_a_deadline(queue: str | None, happenings: list[str]) -> None:
    history = History(World(max_restarts=3, queue=queue, deadlines={"activeDeadlineSeconds": 1200}))
    for happening in happenings:
        (HAPPENINGS | {"deadline raised": raise_deadline})[happening](history)
        check(history)
        world = history.world
        if truth(world.status, "Failed") == "True":
            limit = world.deadlines["activeDeadlineSeconds"]
            over = (world.status.active_seconds or 0) >= limit
            assert condition_reason(world, "Failed") != "DeadlineExceeded" or over

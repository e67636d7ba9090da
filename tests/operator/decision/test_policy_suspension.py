"""A job that its own health policy suspended, until its user goes on."""

from dataclasses import replace

import pytest

from kubelora_api.names import ExitCode
from kubelora_api.report import FinalReport
from kubelora_api.status import Finding, HealthStatus
from tests.operator.world import UID, World, condition, truth

FINDING = Finding(name="UpdatesLost", severity="critical", message="Updates vanish.")


def held_world() -> World:
    """A job under the policy Suspend whose trainer ended with exit code 5."""
    world = World(policy="Suspend")
    world.settle()
    world.pod_runs()
    world.settle()
    world.wait(seconds=60)
    world.pod_exits(5)
    final = FinalReport(
        run_id=UID,
        attempt=1,
        exit_code=ExitCode.HELD,
        message="UpdatesLost since step 8: Updates vanish.",
        health=HealthStatus(verdict="Critical", findings=[FINDING]),
    )
    world.pods = [replace(world.pods[0], final=final)]
    world.settle()
    return world


def test_a_job_held_by_its_policy_says_why_and_how_to_go_on() -> None:
    status = held_world().status
    suspended = condition(status, "Suspended")
    assert (status.state, suspended.reason) == ("Suspended", "HealthPolicy")
    assert suspended.message.startswith("UpdatesLost since step 8: Updates vanish. To accept")
    assert "spec.suspend to true and then to false" in suspended.message
    assert "spec.health.policy to Warn" in suspended.message
    assert condition(status, "NumericallyHealthy").reason == "UpdatesLost"
    assert (truth(status, "Running"), status.active_seconds) == ("False", 60)
    assert truth(status, "Failed") is None


def test_a_held_job_starts_nothing_by_itself_and_costs_no_restart() -> None:
    world = held_world()
    world.wait(hours=100)
    plan = world.settle()
    assert (world.created, world.status.restarts) == ([1], 0)
    assert (plan.requeue_after, plan.events) == (None, ())


def test_it_is_held_although_its_job_and_its_pod_are_deleted_since() -> None:
    world = held_world()
    world.delete_child(1)
    world.pods_end()
    world.settle()
    assert (world.created, world.status.state) == ([1], "Suspended")


def test_it_is_told_once_as_a_warning() -> None:
    world = World(policy="Suspend")
    world.settle()
    world.pod_runs()
    world.settle()
    world.pod_exits(5)
    told = [n for n in world.reconcile().events if n.reason == "HealthPolicy"]
    assert [n.type for n in told] == ["Warning"]


def test_suspend_set_to_true_and_back_goes_on() -> None:
    world = held_world()
    world.edit(suspend=True)
    assert condition(world.settle(), "Suspended").reason == "SuspendedByUser"
    world.edit(suspend=False)
    world.settle()
    assert (world.created, truth(world.status, "Suspended")) == ([1, 2], "False")


def test_suspend_set_and_unset_before_anyone_looked_goes_on_too() -> None:
    world = held_world()
    world.edit(suspend=True)
    world.edit(suspend=False)
    world.settle()
    assert world.created == [1, 2]


@pytest.mark.parametrize("policy", ["Warn", "Rollback"])
def test_another_policy_goes_on(policy: str) -> None:
    world = held_world()
    world.edit(policy=policy)
    world.settle()
    assert (world.created, world.status.state) == ([1, 2], "Pending")


def test_a_policy_changed_while_the_pod_ended_holds_nothing() -> None:
    world = World(policy="Suspend")
    world.settle()
    world.pod_runs()
    world.settle()
    world.edit(policy="Warn")
    world.pod_exits(5)
    world.settle()
    assert (world.created, world.status.restarts) == ([1, 2], 0)


def test_a_wiped_status_is_held_again_from_the_job_that_is_there() -> None:
    world = held_world()
    world.status = world.status.model_copy(
        update={"conditions": [], "attempt": 0, "child_uid": None}
    )
    world.settle()
    assert (condition(world.status, "Suspended").reason, world.created) == ("HealthPolicy", [1])


def test_a_second_suspension_is_held_anew() -> None:
    world = held_world()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    world.pod_runs()
    world.settle()
    world.pod_exits(5)
    world.settle()
    world.wait(hours=1)
    world.settle()
    assert (world.created, world.status.state) == ([1, 2], "Suspended")

"""Each condition against an independent reading of the world, in every state that is reached."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kubelora_api.report import FinalReport
from kubelora_api.status import CheckpointStatus, JobStatus, Progress
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Child, Unreachable
from tests.operator.decision.test_decide_accounts import running_world, told
from tests.operator.decision.test_decide_properties import HAPPENINGS, History
from tests.operator.world import UID, World, condition, make_snapshot, truth


def read_world(world: World) -> dict[str, bool]:
    """What each condition must say, from the cluster's objects and the user's wish alone."""
    current = world.children.get(world.status.attempt)
    pods = [p for p in world.pods if p.attempt == world.status.attempt]
    over = any(truth(world.status, kind) == "True" for kind in ("Complete", "Failed"))
    waits_in_queue = current is not None and current.live and current.suspended
    running = any(p.running and not p.deleting for p in pods)
    return {
        "Queued": waits_in_queue and not world.suspend and not over,
        "may run": running and current is not None and current.live,
        "may write": bool(world.writers()),
        "over": over,
    }


def check_conditions(world: World) -> None:
    status, found = world.status, read_world(world)
    said = {c.type: c.status == "True" for c in status.conditions}
    assert said.get("Queued", False) == found["Queued"], "Queued"
    if said.get("Running", False):
        assert not found["over"], "a finished job runs"
        assert world.pods, "Running without a pod"
    if found["may run"] and not world.suspend and not found["over"]:
        assert said.get("Running", False), "a pod runs and Running is False"
    if said.get("Suspended", False):
        assert not found["may write"], "suspended while a trainer may run"
        assert status.progress is None or status.progress.eta is None, "a suspended job has an ETA"
    finals = [k for k in ("Complete", "Failed", "Suspended", "Restarting") if said.get(k, False)]
    assert len(finals) <= 1, finals
    if found["over"]:
        true = {kind for kind, holds in said.items() if holds}
        assert true <= {"Accepted", "Complete", "Failed", "NumericallyHealthy"}, true
    assert status.observed_generation == world.generation
    held = condition(status, "Suspended").reason if said.get("Suspended", False) else ""
    for found_condition in status.conditions:
        if not (found_condition.type == "Suspended" and held):
            assert found_condition.observed_generation == world.generation, found_condition.type


@settings(max_examples=250, deadline=None)
@given(
    queue=st.sampled_from([None, "team-studio"]),
    policy=st.sampled_from(["Warn", "Suspend"]),
    sidecar=st.booleans(),
    happenings=st.lists(st.sampled_from(sorted(HAPPENINGS)), min_size=20, max_size=40),
)
def test_conditions_are_true_whenever_the_operator_has_looked(
    queue: str | None, policy: str, sidecar: bool, happenings: list[str]
) -> None:
    history = History(World(max_restarts=2, queue=queue, policy=policy, sidecar=sidecar))
    for happening in happenings:
        HAPPENINGS[happening](history)
        history.world.settle()
        check_conditions(history.world)


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_a_job_queued_by_hand_is_queued_no_longer_when_its_attempt_ends(code: int) -> None:
    world = running_world()
    world.children[1] = replace(world.children[1], suspended=True)
    assert truth(world.settle().status, "Queued") == "True"
    world.children[1] = replace(world.children[1], suspended=False)
    world.pod_exits(code)
    world.settle()
    assert truth(world.status, "Queued") == "False"


@pytest.mark.parametrize("code", [0, 2])
def test_a_change_of_a_finished_job_is_observed(code: int) -> None:
    world = running_world()
    world.pod_exits(code)
    world.settle()
    state = world.status.state
    world.edit(suspend=True)
    world.settle()
    assert (world.status.state, world.status.observed_generation) == (state, 2)
    assert {c.observed_generation for c in world.status.conditions} == {2}


def test_a_suspended_job_has_no_eta_and_names_its_last_checkpoint() -> None:
    world = running_world()
    world.status = world.status.model_copy(
        update={
            "progress": Progress(step=40, total_steps=100, eta="1h20m"),
            "checkpoint": CheckpointStatus(step=40, uri="pvc://adapters/x/step-000040"),
        }
    )
    world.edit(suspend=True)
    world.settle()
    last = CheckpointStatus(step=47, uri="pvc://adapters/x/step-000047")
    final = FinalReport(run_id=UID, attempt=1, exit_code=75, message="", step=47, checkpoint=last)
    world.pods = [replace(world.pods[0], exit_code=75, final=final)]
    world.settle()
    world.pods_end()
    world.settle()
    assert world.status.progress is not None
    assert (world.status.progress.eta, world.status.progress.step) == (None, 47)
    assert "the checkpoint of step 47" in condition(world.status, "Suspended").message


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_a_status_that_could_not_be_read_is_no_matter_of_an_ended_attempt(code: int) -> None:
    world = running_world()
    silent = replace(world.snapshot(), report=Unreachable("no answer"))
    world.wait(minutes=9)
    world.status = decide(silent, world.now).status
    assert condition(world.status, "NumericallyHealthy").reason == "StatusUnreachable"
    world.pod_exits(code)
    world.reconcile()
    health = condition(world.status, "NumericallyHealthy")
    assert (health.status, health.reason) == ("Unknown", "NoReport")


def test_a_finished_job_whose_status_is_observed_is_not_written_again() -> None:
    done = Child("bottles-0b5e7-1", "job-1", 1, state="complete")
    complete = told("Complete", "True", "TrainingDone")
    seen = make_snapshot(
        status=JobStatus(attempt=1, conditions=[complete], observed_generation=1), children=(done,)
    )
    first = decide(seen, running_world().now)
    again = decide(replace(seen, status=first.status), running_world().now)
    assert again.status == first.status

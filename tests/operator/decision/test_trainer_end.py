"""The end of an attempt whose pods run on, because a sidecar outlives the trainer; by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kubelora_api.report import FinalReport
from kubelora_api.status import Artifact
from kubelora_operator.controller.convert import pod_from
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Explanation, TrainerPod
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.decision.test_gang import FAILED, gang, running
from tests.operator.world import START, UID, World, condition, truth

ACTIVE = replace(FAILED, state="active", failure=None)


def seconds(count: int) -> timedelta:
    return timedelta(seconds=count)


def meshed_world(**fields: object) -> World:
    world = World(sidecar=True, **fields)  # type: ignore[arg-type]
    world.settle()
    world.pod_runs()
    world.settle()
    return world


def test_a_trainer_that_finished_beside_a_sidecar_completes_the_job_and_frees_its_gpu() -> None:
    world = meshed_world()
    world.wait(seconds=90)
    world.pod_exits(0)
    artifact = Artifact(uri="pvc://adapters/bottles/adapter/x.safetensors", sha256="ab", bytes=9)
    final = FinalReport(run_id=UID, attempt=1, exit_code=0, message="done", artifacts=[artifact])
    world.pods = [replace(world.pods[0], final=final)]
    world.settle()
    assert truth(world.status, "Complete") is None, "the Job controller has its moment first"
    world.wait(seconds=10)
    world.settle()
    assert (world.status.state, world.status.artifacts) == ("Complete", [artifact])
    assert (world.status.completion_time, world.status.active_seconds) == (
        "2026-03-01T12:01:30Z",
        90,
    )
    assert world.children == {}, "its Job is deleted, so that the sidecar ends"
    world.pods_end()
    world.wait(hours=9)
    world.settle()
    assert (world.status.state, world.created) == ("Complete", [1])


@pytest.mark.parametrize(
    ("code", "kind", "reason", "restarts"),
    [
        (2, "Failed", "ConfigurationError", 0),
        (3, "Failed", "NumericalFailure", 0),
        (1, "Restarting", "TrainerFailed", 1),
        (137, "Restarting", "TrainerFailed", 1),
        (4, "Restarting", "PeerLost", 1),
        (75, "Restarting", "Interrupted", 0),
    ],
)
def test_a_trainers_code_means_the_same_beside_a_sidecar(
    code: int, kind: str, reason: str, restarts: int
) -> None:
    world = meshed_world()
    world.pod_exits(code)
    world.wait(seconds=10)
    world.reconcile()
    assert condition(world.status, kind).reason == reason
    assert (truth(world.status, kind), world.status.restarts) == ("True", restarts)
    world.settle()
    assert world.children == {}, "its Job is deleted, so that the sidecar ends"
    world.pods_end()
    world.wait(hours=1)
    world.settle()
    assert world.created == ([1] if kind == "Failed" else [1, 2])


def test_a_policy_suspension_beside_a_sidecar_frees_the_gpu() -> None:
    world = meshed_world(policy="Suspend")
    world.pod_exits(5)
    world.wait(seconds=10)
    world.settle()
    assert condition(world.status, "Suspended").reason == "HealthPolicy"
    assert world.children == {}


def test_a_trainer_killed_for_its_memory_beside_a_sidecar_is_told_what_to_lower() -> None:
    world = meshed_world()
    world.pod_exits(137, out_of_memory=True)
    world.wait(seconds=10)
    world.reconcile()
    assert condition(world.status, "Restarting").reason == "OutOfMemory"


def test_the_trainers_own_state_is_read_from_a_pod_with_other_containers() -> None:
    document = pod_document(
        {
            "phase": "Running",
            "containerStatuses": [
                {"name": "istio-proxy", "ready": True, "state": {"running": {}}},
                {
                    "name": "trainer",
                    "state": {"terminated": {"exitCode": 0, "finishedAt": "2026-03-01T12:00:07Z"}},
                },
            ],
        }
    )
    found = pod_from(document, "bottles", UID, OWNERS)
    assert found is not None
    assert (found.exit_code, found.live, found.writing, found.running) == (0, True, False, False)


def over(index: int, code: int, after: int, **changes: object) -> TrainerPod:
    """A pod whose trainer ended some seconds after the start, beside a sidecar that runs on."""
    pod = running(index, running=False, exit_code=code, ended=START + seconds(after))
    return replace(pod, **changes)  # type: ignore[arg-type]


def test_a_gang_ends_when_all_its_trainers_have() -> None:
    waiting = gang(over(0, 0, 0), running(1), child=ACTIVE)
    assert truth(decide(waiting, START + seconds(59)).status, "Complete") is None
    both = gang(over(0, 0, 0), over(1, 0, 2), child=ACTIVE)
    assert truth(decide(both, START + seconds(9)).status, "Complete") is None
    assert truth(decide(both, START + seconds(10)).status, "Complete") == "True"


@pytest.mark.parametrize(("code", "kind"), [(0, "Complete"), (2, "Failed"), (1, "Restarting")])
def test_a_rank_that_never_ends_is_waited_for_a_minute(code: int, kind: str) -> None:
    stuck = gang(over(0, code, 0), running(1), child=ACTIVE)
    assert truth(decide(stuck, START + seconds(59)).status, kind) is None
    assert decide(stuck, START + seconds(59)).requeue_after == seconds(2)
    assert truth(decide(stuck, START + seconds(60)).status, kind) == "True"


def test_a_rank_other_than_the_first_that_ended_well_is_no_end() -> None:
    plan = decide(gang(running(0), over(1, 0, 0), child=ACTIVE), START + seconds(600))
    assert [truth(plan.status, k) for k in ("Complete", "Failed", "Restarting")] == [None] * 3


def test_a_sidecar_that_fails_takes_no_result_from_a_trainer_that_finished() -> None:
    failed = replace(FAILED, failure=Explanation("BackoffLimitExceeded", "reached the limit"))
    pods = (over(0, 0, 5, phase="Failed"), over(1, 0, 5))
    plan = decide(gang(*pods, child=failed), START + seconds(6))
    assert truth(plan.status, "Complete") == "True"


def test_a_job_deleted_after_its_trainer_finished_is_complete_and_not_run_again() -> None:
    seen = replace(gang(over(0, 0, 5, deleting=True), over(1, 0, 5, deleting=True)), children=())
    plan = decide(seen, START + seconds(6))
    assert (truth(plan.status, "Complete"), plan.create) == ("True", None)


def test_an_end_that_no_sidecar_hides_is_the_job_controllers_to_report() -> None:
    pods = (over(0, 1, 0, phase="Failed"), over(1, 4, 0, phase="Failed"))
    plan = decide(gang(*pods, child=ACTIVE), START + seconds(600))
    assert truth(plan.status, "Restarting") is None
    assert plan.delete == (), "its log is kept"

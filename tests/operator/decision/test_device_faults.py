"""Attempts that ended because memory ran out (exit code 6) or a GPU failed (exit code 7)."""

from dataclasses import replace

from kubelora_api.names import ExitCode
from kubelora_api.report import FinalReport
from kubelora_api.status import Cause, Finding, HealthStatus
from kubelora_operator.attempt.pod_spec import build_pod_spec
from kubelora_operator.decision.failure import avoid
from tests.operator.world import UID, World, condition, spec


def end_attempt(
    world: World,
    code: ExitCode,
    step: int,
    node: str = "gpu-1",
    health: HealthStatus | None = None,
) -> None:
    """Run the current attempt until its trainer exits with ``code`` after ``step`` steps."""
    world.settle()
    world.pod_runs()
    world.settle()
    world.wait(seconds=60)
    world.pod_exits(int(code))
    final = FinalReport(
        run_id=UID,
        attempt=world.status.attempt,
        exit_code=code,
        message="it is why.",
        step=step,
        health=health or HealthStatus(),
    )
    world.pods = [
        replace(p, final=final, node_name=node) if p.exit_code == code else p for p in world.pods
    ]
    world.settle()
    world.wait(hours=1)


def test_memory_that_runs_out_twice_after_the_same_step_is_final() -> None:
    world = World()
    end_attempt(world, ExitCode.OUT_OF_MEMORY, step=7)
    assert (world.status.restarts, world.status.out_of_memory_step) == (1, 7)
    end_attempt(world, ExitCode.OUT_OF_MEMORY, step=7)
    failed = condition(world.status, "Failed")
    assert (failed.status, failed.reason) == ("True", "OutOfMemory")
    assert failed.message == ("memory ran out twice after step 7, so it would again. it is why.")
    assert world.created == [1, 2]


def test_memory_that_runs_out_at_another_step_is_a_restart_that_counts() -> None:
    world = World()
    end_attempt(world, ExitCode.OUT_OF_MEMORY, step=7)
    end_attempt(world, ExitCode.OUT_OF_MEMORY, step=9)
    world.settle()
    assert (world.status.restarts, world.status.out_of_memory_step) == (2, 9)
    assert world.created == [1, 2, 3]


def test_a_failed_device_is_free_and_its_node_is_avoided() -> None:
    world = World()
    end_attempt(world, ExitCode.DEVICE, step=7, node="gpu-1")
    end_attempt(world, ExitCode.DEVICE, step=7, node="gpu-2")
    restarting = condition(world.status, "Restarting")
    assert world.status.restarts == 0
    assert world.status.avoided_nodes == ["gpu-1", "gpu-2"]
    assert restarting.reason in ("DeviceFailure", "Restarted")
    world.settle()
    assert world.created == [1, 2, 3]


def miscomputed(cause: Cause) -> HealthStatus:
    finding = Finding(
        name="GradientCorrupted", severity="critical", message="It jumped.", cause=cause
    )
    return HealthStatus(verdict="Critical", findings=[finding])


def test_a_device_that_computes_wrongly_costs_restarts_from_the_third_node_on() -> None:
    world = World()
    restarts = []
    for node in ("gpu-1", "gpu-2", "gpu-3"):
        end_attempt(world, ExitCode.DEVICE, step=7, node=node, health=miscomputed("Hardware"))
        restarts.append(world.status.restarts)
    restarting = condition(world.status, "Restarting")
    assert restarts == [0, 0, 1]
    assert world.status.avoided_nodes == ["gpu-1", "gpu-2", "gpu-3"]
    assert restarting.reason == "DeviceMiscomputes"


def test_another_cause_blames_no_device_for_its_results() -> None:
    world = World()
    for node in ("gpu-1", "gpu-2", "gpu-3"):
        end_attempt(world, ExitCode.DEVICE, step=7, node=node, health=miscomputed("Data"))
    assert world.status.restarts == 0


def test_a_device_that_fails_for_ever_does_not_restart_for_ever() -> None:
    world = World()
    for _ in range(60):
        if world.status.state == "Suspended":
            break
        end_attempt(world, ExitCode.DEVICE, step=7)
        world.wait(hours=-1, minutes=20)
    assert condition(world.status, "Suspended").reason == "FreeRestartsExceeded"
    assert len(world.created) == 51


def test_at_most_four_nodes_are_avoided_the_last_ones() -> None:
    nodes: list[str] = []
    for name in ("a", "b", "c", "b", "d", "e"):
        nodes = avoid(nodes, name)
    assert nodes == ["c", "b", "d", "e"]


def test_a_preference_against_nodes_keeps_the_jobs_own_affinity() -> None:
    own = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"x": 1}]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}],
        },
        "podAntiAffinity": {"y": 2},
    }
    pod = build_pod_spec(
        spec(podTemplate={"affinity": own}),
        attempt=2,
        child="bottles-0b5e7-2",
        trainer_image="trainer:1",
        avoided_nodes=["gpu-1"],
    )
    preferred = pod["affinity"]["nodeAffinity"].pop(
        "preferredDuringSchedulingIgnoredDuringExecution"
    )
    assert preferred[0] == {"weight": 1, "preference": {}}
    assert preferred[1] == {
        "weight": 100,
        "preference": {
            "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}]
        },
    }
    assert pod["affinity"]["podAntiAffinity"] == {"y": 2}
    assert "requiredDuringSchedulingIgnoredDuringExecution" in pod["affinity"]["nodeAffinity"]

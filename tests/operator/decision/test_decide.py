"""What the operator does about a job, one sentence at a time; values worked out by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kubelora_api.report import FinalReport, RunReport
from kubelora_api.status import Artifact, CheckpointStatus, Finding, HealthStatus, JobStatus
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Explanation, TrainerPod, Unreachable
from tests.operator.world import START, UID, World, condition, make_snapshot, spec, truth


def running_world(**fields: object) -> World:
    world = World(**fields)  # type: ignore[arg-type]
    world.settle()
    world.pod_runs()
    world.settle()
    return world


def report(**fields: object) -> RunReport:
    return RunReport.model_validate({"run_id": UID, "attempt": 1, "phase": "Training"} | fields)


def test_the_attempt_is_numbered_in_the_write_that_goes_before_its_creation() -> None:
    plan = decide(make_snapshot(), START)
    assert (plan.status.attempt, plan.create) == (1, 1)
    assert condition(plan, "Accepted").status == "True"
    assert plan.status.state == "Pending"
    assert plan.status.observed_generation == 1


def test_a_crash_between_the_write_and_the_creation_is_made_good() -> None:
    plan = decide(make_snapshot(status=JobStatus(attempt=3)), START)
    assert (plan.status.attempt, plan.create) == (3, 3)


def test_the_childs_uid_is_kept() -> None:
    world = World()
    world.settle()
    assert world.status.child_uid == world.children[1].uid


def test_a_pod_that_waits_tells_why_and_recovers() -> None:
    world = World()
    world.settle()
    why = Explanation("ClaimNotFound", "PersistentVolumeClaim photos does not exist")
    world.pods = [replace(world.pods[0], waiting=why)]
    plan = world.settle()
    assert condition(plan, "Running").status == "False"
    assert condition(plan, "Running").reason == "ClaimNotFound"
    assert plan.delete == ()
    world.pods = [replace(world.pods[0], waiting=None)]
    world.pod_runs()
    assert condition(world.settle(), "Running").status == "True"
    assert world.created == [1]


@pytest.mark.parametrize(("code", "reason"), [(2, "ConfigurationError"), (3, "NumericalFailure")])
def test_a_wrong_configuration_or_wrong_numbers_fail_once_and_are_not_retried(
    code: int, reason: str
) -> None:
    world = running_world(max_restarts=3)
    world.pod_exits(code)
    world.wait(hours=10)
    status = world.settle().status
    assert (condition(status, "Failed").reason, status.state) == (reason, "Failed")
    assert (world.created, status.restarts) == ([1], 0)


def test_the_trainers_last_sentence_is_the_message_of_the_failure() -> None:
    world = running_world()
    world.pod_exits(2)
    final = FinalReport(run_id=UID, attempt=1, exit_code=2, message="no image in /photos")
    world.pods = [replace(world.pods[0], final=final)]
    assert condition(world.settle(), "Failed").message == "no image in /photos"


@pytest.mark.parametrize("how", ["interrupted", "evicted", "pod deleted", "job deleted"])
def test_what_is_not_the_jobs_fault_costs_no_restart(how: str) -> None:
    world = running_world(max_restarts=0)
    match how:
        case "interrupted":
            world.pod_exits(75)
        case "evicted":
            world.pod_exits(137, evicted=True)
        case "pod deleted":
            world.delete_pod()
        case _:
            world.delete_child(1)
    world.settle()
    world.pods_end()
    world.wait(seconds=10 if how == "job deleted" else 0)
    world.settle()
    assert (world.created, world.status.attempt, world.status.restarts) == ([1, 2], 2, 0)


def test_a_new_attempt_waits_until_the_pods_of_the_old_one_are_gone() -> None:
    world = running_world()
    world.delete_child(1)
    world.wait(hours=1)
    assert world.settle().status.state == "Restarting"
    assert world.created == [1]
    world.pods_end()
    world.wait(seconds=10)
    world.settle()
    assert world.created == [1, 2]


def test_failures_count_with_growing_delay_until_the_limit() -> None:
    world = running_world(max_restarts=2)
    for restart, delay in ((1, 10), (2, 20)):
        world.pod_exits(1)
        plan = world.settle()
        assert plan.status.restarts == restart
        assert condition(plan, "Restarting").status == "True"
        assert plan.requeue_after == timedelta(seconds=delay)
        world.wait(seconds=delay - 1)
        world.settle()
        assert world.created[-1] == restart
        world.wait(seconds=1)
        world.settle()
        assert world.created[-1] == restart + 1
        assert truth(world.status, "Restarting") == "False"
        world.pod_runs()
        world.settle()
    world.pod_exits(1)
    status = world.settle().status
    assert condition(status, "Failed").reason == "MaxRestartsExceeded"
    assert "maxRestarts (2)" in condition(status, "Failed").message
    assert status.restarts == 2


def test_pods_that_are_interrupted_at_once_again_and_again_wait_longer_each_time() -> None:
    world = running_world()
    delays = []
    for _ in range(4):
        world.pod_exits(75)
        requeue_after = world.reconcile().requeue_after
        assert requeue_after is not None
        delays.append(requeue_after.total_seconds())
        world.wait(seconds=delays[-1])
        world.settle()
    # The first is at once, for no loop is known yet.
    assert delays == [0.0, 10.0, 20.0, 40.0]


def test_running_out_of_memory_counts_and_says_what_to_lower() -> None:
    world = running_world()
    world.pod_exits(137, out_of_memory=True)
    seen = replace(
        world.snapshot(),
        spec=spec(
            training={"steps": 100, "batchSize": 4},
            podTemplate={"resources": {"limits": {"memory": "48Gi"}}},
        ),
    )
    plan = decide(seen, world.now)
    message = condition(plan, "Restarting").message
    assert plan.status.restarts == 1
    assert "48Gi" in message
    assert "training.batchSize (now 4)" in message


def test_suspend_ends_the_pods_first_and_resuming_is_a_new_attempt() -> None:
    world = running_world()
    world.suspend = True
    plan = world.reconcile()
    assert [c.attempt for c in plan.delete] == [1]
    assert world.settle().status.state == "Suspending"
    assert truth(world.status, "Suspended") == "False"
    world.pods_end()
    assert world.settle().status.state == "Suspended"
    assert "set it to false" in condition(world.status, "Suspended").message
    world.suspend = False
    world.settle()
    assert (world.created, world.status.restarts) == ([1, 2], 0)
    assert truth(world.status, "Suspended") == "False"


def test_suspended_from_the_start_nothing_is_created_until_it_is_resumed() -> None:
    world = World(suspend=True)
    assert world.settle().status.state == "Suspended"
    assert world.created == []
    world.suspend = False
    world.settle()
    assert (world.created, world.status.attempt) == ([1], 1)


def test_a_failure_while_suspending_is_counted_once() -> None:
    world = running_world()
    world.pod_exits(1)
    world.suspend = True
    world.settle()
    world.suspend = False
    world.settle()
    assert (world.status.restarts, world.created) == (1, [1, 2])


def test_an_invalid_job_has_no_child_and_says_what_is_wrong() -> None:
    seen = make_snapshot(spec=None, problems=("spec.adapter.rank: must be at least 1, found 0",))
    plan = decide(seen, START)
    assert (plan.create, plan.status.attempt, plan.status.state) == (None, 0, "Invalid")
    accepted = condition(plan, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert "spec.adapter.rank: must be at least 1" in accepted.message


def test_lossy_precision_is_accepted_aloud() -> None:
    lossy = {"accumulator": "bf16", "allowLossyPrecision": True}
    plan = decide(make_snapshot(spec=spec(precision=lossy)), START)
    accepted = condition(plan, "Accepted")
    assert (accepted.status, accepted.reason) == ("True", "LossyPrecision")
    assert "precision.accumulator is bf16" in accepted.message
    assert [n.reason for n in plan.events if n.type == "Warning"] == ["LossyPrecision"]


def test_complete_publishes_the_artifacts_and_a_full_progress() -> None:
    world = running_world()
    world.wait(seconds=90)
    world.pod_exits(0)
    artifact = Artifact(uri="pvc://adapters/bottles/adapter/x.safetensors", sha256="ab", bytes=9)
    final = FinalReport(
        run_id=UID,
        attempt=1,
        exit_code=0,
        message="100 steps",
        step=100,
        total_steps=100,
        health=HealthStatus(verdict="Healthy"),
        artifacts=[artifact],
    )
    world.pods = [replace(world.pods[0], final=final)]
    world.wait(seconds=30)
    status = world.settle().status
    assert (status.state, status.artifacts) == ("Complete", [artifact])
    assert status.progress is not None
    assert (status.progress.percent, status.progress.step) == ("100%", 100)
    assert status.completion_time == "2026-03-01T12:01:30Z"
    assert status.active_seconds == 90
    assert truth(status, "NumericallyHealthy") == "True"


def test_a_complete_job_stays_complete_when_its_job_is_deleted() -> None:
    world = running_world()
    world.pod_exits(0)
    world.settle()
    world.delete_child(1)
    world.wait(hours=1)
    plan = world.settle()
    assert (plan.status.state, world.created, plan.create) == ("Complete", [1], None)


def test_a_wiped_status_is_rebuilt_from_the_job_that_is_there() -> None:
    world = running_world()
    world.status = JobStatus()
    status = world.settle().status
    assert (status.attempt, status.child_uid) == (1, world.children[1].uid)
    assert world.created == [1]


def test_with_status_and_job_gone_the_config_map_keeps_a_job_from_running_again() -> None:
    world = running_world()
    world.pod_exits(0)
    world.settle()
    world.delete_child(1)
    world.status = JobStatus()
    status = world.settle().status
    assert (condition(status, "Failed").reason, world.created) == ("StateLost", [1])


def test_queued_is_read_from_the_jobs_own_suspend() -> None:
    world = World(queue="team-studio")
    status = world.settle().status
    queued = condition(status, "Queued")
    assert (status.state, queued.status, queued.reason) == ("Queued", "True", "WaitingForAdmission")
    assert "team-studio" in queued.message
    world.admit()
    world.pod_runs()
    status = world.settle().status
    assert (status.state, truth(status, "Queued")) == ("Running", "False")
    world.preempt()
    assert world.settle().status.state == "Queued"
    assert (world.created, world.status.attempt) == ([1], 1)


def test_progress_comes_from_the_pods_report() -> None:
    world = running_world()
    told = report(step=42, total_steps=100, loss=0.125, seconds_left=4800.0)
    plan = decide(replace(world.snapshot(), report=told), world.now)
    progress = plan.status.progress
    assert progress is not None
    assert (progress.step, progress.percent, progress.eta) == (42, "42%", "1h20m")
    assert progress.estimated_completion_time == "2026-03-01T13:20:00Z"
    assert (progress.loss, condition(plan, "Running").reason) == (0.125, "Training")


def test_a_pod_that_can_not_be_asked_is_no_failure() -> None:
    world = running_world()
    silent = Unreachable("no answer")
    early = decide(replace(world.snapshot(), report=silent), world.now + timedelta(seconds=60))
    assert condition(early, "Running").reason == "TrainerStarting"
    late = decide(replace(world.snapshot(), report=silent), world.now + timedelta(seconds=600))
    running = condition(late, "Running")
    assert (running.status, running.reason) == ("True", "StatusUnreachable")
    assert late.status.state == "Running"


def test_critical_findings_make_a_job_numerically_unhealthy() -> None:
    world = running_world()
    finding = Finding(name="UpdatesLost", severity="critical", message="Updates vanish.")
    told = report(health={"verdict": "Critical", "findings": [finding.model_dump()]})
    healthy = condition(
        decide(replace(world.snapshot(), report=told), world.now), "NumericallyHealthy"
    )
    assert (healthy.status, healthy.reason) == ("False", "UpdatesLost")
    assert healthy.message == "Updates vanish."


def test_the_checkpoint_outlives_a_report_that_names_none() -> None:
    world = running_world()
    kept = CheckpointStatus(step=50, uri="pvc://adapters/bottles/checkpoints/step-000050")
    world.status = world.status.model_copy(update={"checkpoint": kept})
    plan = decide(replace(world.snapshot(), report=report(step=60)), world.now)
    assert plan.status.checkpoint == kept


def test_what_the_api_server_refuses_stands_in_the_condition_until_it_is_taken() -> None:
    world = World()
    world.status = decide(world.snapshot(), world.now).status
    refused = Explanation(
        "Rejected", "the API server rejected the attempt's objects: exceeded quota"
    )
    world.status = decide(replace(world.snapshot(), rejection=refused), world.now).status
    again = decide(world.snapshot(), world.now)
    assert condition(again, "Running").reason == "Rejected"
    assert (again.create, again.status) == (1, world.status)


def test_a_live_job_of_another_attempt_is_deleted_before_a_result_is_published() -> None:
    world = running_world()
    world.pod_exits(0)
    stray = replace(world.children[1], attempt=7, uid="stray", state="active")
    pod = TrainerPod("stray-pod", "p", 7, phase="Running", running=True)
    seen = replace(
        world.snapshot(), children=(world.children[1], replace(stray, attempt=0)), pods=(pod,)
    )
    plan = decide(seen, world.now)
    assert [c.uid for c in plan.delete] == ["stray"]
    assert truth(plan.status, "Complete") is None


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    plan = decide(make_snapshot(deleting=True), START)
    assert (plan.status, plan.create, plan.delete) == (JobStatus(), None, ())


def test_only_the_last_three_attempts_keep_their_jobs() -> None:
    world = running_world(max_restarts=9)
    for _ in range(4):
        world.pod_exits(1)
        world.settle()
        world.wait(minutes=10)
        world.settle()
        world.pod_runs()
        world.settle()
    assert world.created == [1, 2, 3, 4, 5]
    assert sorted(world.children) == [3, 4, 5]

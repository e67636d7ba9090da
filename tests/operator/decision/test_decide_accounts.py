"""How an attempt's end is accounted for, and what the status then says; values by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kubelora_api.report import FinalReport
from kubelora_api.status import CheckpointStatus, Condition, CountedRun, HealthStatus, JobStatus
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan_builder import REQUEUE_SOON
from kubelora_operator.decision.snapshot import Child, Explanation, TrainerPod
from tests.operator.world import START, UID, World, condition, make_snapshot, truth

AT = "2026-03-01T12:00:00Z"
STRAY_POD = TrainerPod("stray", "stray", 0, phase="Running", running=True)


def told(kind: str, truth: str, reason: str, at: str = AT) -> Condition:
    return Condition.model_validate(
        {"type": kind, "status": truth, "reason": reason, "message": "", "lastTransitionTime": at}
    )


def running_world(**fields: object) -> World:
    world = World(**fields)  # type: ignore[arg-type]
    world.settle()
    world.pod_runs()
    world.settle()
    return world


def final(code: int, **fields: object) -> FinalReport:
    blank = {"run_id": UID, "attempt": 1, "exit_code": code, "message": "so it ended"}
    return FinalReport.model_validate(blank | fields)


# ---- what was there before the operator looked ----


def test_a_newer_job_than_the_status_knows_is_the_current_attempt() -> None:
    newer = Child("bottles-0b5e7-3", "job-3", 3)
    plan = decide(make_snapshot(status=JobStatus(attempt=1), children=(newer,)), START)
    assert (plan.status.attempt, plan.status.child_uid, plan.delete) == (3, "job-3", ())


def test_a_wiped_status_goes_on_with_the_newest_of_several_jobs() -> None:
    old = Child("bottles-0b5e7-1", "job-1", 1, state="failed", finished=START)
    new = Child("bottles-0b5e7-2", "job-2", 2)
    plan = decide(make_snapshot(children=(old, new)), START)
    assert (plan.status.attempt, plan.status.child_uid, plan.create) == (2, "job-2", None)


def test_the_start_time_is_the_first_attempts() -> None:
    world = running_world()
    assert world.status.start_time == AT
    world.pod_exits(1)
    world.settle()
    world.wait(hours=1)
    world.settle()
    assert world.created == [1, 2]
    assert world.status.start_time == AT


def test_a_job_found_without_a_start_time_started_when_it_was_found() -> None:
    child = Child("bottles-0b5e7-1", "job-1", 1)
    plan = decide(make_snapshot(children=(child,)), START)
    assert plan.status.start_time == AT


def test_the_start_time_is_written_before_anything_is_created() -> None:
    plan = decide(make_snapshot(), START)
    assert (plan.create, plan.status.start_time) == (1, AT)


# ---- a result ----


def test_a_job_that_is_done_before_its_uid_was_noted_is_complete() -> None:
    done = Child("bottles-0b5e7-1", "job-1", 1, state="complete", finished=START)
    status = decide(make_snapshot(status=JobStatus(attempt=1), children=(done,)), START).status
    assert (status.child_uid, status.state) == ("job-1", "Complete")


def test_a_result_untells_what_was_told_of_earlier_attempts() -> None:
    conditions = [
        told("Suspended", "False", "Suspending"),
        told("Restarting", "False", "Restarted"),
    ]
    done = Child("bottles-0b5e7-1", "job-1", 1, state="complete", finished=START)
    failed = replace(
        done, state="failed", failure=Explanation("PodFailurePolicy", "with exit code 2")
    )
    for child, reason in ((done, "Complete"), (failed, "Failed")):
        status = JobStatus(attempt=1, child_uid="job-1", conditions=conditions)
        if child is failed:
            failure = Explanation("PodFailurePolicy", "Container trainer failed with exit code 2")
            child = replace(child, failure=failure)
        plan = decide(make_snapshot(status=status, children=(child,)), START)
        assert plan.status.state == reason
        for kind in ("Suspended", "Restarting"):
            assert condition(plan, kind).status == "False"
            assert condition(plan, kind).reason == reason


@pytest.mark.parametrize(
    ("health", "report", "status", "reason"),
    [
        (HealthStatus(verdict="Healthy"), False, "True", "Healthy"),
        (None, True, "Unknown", "NoReport"),
        (None, False, None, None),
    ],
)
def test_a_complete_job_is_judged_by_its_last_known_health(
    health: HealthStatus | None, report: bool, status: str | None, reason: str | None
) -> None:
    done = Child("bottles-0b5e7-1", "job-1", 1, state="complete", finished=START)
    pod = TrainerPod("p", "p", 1, phase="Succeeded", exit_code=0, final=final(0))
    unreachable = [told("NumericallyHealthy", "Unknown", "StatusUnreachable")]
    before = JobStatus(attempt=1, health=health, conditions=unreachable if health else [])
    seen = make_snapshot(status=before, children=(done,), pods=(pod,) if report else ())
    after = decide(seen, START).status
    assert truth(after, "NumericallyHealthy") == status
    if reason:
        assert condition(after, "NumericallyHealthy").reason == reason


@pytest.mark.parametrize(
    ("verdict", "status"), [("Critical", "False"), ("Healthy", "True"), ("Unknown", None)]
)
def test_a_failed_job_is_judged_by_its_last_known_health(verdict: str, status: str | None) -> None:
    failure = Explanation("PodFailurePolicy", "Container trainer failed with exit code 3")
    child = Child("bottles-0b5e7-1", "job-1", 1, "failed", failure=failure, finished=START)
    health = HealthStatus.model_validate({"verdict": verdict})
    before = JobStatus(attempt=1, health=health)
    after = decide(make_snapshot(status=before, children=(child,)), START).status
    assert after.state == "Failed"
    assert truth(after, "NumericallyHealthy") == status


@pytest.mark.parametrize("over", ["Complete", "Failed"])
def test_a_finished_job_ends_strays_that_turn_up_later(over: str) -> None:
    stray = Child("bottles-0b5e7-1", "job-1", 1)
    status = JobStatus(attempt=1, conditions=[told(over, "True", "X")])
    plan = decide(make_snapshot(status=status, children=(stray,)), START)
    assert (plan.delete, plan.requeue_after) == ((stray,), REQUEUE_SOON)
    gone = replace(stray, deleting=True)
    plan = decide(make_snapshot(status=status, children=(gone,)), START)
    assert (plan.delete, plan.requeue_after) == ((), REQUEUE_SOON)
    assert decide(make_snapshot(status=status), START).requeue_after is None


# ---- an end that is not the last ----


def test_time_of_running_is_summed_over_attempts_up_to_each_end() -> None:
    world = running_world()
    world.wait(seconds=60)
    world.pod_exits(1)
    world.wait(seconds=5)  # the operator looks later than it happened
    world.settle()
    assert world.status.active_seconds == 60
    world.wait(minutes=1)
    world.settle()
    world.pod_runs()
    world.settle()
    world.wait(seconds=30)
    world.pod_exits(0)
    world.wait(seconds=5)
    world.settle()
    assert world.status.active_seconds == 90


def test_a_clock_that_went_back_takes_no_running_time_away() -> None:
    failure = Explanation("BackoffLimitExceeded", "")
    early = START - timedelta(hours=1)
    child = Child("bottles-0b5e7-1", "job-1", 1, "failed", failure=failure, finished=early)
    status = JobStatus(
        attempt=1, active_seconds=7, conditions=[told("Running", "True", "Training")]
    )
    after = decide(make_snapshot(status=status, children=(child,)), START).status
    assert after.active_seconds == 7


def test_a_free_restart_is_taken_although_the_limit_was_lowered_below_what_is_used() -> None:
    world = running_world(max_restarts=0)
    world.status = world.status.model_copy(update={"restarts": 2})
    world.pod_exits(75)
    status = world.reconcile().status
    assert (truth(status, "Failed"), truth(status, "Restarting")) == (None, "True")
    assert condition(status, "Restarting").message.endswith("(not counted against maxRestarts)")


def test_a_counted_restart_says_how_many_are_left() -> None:
    world = running_world(max_restarts=2)
    world.pod_exits(1)
    message = condition(world.reconcile(), "Restarting").message
    assert message.startswith("attempt 1 ended: the trainer ended with exit code 1")
    assert message.endswith("(restart 1 of 2)")


def test_the_last_word_of_an_interrupted_attempt_is_kept() -> None:
    world = running_world()
    world.pod_exits(75)
    at = CheckpointStatus(step=42, uri="pvc://adapters/bottles/checkpoints/step-000042")
    first = replace(world.pods[0], final=final(75, step=41, total_steps=100))
    last = replace(first, final=final(75, step=42, total_steps=100, checkpoint=at))
    other = replace(first, attempt=7, final=final(75, step=9, total_steps=100))
    seen = replace(world.snapshot(), pods=(first, last, other))
    status = decide(seen, world.now).status
    assert status.progress is not None
    assert (status.progress.step, status.progress.percent) == (42, "42%")
    assert status.checkpoint == at


def test_an_end_is_counted_once_while_a_stray_keeps_a_suspended_job_waiting() -> None:
    world = running_world()
    world.pod_exits(1)
    world.suspend = True
    world.pods.append(STRAY_POD)
    for _ in range(3):
        status = world.reconcile().status
        assert status.restarts == 1
        assert truth(status, "Suspended") != "True"
    world.pods.remove(STRAY_POD)
    assert world.settle().status.state == "Suspended"
    assert world.status.restarts == 1


def test_a_job_suspended_when_its_pod_ends_is_suspended_at_once() -> None:
    world = running_world()
    world.pod_exits(75)
    world.suspend = True
    plan = world.reconcile()
    assert plan.status.state == "Suspended"
    assert [(n.type, n.reason) for n in plan.events] == [("Normal", "SuspendedByUser")]


@pytest.mark.parametrize(
    ("reason", "restarts", "attempt", "seconds"),
    [
        # free: doubles from the second free end on
        ("Interrupted", 1, 1, 0),
        ("Disrupted", 2, 2, 10),
        ("PodDeleted", 2, 3, 10),
        ("NodeFailure", 3, 3, 20),
        ("Unschedulable", 50, 50, 600),
        # counted: doubles with every restart, at most 10 minutes
        ("TrainerFailed", 1, 1, 10),
        ("OutOfMemory", 2, 5, 20),
        ("TrainerFailed", 9, 9, 600),
    ],
)
def test_the_delay_before_the_next_attempt(
    reason: str, restarts: int, attempt: int, seconds: int
) -> None:
    conditions = [told("Restarting", "True", reason)]
    status = JobStatus(
        attempt=attempt, restarts=restarts, free_restarts=restarts, conditions=conditions
    )
    ended = Child(
        f"bottles-0b5e7-{attempt}",
        "job",
        attempt,
        "failed",
        started=START - timedelta(minutes=1),
        finished=START,
    )
    seen = make_snapshot(status=status, children=(ended,))
    if seconds:
        early = decide(seen, START + timedelta(seconds=seconds - 1))
        assert (early.create, early.requeue_after) == (None, timedelta(seconds=1))
    due = decide(seen, START + timedelta(seconds=seconds))
    assert due.create == attempt + 1
    late = decide(seen, START + timedelta(days=9))
    assert (late.create, late.requeue_after) == (attempt + 1, None)


def test_the_wait_of_an_end_that_is_long_over_is_nothing() -> None:
    world = running_world()
    world.pod_exits(1)
    world.children[1] = replace(world.children[1], finished=START)
    world.status = world.status.model_copy(
        update={"conditions": [told("Restarting", "True", "TrainerFailed", "2026-02-01T12:00:00Z")]}
    )
    assert decide(world.snapshot(), world.now).create == 2


def test_the_wait_of_a_free_end_within_a_second_is_not_negative() -> None:
    world = running_world()
    world.wait(milliseconds=700)  # conditions are stamped with whole seconds
    world.pod_exits(75)
    assert world.reconcile().requeue_after == timedelta()


def test_a_resumed_job_does_not_wait_for_a_restart_that_is_over() -> None:
    conditions = [
        told("Restarting", "False", "Suspended"),
        told("Suspended", "True", "SuspendedByUser"),
    ]
    status = JobStatus(attempt=1, restarts=1, conditions=conditions)
    assert decide(make_snapshot(status=status), START).create == 2


def test_a_new_attempt_forgets_the_uid_of_the_old_ones_job() -> None:
    conditions = [told("Restarting", "True", "Interrupted")]
    status = JobStatus(attempt=1, child_uid="job-1", conditions=conditions)
    plan = decide(make_snapshot(status=status), START + timedelta(seconds=10))
    assert (plan.status.attempt, plan.status.child_uid) == (2, None)


def test_a_job_that_became_unreadable_is_not_begun_again() -> None:
    status = JobStatus(attempt=1, conditions=[told("Restarting", "True", "Interrupted")])
    plan = decide(make_snapshot(spec=None, status=status), START)
    assert (plan.status.attempt, plan.create) == (1, None)
    assert truth(plan.status, "Restarting") == "True"


@pytest.mark.parametrize("reason", ["Rejected", "NameTaken"])
def test_a_refusal_stays_until_the_objects_are_taken(reason: str) -> None:
    status = JobStatus(attempt=1, conditions=[told("Running", "False", reason)])
    plan = decide(make_snapshot(status=status), START)
    assert (condition(plan, "Running").reason, plan.create) == (reason, 1)


# ---- suspension ----


def test_suspending_deletes_each_job_once_and_keeps_looking() -> None:
    ending = Child("bottles-0b5e7-2", "job-2", 2, deleting=True)
    current = replace(ending, deleting=False)
    stray = Child("bottles-0b5e7-1", "job-1", 1)
    old = Child("bottles-0b5e7-0", "job-0", -1, state="failed", finished=START)
    status = JobStatus(attempt=2, child_uid="job-2")
    seen = make_snapshot(suspend=True, status=status, children=(current, stray, old))
    plan = decide(seen, START)
    assert sorted(c.uid for c in plan.delete) == ["job-0", "job-1", "job-2"]
    assert plan.requeue_after == REQUEUE_SOON
    seen = make_snapshot(suspend=True, status=status, children=(ending,))
    plan = decide(seen, START)
    assert (plan.delete, plan.requeue_after) == ((), REQUEUE_SOON)


def test_a_suspended_job_waits_for_no_queue_and_runs_no_longer() -> None:
    conditions = [
        told("Queued", "True", "WaitingForAdmission"),
        told("Restarting", "True", "Interrupted"),
        told("Running", "True", "Training", "2026-03-01T11:59:00Z"),
    ]
    at = CheckpointStatus(step=42, uri="pvc://adapters/bottles/checkpoints/step-000042")
    run = CountedRun(attempt=1, uid="pod-1", start_time="2026-03-01T11:59:00Z", seconds=0)
    status = JobStatus(attempt=1, conditions=conditions, checkpoint=at, counted_run=run)
    plan = decide(make_snapshot(suspend=True, status=status), START)
    assert {c.type: c.status for c in plan.status.conditions if c.type != "Accepted"} == {
        "Queued": "False",
        "Running": "False",
        "Suspended": "True",
        "Restarting": "False",
    }
    assert plan.status.active_seconds == 60
    assert condition(plan, "Suspended").message == (
        "spec.suspend is true; set it to false to resume from the checkpoint of step 42"
    )


@pytest.mark.parametrize(
    ("attempt", "ending"), [(0, "to start training"), (1, "to resume from the last checkpoint")]
)
def test_a_suspended_job_says_from_where_it_will_go_on(attempt: int, ending: str) -> None:
    conditions = [told("Suspended", "True", "SuspendedByUser")] if attempt else []
    status = JobStatus(attempt=attempt, conditions=conditions)
    plan = decide(make_snapshot(suspend=True, status=status), START)
    assert condition(plan, "Suspended").message.endswith(f"set it to false {ending}")


def test_a_suspension_taken_back_while_the_pods_end_is_a_new_attempt_free_of_charge() -> None:
    world = running_world()
    world.suspend = True
    world.reconcile()
    world.suspend = False
    assert world.reconcile().create is None
    world.pods_end()
    world.settle()
    assert (world.created, world.status.restarts) == ([1, 2], 0)
    assert condition(world.status, "Suspended").reason == "Resumed"

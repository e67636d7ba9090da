"""What the status says of an attempt whose Job has not ended; values by hand."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from kubelora_api.report import RunReport
from kubelora_api.status import CountedRun, JobStatus
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan_builder import REQUEUE_SOON
from kubelora_operator.decision.snapshot import (
    Child,
    Explanation,
    Snapshot,
    TrainerPod,
    Unreachable,
)
from tests.operator.decision.test_decide_accounts import told
from tests.operator.world import START, UID, condition, make_snapshot, truth

JOB = Child("bottles-0b5e7-1", "job-1", 1)
POD = TrainerPod("bottles-0b5e7-1-0", "pod-1", 1, phase="Running", running=True, since=START)
FIRST = JobStatus(attempt=1, child_uid="job-1")
MINUTES = timedelta(minutes=1)


def view(*pods: TrainerPod, child: Child = JOB, **changes: object) -> Snapshot:
    return make_snapshot(**({"status": FIRST, "children": (child,), "pods": pods} | changes))


def test_a_running_pod_is_looked_at_at_the_interval_that_was_asked_for() -> None:
    plan = decide(view(POD), START, poll=timedelta(seconds=7))
    assert plan.requeue_after == timedelta(seconds=7)
    assert (condition(plan, "Running").status, plan.status.state) == ("True", "Running")


def test_a_pod_that_starts_is_looked_at_now_and_then() -> None:
    plan = decide(view(replace(POD, phase="Pending", running=False)), START)
    assert plan.requeue_after == timedelta(seconds=30)
    assert condition(plan, "Running").message == "the pod's container is being created"
    assert condition(decide(view(), START), "Running").message == "no pod exists yet"


def test_the_pod_that_counts_is_the_one_that_neither_ended_nor_ends() -> None:
    ended = replace(POD, name="ended", phase="Failed", running=False, exit_code=1)
    ending = replace(POD, name="ending", deleting=True)
    message = condition(decide(view(POD, ended, ending), START), "Running").message
    assert message == f"pod {POD.name} is loading the model and the data"
    for other in (ended, ending):
        plan = decide(view(other), START)
        assert [c.type for c in plan.status.conditions] == ["Accepted"]
        assert plan.requeue_after == REQUEUE_SOON


def test_a_pod_of_another_attempt_is_not_taken_for_the_current_ones() -> None:
    stray = replace(POD, attempt=0)
    assert condition(decide(view(stray), START), "Running").message == "no pod exists yet"


def test_a_refusal_is_told_while_there_is_no_pod() -> None:
    refused = Explanation("Rejected", "exceeded quota")
    assert condition(decide(view(rejection=refused), START), "Running").reason == "Rejected"


def test_a_job_that_someone_deletes_is_waited_for_and_told_as_it_was() -> None:
    running = FIRST.model_copy(update={"conditions": [told("Running", "True", "Training")]})
    plan = decide(view(POD, child=replace(JOB, deleting=True), status=running), START)
    assert (plan.requeue_after, plan.delete, plan.create) == (REQUEUE_SOON, (), None)
    assert condition(plan, "Running").reason == "Training"


def test_a_job_under_way_is_neither_restarting_nor_suspended() -> None:
    conditions = [told("Restarting", "True", "Interrupted"), told("Suspended", "False", "X")]
    # An operator that died between creating the Job and noting so left Restarting True.
    status = FIRST.model_copy(update={"conditions": conditions[1:]})
    plan = decide(view(POD, status=status), START)
    assert condition(plan, "Suspended").reason == "Resumed"
    status = FIRST.model_copy(
        update={"conditions": [conditions[0].model_copy(update={"status": "False"})]}
    )
    plan = decide(view(POD, status=status), START)
    assert condition(plan, "Restarting").reason == "Restarted"


def test_time_in_a_queue_is_not_time_of_running() -> None:
    run = CountedRun(attempt=1, uid="pod-1", start_time="2026-03-01T12:00:00Z", seconds=60)
    running = FIRST.model_copy(
        update={
            "conditions": [told("Running", "True", "Training")],
            "active_seconds": 60,
            "counted_run": run,
        }
    )
    preempted = replace(JOB, suspended=True, queue="team-studio")
    plan = decide(view(child=preempted, status=running), START + 2 * MINUTES)
    assert (truth(plan.status, "Running"), plan.status.active_seconds) == ("False", 120)
    later = decide(view(child=preempted, status=plan.status), START + 9 * MINUTES)
    assert later.status.active_seconds == 120


def test_a_job_that_was_suspended_by_hand_says_where_to_resume_it() -> None:
    queued = condition(decide(view(child=replace(JOB, suspended=True)), START), "Queued")
    assert (queued.status, queued.reason) == ("True", "JobSuspended")
    assert queued.message == (
        "Job bottles-0b5e7-1 was suspended, but not by the operator: set its spec.suspend to false"
    )


@pytest.mark.parametrize("since", [None, START])
def test_a_silent_pod_makes_its_health_unknown(since: datetime | None) -> None:
    healthy = [told("NumericallyHealthy", "True", "Healthy")]
    status = FIRST.model_copy(update={"conditions": healthy})
    seen = view(replace(POD, since=since), status=status, report=Unreachable("no answer"))
    plan = decide(seen, START + 5 * MINUTES)
    for kind, truth_told in (("Running", "True"), ("NumericallyHealthy", "Unknown")):
        found = condition(plan, kind)
        assert (found.status, found.reason) == (truth_told, "StatusUnreachable")
        assert found.message.endswith("its status can't be read: no answer")


@pytest.mark.parametrize("reason", ["Training", "StatusUnreachable"])
def test_what_a_pod_told_stands_until_it_is_asked_again(reason: str) -> None:
    status = FIRST.model_copy(update={"conditions": [told("Running", "True", reason)]})
    assert condition(decide(view(POD, status=status), START), "Running").reason == reason


def test_a_pod_that_runs_again_after_a_stop_begins_by_loading() -> None:
    status = FIRST.model_copy(update={"conditions": [told("Running", "False", "Training")]})
    running = condition(decide(view(POD, status=status), START), "Running")
    assert (running.status, running.reason) == ("True", "TrainerStarting")


def test_a_report_is_put_into_the_status_with_its_verdict() -> None:
    report = RunReport.model_validate(
        {"run_id": UID, "attempt": 1, "phase": "Training", "step": 3, "total_steps": 4}
        | {"health": {"verdict": "Healthy"}}
    )
    plan = decide(view(POD, report=report), START)
    assert plan.status.progress is not None
    assert plan.status.progress.percent == "75%"
    assert truth(plan.status, "NumericallyHealthy") == "True"

"""Promises about a single decision, whatever the operator sees: also what should never be there.

The histories of `test_decide_properties` reach what a cluster does by itself. Here every mix of
Jobs, pods and a status is looked at, such as two attempts alive at once or a status that someone
edited, for one decision on such a view must do no harm either.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

import hypothesis.strategies as st
from hypothesis import example, given, settings

from kubelora_api.status import Condition, JobStatus
from kubelora_operator.decision.conditions import TYPES
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan import ReconcilePlan
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod
from tests.operator.world import START, make_snapshot, spec, truth

ATTEMPTS = st.integers(0, 3)
REASONS = ("Starting", "Suspending", "SuspendedByUser", "TrainerFailed", "Disrupted", "Rejected")
FAILURES = (
    Explanation(
        "PodFailurePolicy", "Container trainer failed with exit code 2 matching FailJob rule"
    ),
    Explanation("PodFailurePolicy", "Pod x has condition DisruptionTarget matching FailJob rule"),
    Explanation("BackoffLimitExceeded", "Job has reached the specified backoff limit"),
)


STATES: tuple[Literal["active", "complete", "failed"], ...] = ("active", "complete", "failed")


@st.composite
def children(draw: st.DrawFn) -> tuple[Child, ...]:
    return tuple(
        Child(
            name=f"bottles-0b5e7-{attempt}",
            uid=f"job-{attempt}",
            attempt=attempt,
            state=(state := draw(st.sampled_from(STATES))),
            deleting=draw(st.booleans()),
            suspended=state == "active" and draw(st.booleans()),
            failure=draw(st.sampled_from(FAILURES)) if state == "failed" else None,
            started=START - timedelta(minutes=10),
            finished=None if state == "active" else START - timedelta(minutes=1),
        )
        for attempt in draw(st.lists(ATTEMPTS, unique=True, max_size=3))
    )


@st.composite
def pods(draw: st.DrawFn) -> tuple[TrainerPod, ...]:
    found = []
    for number in range(draw(st.integers(0, 2))):
        phase = draw(st.sampled_from(("Pending", "Running", "Succeeded", "Failed")))
        found.append(
            TrainerPod(
                name=f"pod-{number}",
                uid=f"pod-{number}",
                attempt=draw(ATTEMPTS),
                phase=phase,
                running=phase == "Running",
                deleting=draw(st.booleans()),
                exit_code={"Succeeded": 0, "Failed": draw(st.sampled_from((1, 2, 75)))}.get(phase),
            )
        )
    return tuple(found)


@st.composite
def conditions(draw: st.DrawFn) -> list[Condition]:
    told = draw(st.lists(st.sampled_from(TYPES), unique=True))
    return [
        Condition(
            type=kind,
            status=draw(st.sampled_from(("True", "False"))),
            reason=draw(st.sampled_from(REASONS)),
            message="",
            last_transition_time="2026-03-01T11:00:00Z",
        )
        for kind in told
    ]


@st.composite
def views(draw: st.DrawFn) -> Snapshot:
    status = JobStatus(
        attempt=draw(ATTEMPTS),
        restarts=draw(st.integers(0, 2)),
        child_uid=draw(st.sampled_from((None, "job-1"))),
        conditions=draw(conditions()),
    )
    return make_snapshot(
        spec=draw(st.sampled_from((spec(), spec(), spec(), None))),
        suspend=draw(st.booleans()),
        deleting=draw(st.integers(0, 9)) == 0,
        status=status,
        children=draw(children()),
        pods=draw(pods()),
        config_map_attempts=draw(st.frozensets(ATTEMPTS.filter(bool)))
        if status.attempt == 0
        else frozenset(),
        rejection=draw(st.sampled_from((None, Explanation("Rejected", "exceeded quota")))),
    )


def something_lives(seen: Snapshot) -> bool:
    """Written out again, by what the cluster says rather than by the rules' own words."""
    return any(c.state == "active" for c in seen.children) or any(
        p.phase in ("Pending", "Running") for p in seen.pods
    )


def newly(seen: Snapshot, plan: ReconcilePlan, kind: str) -> bool:
    return truth(plan.status, kind) == "True" != truth(seen.status, kind)


RUNNING = TrainerPod("stray", "stray", 0, phase="Running", running=True)
JOB = Child("bottles-0b5e7-1", "job-1", 1)
DONE = replace(JOB, state="complete", finished=START)
FAILED = replace(JOB, state="failed", failure=FAILURES[0], finished=START)
STRAY = replace(JOB, name="bottles-0b5e7-0", uid="job-0", attempt=0)
FIRST = JobStatus(attempt=1, child_uid="job-1")
RESTARTED = FIRST.model_copy(
    update={
        "conditions": [
            Condition(
                type="Restarting",
                status="True",
                reason="TrainerFailed",
                message="",
                last_transition_time="2026-03-01T11:00:00Z",
            )
        ]
    }
)


@settings(max_examples=250, deadline=None)
@given(seen=views())
@example(seen=make_snapshot(pods=(RUNNING,)))
@example(seen=make_snapshot(children=(STRAY,)))
@example(seen=make_snapshot(status=FIRST.model_copy(update={"child_uid": None}), children=(STRAY,)))
@example(seen=make_snapshot(status=RESTARTED, children=(FAILED,), pods=(RUNNING,)))
@example(seen=make_snapshot(suspend=True, pods=(RUNNING,)))
@example(seen=make_snapshot(suspend=True, children=(STRAY,)))
@example(seen=make_snapshot(suspend=True, status=FIRST, children=(FAILED,), pods=(RUNNING,)))
@example(seen=make_snapshot(status=FIRST, children=(DONE, STRAY)))
@example(seen=make_snapshot(status=FIRST, children=(DONE,), pods=(RUNNING,)))
@example(seen=make_snapshot(status=FIRST, children=(DONE,), pods=(replace(RUNNING, attempt=1),)))
@example(seen=make_snapshot(status=FIRST, children=(FAILED, STRAY)))
@example(seen=make_snapshot(status=FIRST, children=(FAILED,), pods=(RUNNING,)))
@example(seen=make_snapshot(status=FIRST, children=(FAILED,), pods=(replace(RUNNING, attempt=1),)))
def test_nothing_begins_or_ends_while_anything_may_still_write(seen: Snapshot) -> None:
    plan = decide(seen, START)
    if something_lives(seen):
        assert plan.create is None, "a pod would be created beside one that runs"
        for kind in ("Complete", "Failed", "Suspended"):
            assert not newly(seen, plan, kind), f"{kind} was told while something could write"
        waits_for_its_queue = any(c.suspended for c in seen.children)
        has_more_to_do = seen.spec is not None and not seen.deleting
        if has_more_to_do and not waits_for_its_queue:
            assert plan.requeue_after is not None, "nobody would look again"


@settings(max_examples=200, deadline=None)
@given(seen=views())
@example(seen=make_snapshot(status=FIRST, children=(JOB, STRAY)))
@example(seen=make_snapshot(suspend=True, status=FIRST, children=(JOB, STRAY)))
@example(seen=make_snapshot(suspend=True, status=FIRST, children=(replace(JOB, deleting=True),)))
def test_what_is_deleted_is_what_may_not_live_once_each(seen: Snapshot) -> None:
    plan = decide(seen, START)
    doomed = [c.uid for c in plan.delete]
    assert len(doomed) == len(set(doomed)), "a Job is deleted twice in one plan"
    assert not any(c.deleting for c in plan.delete), "what is being deleted is deleted again"
    if seen.deleting:
        assert not doomed, "the garbage collector deletes the children of a deleted job"
        return
    over = "True" in (truth(seen.status, "Complete"), truth(seen.status, "Failed"))
    for child in seen.children:
        alive = child.state == "active" and not child.deleting
        if alive and (over or child.attempt != plan.status.attempt):
            assert child.uid in doomed, "a stray Job lives on"
    ended = {c.uid for c in seen.children if c.state != "active"}
    assert not (over and ended & set(doomed)), "the Job of a finished job is deleted"


@settings(max_examples=200, deadline=None)
@given(seen=views(), wait=st.sampled_from((0, 5, 3600)))
def test_numbers_never_go_back_and_rise_by_one(seen: Snapshot, wait: int) -> None:
    plan = decide(seen, START + timedelta(seconds=wait))
    known = {c.attempt for c in seen.children} | seen.config_map_attempts | {seen.status.attempt}
    assert seen.status.attempt <= plan.status.attempt <= max(known) + 1
    assert seen.status.restarts <= plan.status.restarts <= seen.status.restarts + 1
    if plan.create is not None:
        assert plan.create == plan.status.attempt, "the number is written before its creation"
        assert seen.spec is not None, "a job that can't be read is begun"
        assert not seen.suspend, "a suspended job is begun"


@settings(max_examples=100, deadline=None)
@given(seen=views())
def test_a_finished_job_keeps_its_status_whatever_is_seen(seen: Snapshot) -> None:
    over = "True" in (truth(seen.status, "Complete"), truth(seen.status, "Failed"))
    plan = decide(seen, later(seen))
    if over or seen.deleting:
        assert unobserved(plan.status) == unobserved(seen.status)
        assert (plan.create, plan.events) == (None, ())


def unobserved(status: JobStatus) -> JobStatus:
    """The status without the generations for which it was found to be true."""
    none = {"observed_generation": 0}
    conditions = [c.model_copy(update=none) for c in status.conditions]
    return status.model_copy(update=none | {"conditions": conditions})


def later(seen: Snapshot) -> datetime:
    return START + timedelta(days=seen.status.attempt)

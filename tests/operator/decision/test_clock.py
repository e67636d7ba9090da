"""Clocks that are wrong or jump: no delay is longer than the page of the operator says."""

from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kubelora_api.schema import metadata_of
from kubelora_api.status import DATE_TIME, Condition, CountedRun, JobStatus, Progress
from kubelora_operator.decision.clock import largest_lead, without_future_times
from kubelora_operator.decision.conditions import format_time
from kubelora_operator.decision.decide import decide
from tests.operator.decision.test_decide_accounts import running_world, told
from tests.operator.decision.test_running import view
from tests.operator.world import START, World, truth

DAY = timedelta(hours=24)
LONGEST_DELAY = timedelta(minutes=10)
AHEAD = format_time(START + DAY)
NOW = format_time(START)


def test_a_restart_stamped_by_a_clock_a_day_ahead_waits_its_ten_seconds() -> None:
    world = running_world()
    world.pod_exits(1)
    world.wait(hours=24)
    world.reconcile()
    world.wait(hours=-24)
    plan = world.reconcile()
    assert plan.requeue_after == timedelta(seconds=10)
    assert [(e.type, e.reason) for e in plan.events] == [("Warning", "ClockSkew")]
    assert "up to 1d0h in the future" in plan.events[0].message
    world.wait(seconds=10)
    world.settle()
    assert world.created == [1, 2]


def test_a_window_stamped_by_a_clock_a_day_ahead_ends_a_day_from_now() -> None:
    world = running_world(max_restarts=0)
    world.status = world.status.model_copy(
        update={"free_restarts": 30, "free_restarts_since": AHEAD}
    )
    world.settle()
    world.wait(hours=24)
    world.pod_exits(75)
    world.settle()
    assert world.status.free_restarts == 1


@pytest.mark.parametrize("state", ["sidecar", "pod"])
def test_an_end_stamped_by_a_node_a_day_ahead_is_seen_at_once(state: str) -> None:
    world = running_world(sidecar=state == "sidecar")
    world.pod_exits(0)
    world.pods = [replace(p, ended=world.now + DAY) for p in world.pods]
    world.settle()
    world.wait(seconds=70)
    world.settle()
    assert truth(world.status, "Complete") == "True"


def time_fields(model: type) -> set[str]:
    return {n for n, i in model.model_fields.items() if DATE_TIME in metadata_of(i)}  # type: ignore[attr-defined]


def test_each_time_in_a_status_but_the_expected_end_is_brought_to_now() -> None:
    run = CountedRun(attempt=1, uid="x", start_time=AHEAD, end_time=AHEAD, seconds=1)
    progress = Progress(last_report_time=AHEAD, estimated_completion_time=AHEAD)
    times = dict.fromkeys(time_fields(JobStatus), AHEAD)
    condition: Condition = told("Restarting", "True", "X", AHEAD)
    parts = {"conditions": [condition], "progress": progress, "counted_run": run}
    status = JobStatus.model_validate(times | parts)
    assert largest_lead(status, START) == DAY
    fresh = without_future_times(status, START)
    assert {getattr(fresh, name) for name in time_fields(JobStatus)} == {NOW}
    assert fresh.conditions[0].last_transition_time == NOW
    assert fresh.counted_run == run.model_copy(update={"start_time": NOW, "end_time": NOW})
    assert fresh.progress == progress.model_copy(update={"last_report_time": NOW})
    assert largest_lead(fresh, START) == timedelta()


def test_clocks_that_differ_by_seconds_are_no_matter() -> None:
    soon = format_time(START + timedelta(seconds=50))
    status = JobStatus(attempt=1, child_uid="job-1", start_time=soon)
    plan = decide(view(status=status), START)
    assert plan.status.start_time == soon
    assert not [e for e in plan.events if e.reason == "ClockSkew"]


JUMPS = st.sampled_from([0, 1, -1, 40, -40, 24 * 60, -24 * 60, 30 * 24 * 60])


@settings(max_examples=150, deadline=None)
@given(
    codes=st.lists(st.sampled_from([1, 75, 143]), min_size=3, max_size=8),
    jumps=st.lists(JUMPS, min_size=24, max_size=24),
)
def test_whatever_the_clocks_do_the_next_attempt_starts_within_the_longest_delay(
    codes: list[int], jumps: list[int]
) -> None:
    """The operator's clock jumps before each look; a real clock measures the wait."""
    world, jump = World(max_restarts=100), iter(jumps)
    for code in codes:
        world.settle()
        world.pod_runs()
        world.wait(minutes=next(jump))
        world.settle()
        world.pod_exits(code)
        attempts, waited = len(world.created), timedelta()
        world.wait(minutes=next(jump))
        world.settle()
        world.wait(minutes=next(jump))
        while len(world.created) == attempts:
            plan = world.settle()
            if len(world.created) > attempts:
                break
            assert plan.requeue_after is not None, "nobody would look again"
            pause = max(plan.requeue_after, timedelta(seconds=1))
            waited += pause
            world.now += pause
            assert waited <= LONGEST_DELAY + timedelta(minutes=1), "a clock delayed the restart"

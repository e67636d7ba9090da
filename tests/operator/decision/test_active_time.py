"""The time for which a job ran, by the pods' own times; sums by hand or by a second account."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kubelora_api.report import FinalReport, RunReport
from kubelora_operator.controller.convert import pod_from
from kubelora_operator.decision.decide import decide
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.decision.test_decide_accounts import running_world
from tests.operator.decision.test_running import JOB, POD, view
from tests.operator.world import START, UID, World, truth

UNSEEN = 120
"""Seconds by which a pod that vanished may be counted too long."""


def test_a_run_during_which_the_operator_was_away_is_counted() -> None:
    world = World()
    world.settle()
    world.wait(minutes=3)  # pulling the image is not running
    world.pod_runs()
    world.wait(hours=8)
    world.pod_exits(1)
    world.wait(hours=5)
    world.settle()
    assert world.status.active_seconds == 8 * 3600


def test_a_suspension_during_which_the_operator_was_away_is_not_counted() -> None:
    world = running_world()
    world.wait(minutes=10)
    world.edit(suspend=True)
    world.settle()
    world.wait(seconds=20)
    world.pods = [replace(p, exit_code=75, running=False, ended=world.now) for p in world.pods]
    world.wait(hours=5)
    world.settle()
    assert world.status.active_seconds == 620
    world.pods_end()
    world.settle()
    world.wait(hours=5)
    world.settle()
    assert (truth(world.status, "Suspended"), world.status.active_seconds) == ("True", 620)


def test_a_preempted_run_and_the_one_after_it_are_both_counted() -> None:
    world = World(queue="team-studio")
    for hours in (1, 2):
        world.settle()
        world.wait(hours=10)  # in the queue
        world.admit()
        world.pod_runs()
        world.settle()
        for _ in range(hours * 60):
            world.wait(minutes=1)
            world.settle()
        world.preempt()
    world.settle()
    assert world.status.active_seconds == 3 * 3600


def test_a_pod_that_vanished_while_the_operator_was_away_is_counted_up_to_the_last_look() -> None:
    world = World(queue="team-studio")
    world.settle()
    world.admit()
    world.pod_runs()
    world.settle()
    world.wait(minutes=30)
    world.settle()
    world.wait(hours=9)
    world.preempt()
    world.settle()
    world.wait(hours=9)
    world.settle()
    assert world.status.active_seconds == 1800


def test_a_lost_pod_does_not_run_after_it_should_have_ended() -> None:
    world = running_world()
    world.wait(hours=1)
    world.pods = [replace(world.pods[0], deleting=True, delete_by=world.now)]
    world.wait(hours=6)
    world.settle()
    assert world.status.active_seconds == 3600


@pytest.mark.parametrize("skew", [timedelta(hours=24), timedelta(hours=-24)])
def test_a_nodes_wrong_clock_changes_nothing_once_the_pod_has_ended(skew: timedelta) -> None:
    world = running_world()
    world.pods = [replace(world.pods[0], since=START + skew)]
    for _ in range(6):
        world.wait(minutes=10)
        world.settle()
        assert (world.status.active_seconds or 0) <= 3600 + 60, "longer than its Job exists"
    world.pod_exits(1)
    world.pods = [replace(world.pods[0], ended=world.now + skew)]
    world.settle()
    assert world.status.active_seconds == 3600


def test_the_operators_clock_that_was_ahead_for_a_while_is_corrected() -> None:
    world = running_world()
    world.wait(hours=25)
    world.settle()
    world.wait(hours=-24)
    world.settle()
    assert world.status.active_seconds == 3600


def test_a_run_costs_a_write_a_minute_at_most() -> None:
    status, writes = decide(view(POD), START).status, 0
    for second in range(0, 600, 10):
        fresh = decide(view(POD, status=status), START + timedelta(seconds=second)).status
        writes += fresh != status
        status = fresh
    assert writes == 9
    assert status.active_seconds == 540


def test_a_job_whose_pods_are_gone_is_counted_by_its_own_times() -> None:
    over = replace(JOB, state="complete", started=START, finished=START + timedelta(hours=2))
    assert decide(view(child=over), START + timedelta(hours=9)).status.active_seconds == 7200


def test_a_containers_start_is_read_after_its_end_too() -> None:
    times = {"startedAt": "2026-03-01T12:00:00Z", "finishedAt": "2026-03-01T12:00:07Z"}
    state = {"terminated": {"exitCode": 75} | times}
    document = pod_document({"containerStatuses": [{"name": "trainer", "state": state}]})
    found = pod_from(document, "bottles", UID, OWNERS)
    assert found is not None
    assert (found.since, found.ended) == (START, START + timedelta(seconds=7))


@dataclass
class Account:
    """A world, and the running time of its pods as a stopwatch would show it."""

    world: World
    ran: float = 0
    vanished: int = 0

    def wait(self, seconds: int) -> None:
        self.ran += seconds * sum(p.running for p in self.world.pods)
        self.world.wait(seconds=seconds)

    def vanish(self) -> None:
        running = any(p.running for p in self.world.pods)
        if self.world.queue:
            self.world.preempt()
        else:
            self.world.delete_pod()
        self.vanished += running


DEEDS: dict[str, Callable[[Account], object]] = {
    "looks": lambda a: a.world.settle(),
    "looks again": lambda a: a.world.settle(),
    "runs": lambda a: a.world.pod_runs(),
    "admitted": lambda a: a.world.admit(),
    "exits": lambda a: a.world.pod_exits(1),
    "interrupted": lambda a: a.world.pod_exits(75),
    "vanishes": Account.vanish,
    "5 s": lambda a: a.wait(5),
    "3 min": lambda a: a.wait(180),
    "8 h": lambda a: a.wait(8 * 3600),
}


@settings(max_examples=150, deadline=None)
@given(
    queue=st.sampled_from([None, "team-studio"]),
    deeds=st.lists(st.sampled_from(sorted(DEEDS)), min_size=20, max_size=50),
)
def test_the_sum_is_that_of_a_stopwatch(queue: str | None, deeds: list[str]) -> None:
    account = Account(World(max_restarts=100, queue=queue))
    for deed in deeds:
        DEEDS[deed](account)
        seconds = account.world.status.active_seconds or 0
        assert seconds <= account.ran + account.vanished * UNSEEN, "time in which nothing ran"
    account.world.pod_exits(0)
    account.world.settle()
    if not account.vanished:
        assert (account.world.status.active_seconds or 0) == account.ran


def report(useful: float) -> RunReport:
    return RunReport(
        run_id=UID, attempt=1, phase="Training", step=3, total_steps=9, useful_seconds=useful
    )


def test_goodput_is_the_share_of_the_running_time_that_the_steps_took() -> None:
    status = decide(view(POD), START).status
    now = START + timedelta(seconds=200)
    progress = decide(view(POD, status=status, report=report(150.4)), now).status.progress
    assert progress is not None
    assert (progress.useful_seconds, progress.goodput) == (150, "75%")


@pytest.mark.parametrize("useful", [math.inf, math.nan, -1.0, 1e30])
def test_a_useful_time_that_can_not_be_one_is_left_out(useful: float) -> None:
    now = START + timedelta(seconds=200)
    progress = decide(view(POD, report=report(useful)), now).status.progress
    assert progress is not None
    assert (progress.useful_seconds, progress.goodput) == (None, None)


def test_the_goodput_of_a_finished_job_is_that_of_its_last_report() -> None:
    world = running_world()
    world.wait(seconds=100)
    world.pod_exits(0)
    final = FinalReport(run_id=UID, attempt=1, exit_code=0, message="", step=9, useful_seconds=90)
    world.pods = [replace(world.pods[0], final=final)]
    world.settle()
    assert world.status.progress is not None
    assert world.status.progress.goodput == "90%"

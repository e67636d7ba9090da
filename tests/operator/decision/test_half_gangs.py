"""Gangs that share too few GPUs, under a scheduler that gives them out pod by pod."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest

from kubelora_api.status import JobStatus
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod
from tests.operator.decision.test_gang import GANG
from tests.operator.world import START, condition, make_snapshot, spec, truth

NO_GPU = Explanation("Unschedulable", "the pod cannot be scheduled: no GPU left.")
RUN, GRACE, STEP = timedelta(minutes=10), timedelta(seconds=30), timedelta(seconds=10)


@dataclass
class Gang:
    """A job of two pods, one GPU each, and its operator."""

    uid: str
    deadlines: dict[str, int] = field(default_factory=dict)
    status: JobStatus = field(default_factory=JobStatus)
    child: Child | None = None
    pods: list[TrainerPod] = field(default_factory=list)
    attempts: int = 0

    def snapshot(self) -> Snapshot:
        return make_snapshot(
            uid=self.uid,
            spec=spec(**GANG, **self.deadlines),
            status=self.status,
            children=(self.child,) if self.child else (),
            pods=tuple(self.pods),
        )

    def reconcile(self, now: datetime) -> None:
        plan = decide(self.snapshot(), now)
        self.status = plan.status
        if plan.delete:
            self.child = None
            self.pods = [replace(p, deleting=True, delete_by=now + GRACE) for p in self.pods]
        if plan.create is not None and self.child is None:
            self.attempts += 1
            name = f"bottles-{self.uid[:5]}-{plan.create}"
            self.child = Child(name, f"{self.uid}-{plan.create}", plan.create, started=now)
            self.pods = [
                TrainerPod(f"{name}-{i}", f"{name}-{i}", plan.create, index=i, waiting=NO_GPU)
                for i in range(2)
            ]

    def proceed(self, now: datetime) -> None:
        """Let pods that are deleted end; a gang that runs is done after a while."""
        self.pods = [p for p in self.pods if not (p.delete_by and now >= p.delete_by)]
        scheduled = [p.scheduled for p in self.pods if p.scheduled and not p.deleting]
        if len(scheduled) == 2 and self.child and self.child.live:
            self.pods = [replace(p, running=True, phase="Running", since=now) for p in self.pods]
            if now - max(scheduled) >= RUN:
                self.child = replace(self.child, state="complete", finished=now)
                self.pods = [
                    replace(p, phase="Succeeded", running=False, exit_code=0, ended=now)
                    for p in self.pods
                ]

    @property
    def held(self) -> int:
        return sum(p.scheduled is not None and p.phase != "Succeeded" for p in self.pods)

    def take_one(self, now: datetime) -> bool:
        """Give a GPU to one of its pods."""
        wanting = (i for i, p in enumerate(self.pods) if p.scheduled is None and not p.deleting)
        index = next(wanting, None)
        if index is not None:
            self.pods[index] = replace(self.pods[index], scheduled=now, waiting=None)
        return index is not None


def share(gangs: list[Gang], gpus: int, now: datetime) -> None:
    """Give GPUs out in turns, one to each gang: the worst order."""
    turn = True
    while turn and sum(g.held for g in gangs) < gpus:
        turn = False
        for gang in gangs:
            if sum(g.held for g in gangs) < gpus:
                turn = gang.take_one(now) or turn


def run(gangs: list[Gang], gpus: int, hours: float) -> datetime:
    now = START
    while now < START + timedelta(hours=hours):
        for gang in gangs:
            gang.reconcile(now)
        share(gangs, gpus, now)
        for gang in gangs:
            gang.proceed(now)
        if all(truth(g.status, "Complete") == "True" for g in gangs):
            break
        now += STEP
    return now


@pytest.mark.parametrize("number", [2, 3])
def test_half_gangs_never_wait_for_each_other(number: int) -> None:
    gangs = [Gang(f"{i}b5e7a10-1111-4222-8333-944455556666") for i in range(number)]
    ended = run(gangs, gpus=2, hours=6)
    assert [g.status.state for g in gangs] == ["Complete"] * number
    assert sum(g.attempts for g in gangs) > number, "none was half: this shows nothing"
    assert {g.status.restarts for g in gangs} == {0}
    assert {g.status.free_restarts for g in gangs} == {0}
    assert ended - START < timedelta(hours=number), "hardly longer than one after the other"


def test_a_half_gang_says_what_it_waits_for_and_gives_its_gpu_back() -> None:
    gang = Gang("0b5e7a10-1111-4222-8333-944455556666")
    run([gang], gpus=1, hours=9 / 60)
    assert (gang.status.state, gang.held, gang.attempts) == ("Pending", 1, 1)
    now = START + timedelta(minutes=15)
    gang.reconcile(now)
    restarting = condition(gang.status, "Restarting")
    assert (restarting.status, restarting.reason) == ("True", "GangWaiting")
    assert restarting.message == (
        "attempt 1 ended: only 1 of 2 pods got a node, and they have given their GPUs back to "
        "others: the pod cannot be scheduled: no GPU left. The next attempt resumes from the last "
        "checkpoint (not counted against maxRestarts)"
    )
    gang.proceed(now + GRACE)
    assert gang.held == 0


def test_a_gang_may_wait_for_days_and_is_not_suspended() -> None:
    gang = Gang("0b5e7a10-1111-4222-8333-944455556666")
    run([gang], gpus=1, hours=24)
    assert gang.attempts > 60
    assert truth(gang.status, "Suspended") != "True"


def test_a_pending_deadline_counts_over_what_a_gang_gave_back() -> None:
    gang = Gang("0b5e7a10-1111-4222-8333-944455556666", {"pendingDeadlineSeconds": 3600})
    run([gang], gpus=1, hours=1.2)
    failed = condition(gang.status, "Failed")
    assert (failed.status, failed.reason) == ("True", "PendingDeadlineExceeded")
    assert "no GPU left" in failed.message

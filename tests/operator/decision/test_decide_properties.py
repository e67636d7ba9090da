"""Promises that hold whatever happens, in whatever order, with two operators at work."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan import ReconcilePlan
from tests.operator.world import World, truth

COUNTED = (1, 4, 137, 143)


@dataclass
class History:
    """A world, a second, slower operator, and what was seen so far."""

    world: World
    stale: tuple[ReconcilePlan, int] | None = None
    failures: int = 0
    ended: list[int] | None = None
    held: tuple[int, int] | None = None

    def work(self) -> None:
        self.world.reconcile()

    def look_twice(self) -> None:
        """The second operator looks, and will act on this view later."""
        self.stale = (decide(self.world.snapshot(), self.world.now), self.world.version)

    def act_late(self) -> None:
        if self.stale:
            plan, version = self.stale
            self.stale = None
            self.world.apply(plan, version)

    def fail(self, code: int) -> None:
        before = sum(p.exit_code is not None for p in self.world.pods)
        self.world.pod_exits(code)
        after = sum(p.exit_code is not None for p in self.world.pods)
        self.failures += (after - before) if code in COUNTED else 0

    def delete_a_job(self, newest: bool) -> None:
        if self.world.children:
            attempts = sorted(self.world.children)
            ended = self.world.children[attempts[-1 if newest else 0]]
            self.world.delete_child(ended.attempt)
            # The second attempt whose outcome nobody knows counts.
            self.failures += ended.attempt == self.world.status.attempt

    def flip_suspend(self) -> None:
        self.world.edit(suspend=not self.world.suspend)

    def change_policy(self) -> None:
        self.world.edit(policy="Warn" if self.world.policy == "Suspend" else "Suspend")


def exits(code: int) -> Callable[[History], None]:
    return lambda h: h.fail(code)


# What can happen. The operator's own turn stands in thrice, so that histories get somewhere.
HAPPENINGS: dict[str, Callable[[History], None]] = {
    "operator": History.work,
    "operator again": History.work,
    "operator once more": History.work,
    "second operator looks": History.look_twice,
    "second operator acts late": History.act_late,
    "a second": lambda h: h.world.wait(seconds=1),
    "a quarter of an hour": lambda h: h.world.wait(minutes=15),
    "pod runs": lambda h: h.world.pod_runs(),
    "pod done": lambda h: h.world.pod_exits(0),
    "exit 1": exits(1),
    "exit 2": exits(2),
    "exit 3": exits(3),
    "exit 4": exits(4),
    "exit 5": exits(5),
    "exit 75": exits(75),
    "exit 143": exits(143),
    "eviction": lambda h: h.world.pod_exits(137, evicted=True),
    "pod deleted": lambda h: h.world.delete_pod(),
    "newest job deleted": lambda h: h.delete_a_job(newest=True),
    "oldest job deleted": lambda h: h.delete_a_job(newest=False),
    "terminating pods end": lambda h: h.world.pods_end(),
    "suspend flipped": History.flip_suspend,
    "policy changed": History.change_policy,
    "queue admits": lambda h: h.world.admit(),
    "queue preempts": lambda h: h.world.preempt(),
}


def check(history: History) -> None:
    world, status = history.world, history.world.status
    assert len(world.live_attempts()) <= 1, "two live attempts"
    assert status.restarts <= world.max_restarts, "more restarts than allowed"
    assert status.restarts <= history.failures, "a restart was counted that was no failure"
    # A number twice means: created, deleted by hand before its uid was known, created again.
    assert world.created == sorted(world.created), "an old attempt was created again"
    assert max(world.created, default=0) <= status.attempt, "created before it was numbered"
    if "True" in (truth(status, "Complete"), truth(status, "Failed")):
        if history.ended is None:
            history.ended = list(world.created)
            assert not world.writers(), "published while something could still write"
        assert truth(status, "Running") == "False"
    if history.ended is not None:
        assert world.created == history.ended, "a finished job was created again"
        assert "True" in (truth(status, "Complete"), truth(status, "Failed"))
    check_held(history)


def check_held(history: History) -> None:
    """A job that its health policy suspended starts nothing until its user changed the spec."""
    world, now = history.world, (history.world.generation, len(history.world.created))
    told = next((c for c in world.status.conditions if c.type == "Suspended"), None)
    if history.held and history.held[0] == now[0]:
        assert history.held == now, "a held job was started by itself"
    waits = told and (told.status, told.reason) == ("True", "HealthPolicy")
    history.held = now if waits and told and told.observed_generation == now[0] else None


def check_rest(world: World) -> None:
    """Deciding again after carried-out plans asks for nothing more."""
    plan = world.settle()
    assert not plan.delete
    assert plan.create is None
    assert not plan.events


@settings(max_examples=400, deadline=None)
@given(
    restarts=st.integers(0, 3),
    queue=st.sampled_from([None, None, "team-studio"]),
    policy=st.sampled_from(["Warn", "Suspend"]),
    sidecar=st.booleans(),
    happenings=st.lists(st.sampled_from(sorted(HAPPENINGS)), min_size=40, max_size=60),
)
def test_the_promises_hold_in_any_history(
    restarts: int, queue: str | None, policy: str, sidecar: bool, happenings: list[str]
) -> None:
    history = History(World(max_restarts=restarts, queue=queue, policy=policy, sidecar=sidecar))
    for happening in happenings:
        HAPPENINGS[happening](history)
        check(history)
    check_rest(history.world)
    check(history)

"""Promises that hold whatever happens, in whatever order, with two operators at work."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kubelora_operator.decide import decide
from kubelora_operator.plan import Plan
from tests.operator.world import World, truth

COUNTED = (1, 4, 137, 143)


class AnyHistory(RuleBasedStateMachine):
    """Pods that come and go, people who delete and suspend, and a second, slower operator."""

    @initialize(
        restarts=st.integers(0, 3), queue=st.sampled_from([None, "team-studio"]), held=st.booleans()
    )
    def begin(self, restarts: int, queue: str | None, held: bool) -> None:
        self.world = World(max_restarts=restarts, queue=queue, suspend=held)
        self.stale: tuple[Plan, int] | None = None
        self.failures = 0
        self.ended: tuple[int, ...] | None = None

    @rule()
    def the_operator_works(self) -> None:
        self.world.reconcile()

    @rule()
    def a_second_operator_looks(self) -> None:
        self.stale = (decide(self.world.observe(), self.world.now), self.world.version)

    @precondition(lambda self: self.stale is not None)
    @rule()
    def the_second_operator_acts_late(self) -> None:
        assert self.stale is not None
        plan, version = self.stale
        self.stale = None
        self.world.apply(plan, version)

    @rule(seconds=st.sampled_from([1, 15, 700]))
    def time_passes(self, seconds: int) -> None:
        self.world.wait(seconds=seconds)

    @rule()
    def the_pod_runs(self) -> None:
        self.world.pod_runs()

    @rule(code=st.sampled_from([1, 1, 2, 3, 4, 75, 137, 143]))
    def the_pod_fails(self, code: int) -> None:
        before = sum(c.live for c in self.world.children.values())
        self.world.pod_exits(code)
        after = sum(c.live for c in self.world.children.values())
        self.failures += (before - after) if code in COUNTED else 0

    @rule()
    def the_pod_is_evicted(self) -> None:
        self.world.pod_exits(137, evicted=True)

    @rule()
    def the_pod_is_done(self) -> None:
        self.world.pod_exits(0)

    @rule()
    def someone_deletes_the_pod(self) -> None:
        self.world.delete_pod()

    @precondition(lambda self: self.world.children)
    @rule(data=st.data())
    def someone_deletes_a_job(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.world.children)))
        self.world.delete_child(attempt)

    @rule()
    def terminating_pods_end(self) -> None:
        self.world.pods_end()

    @rule()
    def the_user_flips_suspend(self) -> None:
        self.world.suspend = not self.world.suspend

    @rule()
    def the_queue_admits(self) -> None:
        self.world.admit()

    @rule()
    def the_queue_preempts(self) -> None:
        self.world.preempt()

    @invariant()
    def never_two_live_attempts(self) -> None:
        assert len(self.world.live_attempts()) <= 1

    @invariant()
    def restarts_never_exceed_their_limit(self) -> None:
        assert self.world.status.restarts <= self.world.max_restarts

    @invariant()
    def no_restart_is_counted_that_was_no_failure(self) -> None:
        assert self.world.status.restarts <= self.failures

    @invariant()
    def each_attempt_is_created_once_per_number_and_numbers_grow(self) -> None:
        # A number twice means: created, deleted by hand before its uid was known, created again.
        assert self.world.created == sorted(self.world.created)
        assert max(self.world.created, default=0) <= max(self.world.status.attempt, 0)

    @invariant()
    def a_finished_job_is_never_recreated(self) -> None:
        status = self.world.status
        if "True" in (truth(status, "Complete"), truth(status, "Failed")):
            if self.ended is None:
                self.ended = tuple(self.world.created)
                assert not self.world.live_attempts()
            assert tuple(self.world.created) == self.ended
            assert truth(status, "Running") == "False"

    @invariant()
    def the_rules_come_to_rest(self) -> None:
        """Deciding again after a carried-out plan asks for nothing more (on a copy)."""
        world = World(**vars(self.world))
        world.children, world.pods = dict(world.children), list(world.pods)
        world.created, world.config_maps = list(world.created), set(world.config_maps)
        plan = world.settle()
        assert not plan.delete
        assert plan.create is None
        assert not plan.notices


AnyHistory.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, print_blob=True
)
TestAnyHistory = AnyHistory.TestCase

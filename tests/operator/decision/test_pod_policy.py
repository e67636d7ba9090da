"""What a refusal by the pod policy does to a job, before it starts and while it runs."""

from dataclasses import replace

from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan import ReconcilePlan
from tests.operator.world import World, condition

SENTENCE = "spec.podTemplate.priorityClassName: high is not allowed; allowed: nothing. Remove it"


def reconcile(world: World, *refusals: str) -> ReconcilePlan:
    plan = decide(replace(world.snapshot(), refusals=refusals), world.now)
    assert world.apply(plan, world.version)
    return plan


def test_a_refused_job_does_not_start_until_it_is_changed() -> None:
    world = World()
    plan = reconcile(world, SENTENCE)
    accepted = condition(plan, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "PodTemplateNotAllowed")
    assert accepted.message == SENTENCE
    assert condition(plan, "Running").reason == "PodTemplateNotAllowed"
    assert plan.status.state == "Invalid"
    assert next(e.reason for e in plan.events if e.type == "Warning") == "PodTemplateNotAllowed"
    assert world.created == []
    plan = reconcile(world)
    assert condition(plan, "Accepted").status == "True"
    assert world.created == [1]


def test_a_running_attempt_is_left_alone_and_the_next_is_refused() -> None:
    world = World()
    world.settle()
    world.pod_runs()
    world.settle()
    plan = reconcile(world, SENTENCE)
    accepted = condition(plan, "Accepted")
    assert (accepted.status, accepted.reason) == ("True", "NextAttemptNotAllowed")
    assert accepted.message.endswith(SENTENCE)
    assert (plan.delete, plan.create) == ((), None)
    assert condition(plan, "Running").status == "True"
    world.pod_exits(1)
    for _ in range(4):
        plan = reconcile(world, SENTENCE)
        world.wait(minutes=20)
    assert condition(plan, "Accepted").reason == "PodTemplateNotAllowed"
    assert world.created == [1]
    reconcile(world)
    assert world.created == [1, 2]


def test_a_finished_job_is_not_judged_again() -> None:
    world = World()
    world.settle()
    world.pod_runs()
    world.pod_exits(0)
    world.settle()
    assert condition(reconcile(world, SENTENCE), "Accepted").status == "True"

"""A pod that does not end because its node is lost: told, forced, replaced; values by hand."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from kubelora_operator.controller.convert import node_state_from, pod_from
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import NodeState, Snapshot, TrainerPod
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.decision.test_decide_accounts import told
from tests.operator.decision.test_running import FIRST, JOB, POD, view
from tests.operator.world import START, UID, World, condition, truth

LOST = NodeState(True, "its node gpu-3 is not ready since 2026-03-01T11:50:00Z")
READY = NodeState(False, "its node gpu-3 is ready")
UNREAD = NodeState(None, "the operator has no right to read its node gpu-3")
STUCK = replace(POD, deleting=True, disrupted=True, delete_by=START, node=LOST)
RUNNING = FIRST.model_copy(update={"conditions": [told("Running", "True", "Training")]})


def after(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def stuck(pod: TrainerPod = STUCK, **changes: Any) -> Snapshot:
    return view(pod, **({"status": RUNNING} | changes))


def test_a_pod_within_its_grace_period_is_left_alone_and_costs_no_write() -> None:
    seen = stuck(replace(STUCK, delete_by=after(120), node=None))
    plan = decide(seen, START)
    assert condition(plan, "Running") == RUNNING.conditions[0].model_copy(
        update={"observed_generation": condition(plan, "Running").observed_generation}
    )
    assert (plan.delete, plan.force_delete, plan.create) == ((), (), None)


def test_a_pod_on_a_lost_node_is_told_with_the_time_at_which_it_is_forced() -> None:
    plan = decide(stuck(), after(20))
    running = condition(plan, "Running")
    assert (running.status, running.reason) == ("False", "NodeLost")
    assert running.message == (
        "pod bottles-0b5e7-1-0 should have ended by 2026-03-01T12:00:00Z, but its node gpu-3 is "
        "not ready since 2026-03-01T11:50:00Z. It is deleted by force at 2026-03-01T12:01:00Z; "
        "the job continues after that"
    )
    assert (plan.force_delete, plan.requeue_after) == ((), timedelta(seconds=30))
    assert decide(stuck(), after(50)).requeue_after == timedelta(seconds=10)


def test_it_is_forced_a_minute_after_its_grace_period_and_the_attempt_ends_free_of_charge() -> None:
    assert decide(stuck(), after(59)).force_delete == ()
    plan = decide(stuck(), after(60))
    assert plan.force_delete == (STUCK,)
    assert (condition(plan, "Restarting").reason, plan.status.restarts) == ("NodeLost", 0)
    # The Job controller doesn't let go of a pod that never reached an end, so its Job goes too.
    then = decide(stuck(status=plan.status), after(62))
    assert (then.delete, then.create) == ((JOB,), None)


def test_the_next_attempt_starts_when_the_pod_is_gone() -> None:
    world = World()
    world.settle()
    world.pod_runs()
    world.settle()
    world.pods = [replace(world.pods[0], deleting=True, delete_by=world.now, node=LOST)]
    world.wait(seconds=60)
    world.settle()
    assert (world.created, world.children) == ([1], {})
    world.pods = []
    world.wait(seconds=60)
    world.settle()
    assert (world.created, world.status.restarts) == ([1, 2], 0)


@pytest.mark.parametrize(
    ("node", "advice"),
    [
        (READY, "its node gpu-3 is ready; see `kubectl describe pod bottles-0b5e7-1-0`"),
        (UNREAD, "If the node is lost, run `kubectl delete pod bottles-0b5e7-1-0 --force`"),
    ],
)
def test_a_pod_is_never_forced_on_a_node_that_may_still_run_it(
    node: NodeState, advice: str
) -> None:
    plan = decide(stuck(replace(STUCK, node=node)), after(9999))
    assert (plan.force_delete, plan.delete) == ((), ())
    assert condition(plan, "Running").reason == "PodTerminating"
    assert condition(plan, "Running").message.endswith(advice)


@pytest.mark.parametrize("over", ["Complete", "Failed"])
def test_what_a_finished_job_left_on_a_lost_node_is_forced_too(over: str) -> None:
    status = FIRST.model_copy(update={"conditions": [told(over, "True", "X")]})
    assert decide(stuck(status=status, children=()), after(60)).force_delete == (STUCK,)


def test_a_suspension_says_which_pod_it_waits_for() -> None:
    suspending = FIRST.model_copy(update={"conditions": [told("Suspended", "False", "Suspending")]})
    seen = stuck(suspend=True, status=suspending, children=())
    assert "is deleted by force at" in condition(decide(seen, START), "Suspended").message
    assert decide(seen, after(60)).force_delete == (STUCK,)
    done = decide(replace(seen, pods=()), after(61))
    assert truth(done.status, "Suspended") == "True"


def test_a_nodes_state_is_read_from_its_condition() -> None:
    ready = {"type": "Ready", "status": "True"}
    unknown = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-03-01T11:50:00Z"}
    assert node_state_from("gpu-3", {"status": {"conditions": [ready]}}) == READY
    assert node_state_from("gpu-3", {"status": {"conditions": [unknown]}}) == LOST
    assert node_state_from("gpu-3", {"status": {}}).lost is True
    assert node_state_from("gpu-3", None) == NodeState(True, "its node gpu-3 is gone")


def test_a_pods_deadline_is_its_deletion_timestamp_which_includes_the_grace_period() -> None:
    document = pod_document({"phase": "Running"})
    document["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    document["spec"] = {"nodeName": "gpu-3"}
    found = pod_from(document, "bottles", UID, OWNERS)
    assert found is not None
    assert (found.delete_by, found.node_name) == (START, "gpu-3")
    assert not found.overdue(START - timedelta(seconds=1))
    assert found.overdue(START)

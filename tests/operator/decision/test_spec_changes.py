"""A change that only the next attempt takes up is reported as such until that attempt starts."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from kubelora_api import names
from kubelora_api.documents import parse_job
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import build_job
from kubelora_operator.controller.convert import child_from
from kubelora_operator.controller.trim import Kind, trim
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan import ReconcilePlan
from kubelora_operator.decision.snapshot import Child
from kubelora_operator.decision.spec_changes import changed_since, digests_of
from tests.operator.world import START, UID, World, condition, document, spec


def child_of(**groups: object) -> Child:
    """The Job that the operator makes for such a spec, as it is read back."""
    job = build_job(parse_job(document(**groups)), 1, "trainer:1")
    job["metadata"]["uid"] = "job-1"
    child = child_from(trim(Kind.CHILD, job), "bottles", UID)  # as the store of watches keeps it
    assert child
    assert child == child_from(job, "bottles", UID)
    return child


def reconcile(child: Child, **groups: object) -> ReconcilePlan:
    world = World()
    world.settle()
    world.pod_runs()
    world.settle()
    snapshot = replace(
        world.snapshot(), children=(replace(child, uid="job-1"),), spec=spec(**groups), generation=2
    )
    return decide(snapshot, START + timedelta(minutes=1))


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"podTemplate": {"image": "mine:2"}}, "podTemplate"),
        ({"queueName": "team-studio"}, "queueName"),
        ({"tracking": {"trackers": ["wandb"]}}, "tracking"),
        ({"health": {"baseline": "pvc://adapters/may"}}, "health"),
        ({"health": {"policy": "Fail"}, "queueName": "q"}, "health and queueName"),
    ],
)
def test_a_change_for_the_next_attempt_is_named(groups: JsonObject, named: str) -> None:
    plan = reconcile(child_of(), **groups)
    accepted = condition(plan, "Accepted")
    assert (accepted.status, accepted.reason) == ("True", "ChangePending")
    assert accepted.message.startswith(f"the change of {named} takes effect with the next attempt")
    assert "ChangePending" in [e.reason for e in plan.events]
    assert (plan.delete, plan.create) == ((), None)
    # The attempt that is made from the changed spec has nothing pending.
    assert condition(reconcile(child_of(**groups), **groups), "Accepted").reason == "Valid"


@pytest.mark.parametrize(
    "groups",
    [
        {"restartPolicy": {"maxRestarts": 9}},
        {"activeDeadlineSeconds": 900},
        {"health": {"policy": "Warn"}},  # the default, written out
    ],
)
def test_what_acts_at_once_or_changes_nothing_is_not_pending(groups: JsonObject) -> None:
    assert condition(reconcile(child_of(), **groups), "Accepted").reason == "Valid"


@pytest.mark.parametrize("text", [None, "not JSON", "[1]"])
def test_a_job_without_usable_digests_has_no_pending_change(text: str | None) -> None:
    job = build_job(parse_job(document()), 1, "trainer:1")
    job["metadata"]["annotations"] = {names.ANNOTATION_BEGUN_WITH: text} if text else None
    child = child_from(job, "bottles", UID)
    assert child
    assert child.begun_with == ()
    assert condition(reconcile(child, queueName="q"), "Accepted").reason == "Valid"


def test_a_part_that_an_earlier_operator_did_not_record_is_not_compared() -> None:
    begun = digests_of(spec())
    del begun["queueName"]
    assert changed_since(spec(queueName="q"), begun) == []


def test_no_secret_is_in_the_digests() -> None:
    env = [{"name": "HF_TOKEN", "value": "hunter2"}]
    assert "hunter2" not in json.dumps(digests_of(spec(podTemplate={"env": env})))

"""Several pods in an attempt: whose words count, and which of them is the cause of a failure."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kubelora_api.report import FinalReport
from kubelora_api.status import Artifact
from kubelora_operator.controller.convert import pod_from
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.failure import RestartCost, classify_failure
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod
from tests.operator.controller.test_convert import OWNERS
from tests.operator.controller.test_convert import pod as pod_document
from tests.operator.world import START, World, condition, make_snapshot, spec

GANG: dict[str, Any] = {
    "workers": {"nodes": 2, "gpusPerNode": 1},
    "training": {"steps": 100, "gradientAccumulation": 2},
}
FAILED = Child(
    name="bottles-0b5e7-1",
    uid="job-1",
    attempt=1,
    state="failed",
    failure=Explanation("BackoffLimitExceeded", "Job has reached the specified backoff limit"),
)


def ended(index: int, code: int, after: int, **changes: Any) -> TrainerPod:
    """The attempt's pod of an index, that ended with a code some seconds after the start."""
    pod = TrainerPod(
        name=f"bottles-0b5e7-1-{index}",
        uid=f"pod-{index}",
        attempt=1,
        index=index,
        phase="Failed" if code else "Succeeded",
        exit_code=code,
        ended=START + timedelta(seconds=after),
        final=FinalReport(run_id="r", attempt=1, exit_code=code, message=f"words of {index}"),
    )
    return replace(pod, **changes)


def gang(*pods: TrainerPod, child: Child = FAILED) -> Snapshot:
    status = World().status.model_copy(update={"attempt": 1, "child_uid": "job-1"})
    return make_snapshot(spec=spec(**GANG), status=status, children=(child,), pods=pods)


@pytest.mark.parametrize(
    ("pods", "cost", "reason", "words"),
    [
        ((ended(0, 4, 1), ended(1, 1, 2)), RestartCost.COUNTED, "TrainerFailed", "words of 1"),
        ((ended(0, 4, 1), ended(1, 3, 9)), RestartCost.FINAL, "NumericalFailure", "words of 1"),
        ((ended(0, 1, 5), ended(1, 1, 3)), RestartCost.COUNTED, "TrainerFailed", "words of 1"),
        ((ended(0, 75, 5), ended(1, 4, 3)), RestartCost.FREE, "Interrupted", "checkpoint"),
        (
            (ended(0, 4, 1), ended(1, 137, 2, out_of_memory=True)),
            RestartCost.COUNTED,
            "OutOfMemory",
            "memory",
        ),
        # Pod 1 was deleted because pod 0 had failed; what it said then is no cause.
        (
            (ended(0, 1, 9), ended(1, 75, 3, deleting=True)),
            RestartCost.COUNTED,
            "TrainerFailed",
            "of 0",
        ),
        (
            (ended(0, 4, 9), ended(1, 137, 3, disrupted=True)),
            RestartCost.FREE,
            "Disrupted",
            "evicted",
        ),
        (
            (ended(0, 4, 9), ended(1, 143, 3, disrupted=True, deleting=True)),
            RestartCost.FREE,
            "Disrupted",
            "evicted",
        ),
        ((ended(0, 4, 1),), RestartCost.FREE, "PodDeleted", "index 1 was deleted"),
        ((ended(0, 4, 1), ended(1, 4, 1)), RestartCost.COUNTED, "PeerLost", "network"),
    ],
)
def test_the_cause_of_a_gangs_failure_is_the_first_real_one(
    pods: tuple[TrainerPod, ...], cost: RestartCost, reason: str, words: str
) -> None:
    cause = classify_failure(gang(*pods), FAILED)
    assert (cause.cost, cause.explanation.reason) == (cost, reason)
    assert words in cause.explanation.message


def test_the_sentence_is_that_of_the_pod_whose_code_the_job_names() -> None:
    told = Explanation(
        "PodFailurePolicy",
        "Container trainer for pod studio/bottles-0b5e7-1-1 failed with exit code 2 matching "
        "FailJob rule at index 0",
    )
    seen = gang(ended(0, 4, 1), ended(1, 2, 2))
    cause = classify_failure(seen, replace(FAILED, failure=told))
    assert (cause.cost, cause.explanation.message) == (RestartCost.FINAL, "words of 1")


def running(index: int, **changes: Any) -> TrainerPod:
    pod = TrainerPod(
        name=f"bottles-0b5e7-1-{index}",
        uid=f"pod-{index}",
        attempt=1,
        index=index,
        phase="Running",
        running=True,
        since=START,
    )
    return replace(pod, **changes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_gang_runs_when_all_its_pods_do_and_the_first_tells(order: tuple[int, int]) -> None:
    live = replace(FAILED, state="active", failure=None)
    pods = [running(0), running(1)]
    plan = decide(gang(*(pods[i] for i in order), child=live), START)
    assert condition(plan, "Running").status == "True"
    assert "bottles-0b5e7-1-0" in condition(plan, "Running").message


def test_a_pod_that_cannot_start_holds_up_the_gang_and_the_condition_says_why() -> None:
    live = replace(FAILED, state="active", failure=None)
    unschedulable = Explanation(
        "Unschedulable", "the pod cannot be scheduled: 0/1 nodes have a GPU left"
    )
    waiting = running(1, phase="Pending", running=False, waiting=unschedulable)
    told = condition(decide(gang(running(0), waiting, child=live), START), "Running")
    assert (told.status, told.reason) == ("False", "Unschedulable")
    assert "0/1 nodes have a GPU left" in told.message


def test_the_artifacts_are_those_that_rank_0_tells_of() -> None:
    done = replace(FAILED, state="complete", failure=None)
    artifact = Artifact(uri="pvc://adapters/bottles/adapter/x.safetensors", sha256="ab", bytes=9)
    first = FinalReport(run_id="r", attempt=1, exit_code=0, message="", artifacts=[artifact])
    pods = (ended(0, 0, 2, final=first), ended(1, 0, 3))
    assert decide(gang(*pods, child=done), START).status.artifacts == [artifact]


def test_a_pods_index_and_end_are_read_from_what_the_cluster_says() -> None:
    document = pod_document(
        {
            "phase": "Failed",
            "containerStatuses": [
                {
                    "name": "trainer",
                    "state": {"terminated": {"exitCode": 4, "finishedAt": "2026-03-01T12:00:07Z"}},
                }
            ],
        }
    )
    document["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": "1"}
    found = pod_from(document, "bottles", "0b5e7a10-1111-4222-8333-944455556666", OWNERS)
    assert found is not None
    assert (found.index, found.ended) == (1, START + timedelta(seconds=7))

"""What a critical finding does to a job on a real cluster, by its health policy.

Three jobs with settings that are known to lose updates; the finding is the trainer's own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .harness.probes import wait_until
from .harness.studio import Studio


def lossy(policy: str) -> dict[str, object]:
    """Weights and accumulator in bf16 at a small learning rate: most updates change nothing."""
    name = policy.lower()
    return {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "pvc://model"},
            "dataset": {"uri": "pvc://data", "resolution": 64},
            "adapter": {"rank": 8, "init": "orthogonal"},
            "training": {
                "steps": 2000,
                "gradientAccumulation": 2,
                "learningRate": 1.0e-5,
                "device": "cpu",
            },
            "precision": {
                "accumulator": "bf16",
                "masterWeights": "bf16",
                "allowLossyPrecision": True,
            },
            "checkpoint": {"everySteps": 2},
            "health": {"policy": policy},
            "output": {"uri": f"pvc://output/{name}"},
            "workers": {"nodes": 1, "gpusPerNode": 1},
        },
    }


def live_pods(own_studio: Studio, job: str) -> list[Any]:
    return [p for p in own_studio.pods(job) if p["status"]["phase"] in ("Pending", "Running")]


@pytest.fixture(scope="module")
def applied(own_studio: Studio) -> Studio:
    own_studio.kubectl.apply(*(lossy(policy) for policy in ("Suspend", "Fail", "Rollback")))
    return own_studio


def test_suspend_ends_the_pod_behind_a_checkpoint_and_says_how_to_go_on(applied: Studio) -> None:
    applied.wait("suspend", "Suspended", 720)
    told = applied.condition("suspend", "Suspended")
    assert told["reason"] == "HealthPolicy"
    assert "UpdatesLost" in told["message"]
    assert "set spec.health.policy to Warn" in told["message"]
    assert applied.status("suspend")["state"] == "Suspended"
    assert wait_until(lambda: live_pods(applied, "suspend") == [], 90)
    held_at = applied.status("suspend")["progress"]["step"]
    assert held_at > 0
    checkpoints = applied.output / "suspend" / "checkpoints"
    assert (checkpoints / f"step-{held_at:06d}").is_dir(), list(checkpoints.iterdir())


def test_a_held_job_is_unhealthy_and_costs_no_restart(applied: Studio) -> None:
    healthy = applied.condition("suspend", "NumericallyHealthy")
    assert (healthy["status"], applied.status("suspend").get("restarts", 0)) == ("False", 0)


def test_a_changed_policy_goes_on_from_the_checkpoint(applied: Studio) -> None:
    held_at = applied.status("suspend")["progress"]["step"]
    patch = {"spec": {"health": {"policy": "Warn"}}}
    applied.kubectl("patch", "ltj", "suspend", "--type=merge", "-p", json.dumps(patch))

    def goes_on() -> bool:
        status = applied.status("suspend")
        return status.get("attempt") == 2 and status["progress"]["step"] > held_at

    assert wait_until(goes_on, 540), applied.describe("suspend")
    (pod,) = applied.pods("suspend", 2)
    log = applied.kubectl("logs", pod["metadata"]["name"])
    assert f"step-{held_at:06d}" in log
    assert not applied.is_true("suspend", "Suspended")


def test_fail_fails_the_job_at_once_with_the_finding_in_its_words(applied: Studio) -> None:
    applied.wait("fail", "Failed", 720)
    failed = applied.condition("fail", "Failed")
    assert "UpdatesLost" in failed["message"]
    assert "health.policy is Fail" in failed["message"]
    assert applied.status("fail")["attempt"] == 1


def test_rollback_goes_back_once_and_fails_when_the_fault_is_in_the_settings(
    applied: Studio,
) -> None:
    applied.wait("rollback", "Failed", 720)
    assert "already went back to step" in applied.condition("rollback", "Failed")["message"]
    assert applied.status("rollback")["attempt"] == 1  # within one pod
    (pod,) = applied.pods("rollback")
    assert "Training rolled back from step" in applied.kubectl("logs", pod["metadata"]["name"])
    names = {f["name"] for f in applied.status("rollback")["health"]["findings"]}
    assert {"RolledBack", "UpdatesLost"} <= names

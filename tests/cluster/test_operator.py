"""The operator against a real API server, Job controller, scheduler and kubelet.

It runs as a process of this machine; the pods run a stand-in for the trainer, so that each test is
about the operator alone. The product's own images are tested end to end elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness.kubectl import Kubectl
from .harness.probes import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
CRD = REPOSITORY / "crds" / "kubelora.dev_loratrainingjobs.yaml"
STAND_IN = Path(__file__).with_name("stand_in.py")
Start = Callable[..., subprocess.Popen[bytes]]
JsonObject = dict[str, Any]


@pytest.fixture
def scoped(kubectl: Kubectl, namespace: str) -> Kubectl:
    kubectl.define(CRD)
    within = kubectl.within(namespace)
    shebang = "#!/usr/bin/python3\n"
    within.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "stand-in", "namespace": namespace},
            "data": {"kubelora": shebang + STAND_IN.read_text()},
        }
    )
    return within


@pytest.fixture
def start(cluster: Path, namespace: str, shell_image: str, tmp_path: Path) -> Iterator[Start]:
    """Start an operator for the test's namespace; all of them end with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(identity: str = "one", *options: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{identity}.log").open("ab")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kubelora_operator.manager.main", "run", "-n", namespace),
                *("--trainer-image", shell_image, "--lease-namespace", namespace),
                *("--identity", identity, "--metrics-port", "0", "--poll-seconds", "2"),
                *("--progress-seconds", "2"),
                *options,
            ],
            env=os.environ | {"KUBECONFIG": str(cluster)},
            stderr=log,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(90)


def job(
    namespace: str, order: str, podTemplate: JsonObject | None = None, **spec: object
) -> JsonObject:
    volume = {"name": "stand-in", "configMap": {"name": "stand-in", "defaultMode": 0o755}}
    template: JsonObject = {
        "env": [{"name": "STAND_IN", "value": order}],
        "volumes": [volume],
        "volumeMounts": [{"name": "stand-in", "mountPath": "/usr/local/bin"}],
    }
    template |= podTemplate or {}
    return {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": "bottles", "namespace": namespace},
        "spec": {
            "model": {"uri": "hf://org/sdxl"},
            "dataset": {"uri": "hf://org/photos"},
            "training": {"steps": 100, "device": "cpu"},
            "output": {"uri": "pvc://adapters/out"},
            "workers": {"gpusPerNode": 0},
            "podTemplate": template,
        }
        | spec,
    }


def items(kubectl: Kubectl, *arguments: str) -> list[JsonObject]:
    found: list[JsonObject] = kubectl.items(*arguments)
    return found


def look(kubectl: Kubectl) -> JsonObject:
    return kubectl.get("ltj", "bottles")


def status(kubectl: Kubectl) -> JsonObject:
    found: JsonObject = look(kubectl).get("status", {})
    return found


def condition(kubectl: Kubectl, kind: str) -> JsonObject:
    conditions: list[JsonObject] = status(kubectl).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def lease_holder(kubectl: Kubectl) -> str:
    path = "jsonpath={.spec.holderIdentity}"
    return kubectl.attempt("get", "lease", "kubelora-operator", "-o", path).stdout


def until(what: Callable[[], object], kubectl: Kubectl, seconds: float = 300) -> None:
    assert wait_until(lambda: bool(what()), seconds), kubectl("get", "ltj,job,pod", "-o", "yaml")


def test_a_missing_claim_is_a_reason_and_recovers_and_the_job_completes(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    start()
    scoped.create(job(namespace, "8"))
    until(lambda: condition(scoped, "Running").get("reason") == "ClaimNotFound", scoped)
    running = condition(scoped, "Running")
    assert running["status"] == "False"
    assert "PersistentVolumeClaim adapters does not exist" in running["message"]

    claim_directory("adapters", tmp_path / "adapters")
    until(lambda: status(scoped).get("progress", {}).get("step"), scoped)
    assert status(scoped)["state"] == "Running"
    until(lambda: condition(scoped, "Complete").get("status") == "True", scoped)

    done = look(scoped)
    assert done["status"]["attempt"] == 1
    assert done["status"]["restarts"] == 0
    assert done["status"]["progress"]["percent"] == "100%"
    assert done["status"]["artifacts"] == [
        {"uri": "pvc://adapters/out/adapter/x.safetensors", "sha256": "ab" * 32, "bytes": 7}
    ]
    # Nothing of the operator's, and nothing of kopf's, is on the user's object.
    assert "finalizers" not in done["metadata"]
    assert "annotations" not in done["metadata"]
    reasons = {
        e["reason"] for e in items(scoped, "events") if e["involvedObject"]["name"] == "bottles"
    }
    assert {"ClaimNotFound", "TrainingDone"} <= reasons

    scoped("delete", "ltj", "bottles", "--wait=true", "--timeout=180s")
    ours = ("job,pod,configmap", "-l", "app.kubernetes.io/managed-by=kubelora-operator")
    until(lambda: not items(scoped, *ours), scoped)


def test_an_image_that_can_not_be_pulled_is_a_reason_and_no_failure(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    absent = {"image": "localhost/absent:none", "imagePullPolicy": "Never"}
    scoped.create(job(namespace, "1", podTemplate=absent))
    until(lambda: condition(scoped, "Running").get("reason") == "ImagePullFailed", scoped)
    assert "localhost/absent:none" in condition(scoped, "Running")["message"]
    assert status(scoped)["state"] == "Pending"
    assert status(scoped)["restarts"] == 0


def test_exit_2_fails_once_with_the_trainers_sentence_and_is_not_retried(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    scoped.create(job(namespace, "exit 2"))
    until(lambda: condition(scoped, "Failed").get("status") == "True", scoped)
    failed = condition(scoped, "Failed")
    assert failed["reason"] == "ConfigurationError"
    assert failed["message"] == "the stand-in was told to end like this"
    scoped("delete", "job", "--all")
    assert not wait_until(lambda: bool(items(scoped, "job")), 5)
    assert status(scoped)["attempt"] == 1


def test_a_failure_is_counted_and_the_limit_ends_it(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    scoped.create(job(namespace, "exit 1", restartPolicy={"maxRestarts": 1}))
    until(lambda: condition(scoped, "Restarting").get("status") == "True", scoped)
    until(lambda: condition(scoped, "Failed").get("status") == "True", scoped)
    assert condition(scoped, "Failed")["reason"] == "MaxRestartsExceeded"
    assert (status(scoped)["attempt"], status(scoped)["restarts"]) == (2, 1)


def test_suspend_and_deletion_from_outside_are_free_and_lead_to_new_attempts(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    scoped.create(job(namespace, "600", restartPolicy={"maxRestarts": 0}))
    until(lambda: status(scoped).get("state") == "Running", scoped)

    scoped("patch", "ltj", "bottles", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until(lambda: status(scoped).get("state") == "Suspended", scoped)
    assert all(p["status"]["phase"] in ("Failed", "Succeeded") for p in items(scoped, "pod"))
    scoped("patch", "ltj", "bottles", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    until(lambda: status(scoped)["attempt"] == 2 and status(scoped)["state"] == "Running", scoped)

    scoped("delete", "pod", "--all")
    until(lambda: status(scoped)["attempt"] == 3 and status(scoped)["state"] == "Running", scoped)
    scoped("delete", "job", "-l", "kubelora.dev/attempt=3")
    until(lambda: status(scoped)["attempt"] == 4 and status(scoped)["state"] == "Running", scoped)
    assert status(scoped)["restarts"] == 0


def test_a_restart_of_the_operator_goes_on_from_the_cluster_alone(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    first = start()
    scoped.create(job(namespace, "12"))
    until(lambda: status(scoped).get("state") == "Running", scoped)
    pods = [p["metadata"] for p in items(scoped, "pod")]
    first.kill()
    first.wait(90)
    start("two")  # waits until the dead holder's lease has run out
    until(lambda: condition(scoped, "Complete").get("status") == "True", scoped)
    after = [p["metadata"] for p in items(scoped, "pod")]
    assert [(p["name"]) for p in after] == [p["name"] for p in pods]
    assert status(scoped)["attempt"] == 1


def test_of_two_operators_one_leads_and_a_frozen_leader_is_replaced_and_ends(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")

    def holder() -> str:
        return lease_holder(scoped)

    first = start("one")
    until(lambda: holder() == "one", scoped)
    start("two")
    scoped.create(job(namespace, "600"))
    until(lambda: status(scoped).get("state") == "Running", scoped)
    assert holder() == "one"

    first.send_signal(signal.SIGSTOP)
    until(lambda: holder() == "two", scoped)
    first.send_signal(signal.SIGCONT)
    assert first.wait(90) == 3
    assert holder() == "two"
    assert len(items(scoped, "job")) == 1
    assert status(scoped)["attempt"] == 1


def test_a_lease_is_handed_over_at_once_on_sigterm(scoped: Kubectl, start: Start) -> None:
    def holder() -> str:
        return lease_holder(scoped)

    first = start("one")
    until(lambda: holder() == "one", scoped)
    first.terminate()
    assert first.wait(90) == 0
    assert holder() == ""


def test_a_queue_that_suspends_the_job_shows_as_queued(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    scoped.create(job(namespace, "600", queueName="team-studio"))
    until(lambda: items(scoped, "job"), scoped)
    child = items(scoped, "job")[0]["metadata"]
    assert child["labels"]["kueue.x-k8s.io/queue-name"] == "team-studio"
    name = str(child["name"])
    # What Kueue does to a Job whose queue has no room, and does not do when it is not installed.
    scoped("patch", "job", name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until(lambda: status(scoped).get("state") == "Queued", scoped)
    scoped("patch", "job", name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    until(lambda: status(scoped).get("state") == "Running", scoped)
    assert status(scoped)["attempt"] == 1


def test_what_the_api_server_refuses_of_a_pod_template_is_a_sentence_and_can_be_mended(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start()
    wrong = job(namespace, "600")
    wrong["spec"]["podTemplate"]["resources"] = {"limits": {"memory": "much"}}
    scoped.create(wrong)
    until(lambda: condition(scoped, "Running").get("reason") == "Rejected", scoped)
    assert "quantities must match" in condition(scoped, "Running")["message"]
    mended = '{"spec":{"podTemplate":{"resources":{"limits":{"memory":"256Mi"}}}}}'
    scoped("patch", "ltj", "bottles", "--type=merge", "-p", mended)
    until(lambda: status(scoped).get("state") == "Running", scoped)
    assert status(scoped)["attempt"] == 1


def test_what_the_pod_policy_refuses_starts_once_it_is_removed_behind_a_network_policy(
    scoped: Kubectl, namespace: str, start: Start, claim_directory: Any, tmp_path: Path
) -> None:
    claim_directory("adapters", tmp_path / "adapters")
    start("one", "--network-policy", '{"operator": {"podSelector": {}}}')
    hostile = {
        "priorityClassName": "system-node-critical",
        "annotations": {"k8s.v1.cni.cncf.io/networks": "kube-system/host"},
    }
    scoped.create(job(namespace, "600", podTemplate=hostile))
    until(lambda: condition(scoped, "Accepted").get("reason") == "PodTemplateNotAllowed", scoped)
    message = condition(scoped, "Accepted")["message"]
    assert "podPolicy.priorityClasses" in message
    assert "podPolicy.annotations" in message
    assert items(scoped, "jobs") == []
    removed = '{"spec":{"podTemplate":{"priorityClassName":null,"annotations":null}}}'
    scoped("patch", "ltj", "bottles", "--type=merge", "-p", removed)
    until(lambda: status(scoped).get("state") == "Running", scoped)
    [policy] = items(scoped, "networkpolicies")
    [pod] = items(scoped, "pods")
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert selected <= pod["metadata"]["labels"].items()
    scoped("delete", "ltj", "bottles")
    until(lambda: items(scoped, "networkpolicies") == [], scoped)

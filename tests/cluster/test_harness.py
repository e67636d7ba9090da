"""The harness itself: the cluster is a real one, and the fixtures do what they promise."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.tiers.skips import not_applicable

from .conftest import ClaimDirectory
from .harness import cluster as local_cluster
from .harness import processes
from .harness.kubectl import JsonObject, Kubectl, KubectlError
from .harness.places import Places
from .harness.settings import API_SERVICE_ADDRESS, GPU_RESOURCE, GPUS

USER = 10001


def shell_pod(
    name: str, image: str, script: str, gpus: int = 0, claim: str | None = None
) -> JsonObject:
    """A pod that runs a Python script as an ordinary user and is not restarted."""
    container: JsonObject = {
        "name": "main",
        "image": image,
        "command": ["python3", "-u", "-c", script],
        "resources": {"limits": {GPU_RESOURCE: str(gpus)}} if gpus else {},
    }
    spec: JsonObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsUser": USER, "runAsNonRoot": True, "fsGroup": USER},
        "containers": [container],
    }
    if claim:
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def output_of(kubectl: Kubectl, pod: JsonObject) -> str:
    """Run a pod to its end and return what it printed."""
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    name = str(metadata["name"])
    kubectl.apply(pod)
    try:
        kubectl.wait_for("jsonpath={.status.phase}=Succeeded", f"pod/{name}", seconds=180)
    except KubectlError as error:
        pytest.fail(f"{error}\n{kubectl('describe', 'pod', name)}")
    return kubectl("logs", name)


def test_the_api_server_is_the_version_that_was_built(kubectl: Kubectl) -> None:
    version = json.loads(kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]
    assert version["serverVersion"]["gitVersion"] == "v1.34.4"


def test_up_on_a_running_cluster_starts_nothing(
    places: Places, cluster: Path, is_local_cluster: bool
) -> None:
    if not is_local_cluster:
        not_applicable("the cluster is not the harness's")
    names = processes.remembered(places)
    before = {name: processes.running_pid(places, name) for name in names}
    assert local_cluster.up(places) == cluster
    assert {name: processes.running_pid(places, name) for name in names} == before
    assert None not in before.values()


def test_the_kubeconfig_is_for_its_owner_alone(cluster: Path) -> None:
    assert stat.S_IMODE(cluster.stat().st_mode) == 0o600


def test_a_pod_that_asks_for_a_gpu_runs_as_an_ordinary_user(
    kubectl: Kubectl, namespace: str, shell_image: str
) -> None:
    script = "import os; print('user', os.getuid())"
    pod = shell_pod("gpu", shell_image, script, gpus=1)
    assert output_of(kubectl.within(namespace), pod) == f"user {USER}\n"


def test_a_pod_that_asks_for_more_gpus_than_there_are_waits(
    kubectl: Kubectl, namespace: str, shell_image: str
) -> None:
    here = kubectl.within(namespace)
    here.apply(shell_pod("greedy", shell_image, "", gpus=GPUS + 1))
    here.wait_for("condition=PodScheduled=False", "pod/greedy", seconds=120)
    pod = here.get("pod", "greedy")
    assert f"Insufficient {GPU_RESOURCE}" in json.dumps(pod["status"])


def test_names_of_services_resolve_and_lead_to_them(
    kubectl: Kubectl, namespace: str, shell_image: str
) -> None:
    script = """
import socket
print(socket.gethostbyname("kubernetes.default.svc.cluster.local"))
with socket.create_connection(("kubernetes.default", 443), timeout=5) as connection:
    print(connection.getpeername()[1])
"""
    output = output_of(kubectl.within(namespace), shell_pod("resolver", shell_image, script))
    assert output.split() == [API_SERVICE_ADDRESS, "443"]


def test_one_pod_reaches_another_through_a_service(
    kubectl: Kubectl, namespace: str, shell_image: str
) -> None:
    """Both are on one node, where an answer could take a way around the address translation."""
    here = kubectl.within(namespace)
    server = shell_pod(
        "server",
        shell_image,
        "import socket\n"
        "listener = socket.create_server(('', 8080))\n"
        "while True:\n    connection, _ = listener.accept()\n"
        "    connection.sendall(b'hello')\n    connection.close()",
    )
    server["metadata"] = {"name": "server", "labels": {"app": "server"}}
    service: JsonObject = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "greeter"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    here.apply(server, service)
    here.wait_for("condition=Ready", "pod/server", seconds=180)
    client = """
import socket, time
for attempt in range(50):  # the Service's rules follow the pod's readiness by a moment
    try:
        with socket.create_connection(("greeter", 80), timeout=5) as connection:
            print(connection.recv(5).decode())
        break
    except OSError:
        time.sleep(0.2)
"""
    assert output_of(here, shell_pod("client", shell_image, client)) == "hello\n"


def test_what_a_pod_writes_to_a_claim_is_in_the_folder(
    kubectl: Kubectl,
    namespace: str,
    shell_image: str,
    claim_directory: ClaimDirectory,
    tmp_path: Path,
) -> None:
    claim_directory("data", tmp_path / "data")
    (tmp_path / "data" / "question").write_text("6 x 7")
    script = """
a, b = open("/data/question").read().split(" x ")
open("/data/answer", "w").write(str(int(a) * int(b)))
"""
    output_of(kubectl.within(namespace), shell_pod("writer", shell_image, script, claim="data"))
    assert (tmp_path / "data" / "answer").read_text() == "42"


def test_kubectl_says_what_went_wrong(kubectl: Kubectl, namespace: str) -> None:
    with pytest.raises(KubectlError, match=r"kubectl get pod absent.*NotFound"):
        kubectl.within(namespace)("get", "pod", "absent")

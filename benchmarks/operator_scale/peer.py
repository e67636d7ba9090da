"""Kubeflow's training-operator v1 as a subject, built from its Go module.

Its PyTorchJob with one pod comes nearest to a LoraTrainingJob: the operator creates the pod itself,
and a Service. It is tuned: no throttle in its client, and as many workers as ours has.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Final

import yaml

from benchmarks.operator_scale import documents
from benchmarks.operator_scale.api import Api, BenchError, Object
from benchmarks.operator_scale.control_plane import OPERATOR_USER
from benchmarks.operator_scale.subject import OURS, Subject
from tests.cluster.harness import gobuild
from tests.cluster.harness.places import default_places
from tests.cluster.harness.tools import TRAINING_OPERATOR

_NAMESPACE: Final = "kubeflow"
_SECRET: Final = "training-operator-webhook-cert"
_SECRETS: Final = f"/api/v1/namespaces/{_NAMESPACE}/secrets"
_WEBHOOKS: Final = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
_CERTIFICATES: Final = Path("/tmp/k8s-webhook-server/serving-certs")
"""Where it reads its certificate, with no option for another folder."""


def training_operator() -> Subject:
    """Return training-operator v1; the first call builds it."""
    places = default_places()
    gobuild.ensure(places, (TRAINING_OPERATOR,))
    program, crd = (TRAINING_OPERATOR.folder(places) / n for n in TRAINING_OPERATOR.outputs)
    return Subject(
        name="training-operator",
        jobs=f"/apis/kubeflow.org/v1/namespaces/{OURS}/pytorchjobs",
        children=f"/api/v1/namespaces/{OURS}/pods",
        job_label="training.kubeflow.org/job-name",
        complete="Succeeded",
        document=_job,
        objects=(
            *_objects(),
            (documents.CRDS, yaml.safe_load(crd.read_text())),
        ),
        command=(
            str(program),
            "--enable-scheme=pytorchjob",
            *("--kube-api-qps=1000", "--kube-api-burst=2000", "--controller-threads=8"),
        ),
        port_flags=(
            "--metrics-bind-address=127.0.0.1:",
            "--health-probe-bind-address=127.0.0.1:",
            "--webhook-server-port=",
        ),
        helper=_mount_certificate,
    )


def _job(name: str) -> Object:
    """Return a PyTorchJob with the pod of our job."""
    template = documents.bare_job(OURS, name)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    container["name"] = "pytorch"  # it looks for the container of this name
    del template["metadata"]
    master = {"replicas": 1, "restartPolicy": "Never", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "namespace": OURS},
        "spec": {"pytorchReplicaSpecs": {"Master": master}},
    }


def _objects() -> list[tuple[str, Object]]:
    """Return its namespace, all rights, and what its certificates are written to.

    The webhook applies to no resource: validation would slow it down.
    """
    rbac = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "training-operator"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "apiGroup": rbac, "name": OPERATOR_USER}],
    }
    webhook = {
        "name": "validator.pytorchjob.training-operator.kubeflow.org",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"service": {"name": "training-operator", "namespace": _NAMESPACE}},
    }
    configuration = {
        "metadata": {"name": "validator.training-operator.kubeflow.org"},
        "webhooks": [webhook],
    }
    return [
        ("/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}}),
        (f"/apis/{rbac}/v1/clusterrolebindings", binding),
        (_SECRETS, {"metadata": {"name": _SECRET}}),
        (_WEBHOOKS, configuration),
    ]


async def _mount_certificate(api: Api) -> None:
    """Do what the kubelet would: put the Secret that it fills into the folder that it reads."""
    names = ("tls.crt", "tls.key")
    data: Object = {}
    while not all(name in data for name in names):
        await asyncio.sleep(0.2)
        data = (await api.get(f"{_SECRETS}/{_SECRET}")).get("data") or {}
    if _CERTIFICATES.exists():
        raise BenchError(f"{_CERTIFICATES} exists: stop who uses it and remove the folder.")
    _CERTIFICATES.mkdir(parents=True)
    try:
        for name in names:
            (_CERTIFICATES / name).write_bytes(base64.b64decode(data[name]))
        await asyncio.Event().wait()
    finally:
        for name in names:
            (_CERTIFICATES / name).unlink(missing_ok=True)
        _CERTIFICATES.rmdir()
        _CERTIFICATES.parent.rmdir()

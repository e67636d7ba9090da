"""The objects that the benchmark creates. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.operator_scale.control_plane import OPERATOR_NAMESPACE, OPERATOR_USER
from kubelora_api import names
from kubelora_api.documents import parse_job
from kubelora_operator.attempt.manifests import build_job
from kubelora_operator.kube.rbac import LEASE, NODES, WORK, Permission

CRD_FILE: Final = Path(__file__).parents[2] / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml"
CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
IMAGE: Final = "trainer:bench"
"""Never pulled: no pod is real."""
_RBAC: Final = "rbac.authorization.k8s.io"
_UID: Final = "00000000-0000-4000-8000-000000000000"
Object = dict[str, Any]


def crd() -> Object:
    """Return the CustomResourceDefinition."""
    found: Object = yaml.safe_load(CRD_FILE.read_text())
    return found


def training_job(namespace: str, name: str) -> Object:
    """Return a small LoraTrainingJob on one GPU."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": "pvc://models/sdxl"},
            "dataset": {"uri": "pvc://photos/bottles"},
            "training": {"steps": 100},
            "output": {"uri": f"pvc://adapters/{name}"},
        },
    }


def bare_job(namespace: str, name: str) -> Object:
    """Return the Job that the operator creates for `training_job`, for a client without it.

    It has no owner, which does not exist, and not the label by which the operator watches.
    """
    document = training_job(namespace, name)
    document["metadata"]["uid"] = _UID
    job = build_job(parse_job(document), 1, IMAGE)
    job["metadata"] |= {"name": name}
    del job["metadata"]["ownerReferences"]
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        del metadata["labels"][names.LABEL_MANAGED_BY]
    return dict(job)


def claims(namespace: str) -> list[tuple[str, Object]]:
    """Return collections and objects of the claims that `training_job` names, ready to be bound.

    The scheduler waits for them. No pod is real, so their folder is never used.
    """
    pairs = []
    for name in ("models", "photos", "adapters"):
        volume = f"{namespace}-{name}"
        terms: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        capacity = {"storage": "1Ti"}
        volume_spec = terms | {
            "capacity": capacity,
            "hostPath": {"path": "/nonexistent"},
            "claimRef": {"namespace": namespace, "name": name},
        }
        claim_spec = terms | {"volumeName": volume, "resources": {"requests": capacity}}
        pairs += [
            ("/api/v1/persistentvolumes", {"metadata": {"name": volume}, "spec": volume_spec}),
            (
                f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
                {"metadata": {"name": name}, "spec": claim_spec},
            ),
        ]
    return pairs


def rights() -> list[tuple[str, Object]]:
    """Return collections and objects that give the operator the rights of the chart."""
    namespaced = f"/apis/{_RBAC}/v1/namespaces/{OPERATOR_NAMESPACE}"
    metadata = {"name": "kubelora-operator"}
    local = metadata | {"namespace": OPERATOR_NAMESPACE}
    return [
        (f"/apis/{_RBAC}/v1/clusterroles", _role("ClusterRole", metadata, (*WORK, *NODES))),
        (
            f"/apis/{_RBAC}/v1/clusterrolebindings",
            _binding("ClusterRoleBinding", metadata, "ClusterRole"),
        ),
        (f"{namespaced}/roles", _role("Role", local, LEASE)),
        (f"{namespaced}/rolebindings", _binding("RoleBinding", local, "Role")),
    ]


def _role(kind: str, metadata: Object, permissions: tuple[Permission, ...]) -> Object:
    rules = [
        {"apiGroups": [p.group], "resources": [p.resource], "verbs": list(p.verbs)}
        for p in permissions
    ]
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules}


def _binding(kind: str, metadata: Object, role: str) -> Object:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": role, "name": metadata["name"]},
        "subjects": [{"kind": "User", "apiGroup": _RBAC, "name": OPERATOR_USER}],
    }

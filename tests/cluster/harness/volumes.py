"""Claims on folders of this machine, so that a test can put files in and look at what comes out.

The volumes are of type `local`, not `hostPath`: the kubelet then applies a pod's fsGroup, as it
does for the network storage that jobs use in earnest; a pod that forgot its fsGroup fails here too.
"""

from __future__ import annotations

from pathlib import Path

from .errors import HarnessError
from .kubectl import Kubectl
from .probes import wait_until
from .settings import NODE

NAMESPACE_LABEL = "kubelora.dev/test-namespace"


def claim_objects(
    namespace: str, name: str, directory: Path, node: str = NODE, capacity: str = "10Gi"
) -> list[dict[str, object]]:
    """A claim and the volume reserved for it, which is `directory` of the node."""
    access = ["ReadWriteMany"]
    volume_name = f"{namespace}-{name}"
    volume: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name, "labels": {NAMESPACE_LABEL: namespace}},
        "spec": {
            "capacity": {"storage": capacity},
            "accessModes": access,
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": namespace, "name": name},
            "local": {"path": str(directory)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [_only_on(node)]}},
        },
    }
    claim: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": access,
            "storageClassName": "",
            "volumeName": volume_name,
            "resources": {"requests": {"storage": capacity}},
        },
    }
    return [volume, claim]


def _only_on(node: str) -> dict[str, object]:
    key = "kubernetes.io/hostname"
    return {"matchExpressions": [{"key": key, "operator": "In", "values": [node]}]}


def claim_directory(kubectl: Kubectl, namespace: str, name: str, directory: Path) -> None:
    """Make claim `name` bound to `directory` (made if missing), and wait until it is."""
    directory.mkdir(parents=True, exist_ok=True)
    kubectl.apply(*claim_objects(namespace, name, directory.resolve()))
    arguments = ("get", "pvc", name, "--namespace", namespace, "-o", "jsonpath={.status.phase}")
    if not wait_until(lambda: kubectl.attempt(*arguments).stdout == "Bound", 120):
        raise HarnessError(
            f"Claim {namespace}/{name} was not bound to {directory} in 120 s; "
            f"`kubectl describe pvc {name} -n {namespace}` says why."
        )


def release_volumes(kubectl: Kubectl, namespace: str) -> None:
    """Delete the volumes made for a namespace; the folders and their files stay."""
    kubectl("delete", "pv", "--selector", f"{NAMESPACE_LABEL}={namespace}", "--wait=false")

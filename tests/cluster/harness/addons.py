"""Objects that the cluster needs inside itself: CoreDNS's rights and its Service, the GPUs."""

from __future__ import annotations

import json
import time

from .errors import HarnessError
from .kubectl import JsonObject, Kubectl
from .probes import wait_until
from .settings import DNS_PORT, DNS_SERVICE_ADDRESS, GPU_RESOURCE, GPUS, NODE


def dns_objects(node_address: str) -> list[dict[str, object]]:
    """CoreDNS runs on the host: a Service without a selector leads to it by a slice of our own."""
    service_ports = [
        {
            "name": f"dns-{protocol.lower()}",
            "port": 53,
            "protocol": protocol,
            "targetPort": DNS_PORT,
        }
        for protocol in ("UDP", "TCP")
    ]
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"k8s-app": "kube-dns"},
        },
        "spec": {"clusterIP": DNS_SERVICE_ADDRESS, "ports": service_ports},
    }
    endpoints: dict[str, object] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-host",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [node_address], "conditions": {"ready": True}}],
        "ports": [
            {"name": port["name"], "port": DNS_PORT, "protocol": port["protocol"]}
            for port in service_ports
        ],
    }
    return [*_dns_rights(), service, endpoints]


def _dns_rights() -> list[dict[str, object]]:
    read = ["list", "watch"]
    role: dict[str, object] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": read},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read},
        ],
    }
    binding: dict[str, object] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "system:coredns",
        },
        "subjects": [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}
        ],
    }
    return [role, binding]


def node_is_ready(kubectl: Kubectl) -> bool:
    done = kubectl.attempt(
        "get", "node", NODE, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    )
    return done.stdout == "True"


def allocatable_gpus(kubectl: Kubectl) -> int:
    node = kubectl.attempt("get", "node", NODE, "-o", "json")
    if node.returncode != 0:
        return 0
    status: JsonObject = json.loads(node.stdout)["status"]
    allocatable = status.get("allocatable")
    assert isinstance(allocatable, dict)
    return int(str(allocatable.get(GPU_RESOURCE, 0)))


def offer_gpus(kubectl: Kubectl, seconds: float = 180.0) -> None:
    """Announce GPUs that are not there; the kubelet copies the capacity to what is allocatable."""
    if allocatable_gpus(kubectl) == GPUS:
        return
    name = GPU_RESOURCE.replace("/", "~1")
    patch = [{"op": "add", "path": f"/status/capacity/{name}", "value": str(GPUS)}]
    started = time.monotonic()
    kubectl("patch", "node", NODE, "--subresource=status", "--type=json", "-p", json.dumps(patch))
    left = seconds - (time.monotonic() - started)
    if not wait_until(lambda: allocatable_gpus(kubectl) == GPUS, left, pause=0.5):
        raise HarnessError(
            f"The node was told that it has {GPUS} {GPU_RESOURCE}, but the kubelet did not make "
            f"them allocatable in {seconds:g} s; see kubelet.log."
        )

"""The operator's permissions: the list that a test compares with the chart's RBAC.

The chart must not grant a permission that is missing here, and the code must not make a request
that needs one. Nothing in the list reads Secrets, writes users' specs or patches pods.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Permission:
    """Verbs on one resource, and their purpose."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    purpose: str


WORK: Final = (
    Permission(
        "kubelora.dev",
        "loratrainingjobs",
        ("get", "list", "watch", "delete"),
        "read the jobs; delete finished ones after spec.ttlSecondsAfterFinished",
    ),
    Permission("kubelora.dev", "loratrainingjobs/status", ("update",), "update the status"),
    Permission(
        "batch", "jobs", ("get", "list", "watch", "create", "delete"), "one Job for each attempt"
    ),
    Permission(
        "", "configmaps", ("get", "create", "delete"), "the resolved job document of an attempt"
    ),
    Permission("", "services", ("get", "create", "delete"), "DNS names for pods on several nodes"),
    Permission(
        "networking.k8s.io",
        "networkpolicies",
        ("get", "create", "delete"),
        "who may connect to the pods of an attempt",
    ),
    Permission(
        "",
        "pods",
        ("get", "list", "watch", "delete"),
        "a pod's state and its address; force the deletion of a pod whose node is lost",
    ),
    Permission("", "events", ("create", "patch", "list"), "report to users; read pod warnings"),
)
"""For every namespace with jobs: a ClusterRole, or a Role in each namespace that is served."""

NODES: Final = (Permission("", "nodes", ("get",), "whether the node of a stuck pod is lost"),)
"""Cluster-wide only: without it, a pod on a lost node is reported and left to an administrator."""

LEASE: Final = (
    Permission("coordination.k8s.io", "leases", ("get", "create", "update"), "elect one leader"),
)
"""For the operator's own namespace only."""

"""What the operator asks of the API server: the one list that the chart's RBAC is held against.

A permission that is not used here must not be in the chart, and a call that is not listed here
must not be in the code. Nothing in the list reads Secrets, writes users' specs or patches pods.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Permission:
    """Verbs on one resource, and what they are for."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    purpose: str


WORK: Final = (
    Permission("kubelora.dev", "loratrainingjobs", ("get", "list", "watch"), "read the jobs"),
    Permission("kubelora.dev", "loratrainingjobs/status", ("update",), "one guarded status write"),
    Permission(
        "batch", "jobs", ("get", "list", "watch", "create", "delete"), "one Job for each attempt"
    ),
    Permission("", "configmaps", ("get", "create"), "the resolved job document of an attempt"),
    Permission("", "services", ("get", "create"), "names for the pods of an attempt of several"),
    Permission("", "pods", ("get", "list", "watch"), "why a pod waits, how it ended, its address"),
    Permission("", "events", ("create", "patch", "list"), "tell users; read why a pod is stuck"),
)
"""In every namespace with jobs: a ClusterRole, or a Role in each namespace that is served."""

LEASE: Final = (
    Permission("coordination.k8s.io", "leases", ("get", "create", "update"), "elect one leader"),
)
"""In the operator's own namespace alone."""

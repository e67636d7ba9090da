"""The pod policy: what a job may ask for on this cluster. The chart's value ``podPolicy``."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

from pydantic import Field

from kubelora_api.schema import ApiModel

NamePattern = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9*:@/._-]+$")]
NamePatterns = tuple[NamePattern, ...]
SizeLimit = Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)$")]
VolumeKind = Literal[
    "persistentVolumeClaim", "configMap", "secret", "emptyDir", "ephemeral", "csi", "nfs"
]


class PodPolicy(ApiModel):
    """Allow-lists and limits for podTemplates. In a pattern, ``*`` is any text.

    The chart's values explain each field and have the same defaults.
    """

    images: NamePatterns = ("*",)
    secrets: NamePatterns = ("kubelora-*",)
    resources: NamePatterns = (
        *("cpu", "memory", "ephemeral-storage", "hugepages-*", "nvidia.com/*", "rdma/*"),
    )
    node_labels: NamePatterns = (
        *("nvidia.com/*", "topology.kubernetes.io/*", "node.kubernetes.io/instance-type"),
        *("kubernetes.io/arch", "kubernetes.io/os", "kubernetes.io/hostname"),
        *("cloud.google.com/gke-accelerator", "karpenter.sh/*"),
    )
    tolerations: NamePatterns = ("nvidia.com/gpu:NoSchedule",)
    volume_kinds: tuple[VolumeKind, ...] = (
        "persistentVolumeClaim",
        "configMap",
        "secret",
        "emptyDir",
        "ephemeral",
    )
    priority_classes: NamePatterns = ()
    workload_priority_classes: NamePatterns = ("*",)
    runtime_classes: NamePatterns = ("nvidia",)
    scheduler_names: NamePatterns = ("default-scheduler",)
    service_accounts: NamePatterns = ("default",)
    labels: NamePatterns = ("team", "project", "owner", "cost-center", "environment")
    annotations: NamePatterns = (
        *("cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"),
    )
    pod_affinity_across_namespaces: bool = False
    max_shared_memory: SizeLimit = "64Gi"
    max_scratch: SizeLimit = "500Gi"
    max_termination_grace_period_seconds: Annotated[int, Field(ge=120, le=86400)] = 3600


DEFAULT_POLICY: Final = PodPolicy()


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)

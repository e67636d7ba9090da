"""``spec.podTemplate``: the pod fields that a user may set, without those that weaken security.

Fields have the names and meanings of a Kubernetes pod. Parts that the API server validates anyway
when the operator creates the child Job (such as affinity) are passed through unchanged.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictInt, StrictStr

from kubelora_api.names import RESERVED_ENV_PREFIX
from kubelora_api.schema import LIST_ATOMIC, MAP_ATOMIC, ApiModel, JsonObject, Rule, list_map

Quantity = StrictInt | StrictStr
QuantityMap = Annotated[dict[str, Quantity], Field(max_length=32), MAP_ATOMIC]
Name = Annotated[str, Field(min_length=1, max_length=253)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]
SetByOperator = ("JOB_COMPLETION_INDEX", "MASTER_ADDR", "MASTER_PORT")


class EnvVar(ApiModel):
    """An environment variable of the trainer container."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, Field(max_length=32768)] | None = Field(None, description="Plain value.")
    value_from: JsonObject | None = Field(
        None, description="Source of the value: a secretKeyRef, configMapKeyRef or fieldRef."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!self.name.startsWith('{RESERVED_ENV_PREFIX}') && !(self.name in "
            f"[{', '.join(repr(n) for n in SetByOperator)}])",
            message=f"names that start with {RESERVED_ENV_PREFIX}, and "
            f"{', '.join(SetByOperator)}, are set by the operator: choose another name",
            check=lambda e: (
                not e.name.startswith(RESERVED_ENV_PREFIX) and e.name not in SetByOperator
            ),
            at="name",
        ),
    )


class Resources(ApiModel):
    """Requests and limits of the trainer container."""

    requests: QuantityMap = Field(
        default_factory=dict, description="Requests, such as cpu and memory."
    )
    limits: QuantityMap = Field(
        default_factory=dict, description="Limits; nvidia.com/gpu is set from workers.gpusPerNode."
    )


class Volume(ApiModel):
    """A volume of the pod. Claims named in URIs are mounted without one."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name that a volume mount refers to."
    )
    persistent_volume_claim: JsonObject | None = Field(
        None, description="A claim of the job's namespace."
    )
    config_map: JsonObject | None = Field(None, description="Keys of a ConfigMap as files.")
    secret: JsonObject | None = Field(None, description="Keys of a Secret as files.")
    empty_dir: JsonObject | None = Field(
        None, description="An empty directory that is deleted with the pod."
    )
    ephemeral: JsonObject | None = Field(
        None, description="A claim that is created and deleted with the pod."
    )
    csi: JsonObject | None = Field(None, description="A volume of a CSI driver on the node.")
    nfs: JsonObject | None = Field(None, description="A directory of an NFS server.")
    host_path: JsonObject | None = Field(
        None, description="Not allowed because it would expose the node's file system."
    )
    projected: JsonObject | None = Field(
        None, description="Not allowed because it could contain a service account token."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.hostPath)",
            message="hostPath volumes are not allowed: use a persistentVolumeClaim",
            check=lambda v: v.host_path is None,
            at="hostPath",
        ),
        Rule(
            cel="!has(self.projected)",
            message="projected volumes are not allowed because training pods must not have an "
            "API token",
            check=lambda v: v.projected is None,
            at="projected",
        ),
    )


class VolumeMount(ApiModel):
    """A mount of a volume in the trainer container."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name of the volume."
    )
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Absolute path in the container, outside /kubelora."
    )
    sub_path: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Path within the volume. Default: its root."
    )
    read_only: bool = Field(False, description="Mount it read-only. Default false.")
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mountPath != '/kubelora' && !self.mountPath.startsWith('/kubelora/')",
            message="/kubelora is reserved for the operator: use another mountPath",
            check=lambda m: (
                m.mount_path != "/kubelora" and not m.mount_path.startswith("/kubelora/")
            ),
            at="mountPath",
        ),
    )


class SecurityContext(ApiModel):
    """User and group IDs of the pod. The rest of its security context is restricted and fixed."""

    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="User ID, which can't be root. Default 10001."
    )
    run_as_group: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="Group ID. Default 10001."
    )
    fs_group: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="Group ID that owns mounted volumes. Default 10001."
    )
    supplemental_groups: Annotated[
        list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=32), LIST_ATOMIC
    ] = Field(default_factory=list, description="Further group IDs of the processes.")


class LocalObjectReference(ApiModel):
    """The name of an object in the job's namespace."""

    name: Name = Field(description="Name of the object.")


class PodTemplate(ApiModel):
    """Image, environment, resources and scheduling of the training pods."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Trainer image. Default: the image configured for the operator."
    )
    env: Annotated[list[EnvVar], Field(max_length=128), list_map("name")] = Field(
        default_factory=list, description="Environment variables of the trainer container."
    )
    env_from: Annotated[list[JsonObject], Field(max_length=32), LIST_ATOMIC] = Field(
        default_factory=list,
        description="Secrets and ConfigMaps whose keys become environment variables.",
    )
    resources: Resources | None = None
    node_selector: Annotated[StringMap, MAP_ATOMIC] = Field(
        default_factory=dict, description="Labels that a node must have."
    )
    tolerations: Annotated[list[JsonObject], Field(max_length=64), LIST_ATOMIC] = Field(
        default_factory=list, description="Taints of nodes that the pods tolerate."
    )
    affinity: JsonObject | None = Field(
        None, description="Rules for nodes and for pods next to which the pods are scheduled."
    )
    topology_spread_constraints: Annotated[list[JsonObject], Field(max_length=16), LIST_ATOMIC] = (
        Field(
            default_factory=list,
            description="How the pods of a job are spread over zones or other groups of nodes.",
        )
    )
    volumes: Annotated[list[Volume], Field(max_length=32), list_map("name")] = Field(
        default_factory=list,
        description="Additional volumes. hostPath and projected volumes are not allowed.",
    )
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32), list_map("mountPath")] = (
        Field(default_factory=list, description="Mounts of volumes in the trainer container.")
    )
    shared_memory_size: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi)$", max_length=16)] = Field(
        "1Gi", description="Size of /dev/shm, which counts as memory of the pod. Default 1Gi."
    )
    scratch_size: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi)$", max_length=16)] = Field(
        "100Gi",
        description="Size limit of /tmp, where models from hf:// and caches are kept while the pod "
        "runs. A pod that exceeds it is evicted. Default 100Gi.",
    )
    priority_class_name: Name | None = Field(
        None, description="PriorityClass of the pods. Default: the cluster's."
    )
    scheduler_name: Name | None = Field(
        None,
        description="Scheduler of the pods, such as one that starts gangs as one. Its own labels "
        "go into labels. Default: the cluster's.",
    )
    runtime_class_name: Name | None = Field(
        None, description="RuntimeClass of the pods, such as nvidia. Default: the node's."
    )
    service_account_name: Name | None = Field(
        None, description="Service account of the pods; its token is not mounted. Default: default."
    )
    security_context: SecurityContext = Field(default_factory=SecurityContext)
    termination_grace_period_seconds: Annotated[int, Field(ge=120, le=86400)] = Field(
        120,
        description="Seconds for a pod to save its checkpoint when it is terminated. Default 120, "
        "120 to 86400.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Always, IfNotPresent (default) or Never."
    )
    image_pull_secrets: Annotated[
        list[LocalObjectReference], Field(max_length=16), list_map("name")
    ] = Field(default_factory=list, description="Secrets to pull the image with.")
    labels: StringMap = Field(
        default_factory=dict, description="Further labels of the pods, not under kubelora.dev/."
    )
    annotations: StringMap = Field(
        default_factory=dict, description="Further annotations of the pods."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k, !k.matches('^(.*[.])?kubelora[.]dev/'))",
            message="labels under kubelora.dev/ are set by the operator: choose another prefix",
            check=lambda p: (
                not any(k.split("/")[0].endswith("kubelora.dev") for k in p.labels if "/" in k)
            ),
            at="labels",
        ),
    )

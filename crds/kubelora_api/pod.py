"""``spec.podTemplate``: what a user may say about the pods, and what a platform team must refuse.

Fields keep the names and meanings of a Kubernetes pod. Parts that the API server validates anyway
when the operator creates the child Job (affinity, probes of volumes) pass through unchanged.
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
    """An environment variable of the trainer."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    value: Annotated[str, Field(max_length=32768)] | None = Field(None, description="Plain value.")
    value_from: JsonObject | None = Field(
        None, description="A secretKeyRef, configMapKeyRef or fieldRef."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!self.name.startsWith('{RESERVED_ENV_PREFIX}') && !(self.name in "
            f"[{', '.join(repr(n) for n in SetByOperator)}])",
            message=f"names that start with {RESERVED_ENV_PREFIX}, and "
            f"{', '.join(SetByOperator)}, are set by the operator",
            check=lambda e: (
                not e.name.startswith(RESERVED_ENV_PREFIX) and e.name not in SetByOperator
            ),
            at="name",
        ),
    )


class Resources(ApiModel):
    """Requests and limits of the trainer container."""

    requests: QuantityMap = Field(default_factory=dict)
    limits: QuantityMap = Field(
        default_factory=dict, description="nvidia.com/gpu follows workers.gpusPerNode."
    )


class Volume(ApiModel):
    """A volume of the pod, of one of these kinds. Claims named in URIs are mounted anyway."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    persistent_volume_claim: JsonObject | None = None
    config_map: JsonObject | None = None
    secret: JsonObject | None = None
    empty_dir: JsonObject | None = None
    ephemeral: JsonObject | None = None
    csi: JsonObject | None = None
    nfs: JsonObject | None = None
    host_path: JsonObject | None = Field(
        None, description="Refused: it would reach into the node's file system."
    )
    projected: JsonObject | None = Field(
        None, description="Refused: it could carry a service account token."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.hostPath)",
            message="hostPath volumes are refused: use a claim",
            check=lambda v: v.host_path is None,
            at="hostPath",
        ),
        Rule(
            cel="!has(self.projected)",
            message="projected volumes are refused: training pods hold no API token",
            check=lambda v: v.projected is None,
            at="projected",
        ),
    )


class VolumeMount(ApiModel):
    """Where a volume appears in the trainer container."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)]
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    read_only: bool = False
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mountPath != '/kubelora' && !self.mountPath.startsWith('/kubelora/')",
            message="/kubelora is the operator's: mount elsewhere",
            check=lambda m: (
                m.mount_path != "/kubelora" and not m.mount_path.startswith("/kubelora/")
            ),
            at="mountPath",
        ),
    )


class SecurityContext(ApiModel):
    """User and group ids of the pod. The rest of the security context is restricted and fixed."""

    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="User id, not root. Default 10001."
    )
    run_as_group: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="Group id. Default 10001."
    )
    fs_group: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        10001, description="Group that owns mounted claims. Default 10001."
    )
    supplemental_groups: Annotated[
        list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=32), LIST_ATOMIC
    ] = Field(default_factory=list)


class LocalObjectReference(ApiModel):
    """The name of an object in the job's namespace."""

    name: Name


class PodTemplate(ApiModel):
    """Where and with what the training pods run."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Trainer image. Default: the one the operator was installed with."
    )
    env: Annotated[list[EnvVar], Field(max_length=128), list_map("name")] = Field(
        default_factory=list
    )
    env_from: Annotated[list[JsonObject], Field(max_length=32), LIST_ATOMIC] = Field(
        default_factory=list, description="Secrets and ConfigMaps whose keys become variables."
    )
    resources: Resources | None = None
    node_selector: Annotated[StringMap, MAP_ATOMIC] = Field(default_factory=dict)
    tolerations: Annotated[list[JsonObject], Field(max_length=64), LIST_ATOMIC] = Field(
        default_factory=list
    )
    affinity: JsonObject | None = None
    topology_spread_constraints: Annotated[list[JsonObject], Field(max_length=16), LIST_ATOMIC] = (
        Field(default_factory=list)
    )
    volumes: Annotated[list[Volume], Field(max_length=32), list_map("name")] = Field(
        default_factory=list, description="hostPath and projected volumes are refused."
    )
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32), list_map("mountPath")] = (
        Field(default_factory=list)
    )
    shared_memory_size: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi)$", max_length=16)] = Field(
        "1Gi", description="Size of /dev/shm, memory of the pod. Default 1Gi."
    )
    priority_class_name: Name | None = None
    runtime_class_name: Name | None = None
    service_account_name: Name | None = Field(
        None, description="Default: default. Its token is not mounted."
    )
    security_context: SecurityContext = Field(default_factory=SecurityContext)
    termination_grace_period_seconds: Annotated[int, Field(ge=120, le=86400)] = Field(
        120,
        description="Seconds a pod has to save its checkpoint. Default 120, at least 120.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Always, IfNotPresent (default) or Never."
    )
    image_pull_secrets: Annotated[
        list[LocalObjectReference], Field(max_length=16), list_map("name")
    ] = Field(default_factory=list)
    labels: StringMap = Field(default_factory=dict)
    annotations: StringMap = Field(default_factory=dict)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k, !k.matches('^(.*[.])?kubelora[.]dev/'))",
            message="labels under kubelora.dev/ are set by the operator",
            check=lambda p: (
                not any(k.split("/")[0].endswith("kubelora.dev") for k in p.labels if "/" in k)
            ),
            at="labels",
        ),
    )

"""The pod spec of an attempt: restricted, without an API token, with writable scratch volumes.

Pure. The user's podTemplate is applied on top of what the trainer needs; a podTemplate has no
fields that could weaken the security context.
"""

from collections.abc import Sequence
from typing import Final

from kubelora_api import names
from kubelora_api.claims import claims_of
from kubelora_api.pod import PodTemplate, Resources
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec

JOB_PATH: Final = f"{names.JOB_DIRECTORY}/{names.JOB_FILE}"
_SCRATCH: Final = "/tmp"  # an emptyDir of the pod
_SHARED_MEMORY: Final = "/dev/shm"  # memory of the pod
_ENVIRONMENT: Final = {
    "HOME": _SCRATCH,
    "USER": "kubelora",
    "TMPDIR": _SCRATCH,
    "HF_HOME": f"{_SCRATCH}/huggingface",
    "XDG_CACHE_HOME": f"{_SCRATCH}/cache",
    "TORCHINDUCTOR_CACHE_DIR": f"{_SCRATCH}/torchinductor",
    "TRITON_CACHE_DIR": f"{_SCRATCH}/triton",
    "MPLCONFIGDIR": f"{_SCRATCH}/matplotlib",
}
"""The root file system is read-only, so libraries write to the scratch volume."""


def build_pod_spec(
    spec: JobSpec,
    *,
    attempt: int,
    child: str,
    trainer_image: str,
    avoided_nodes: Sequence[str] = (),
) -> JsonObject:
    """Build a ``v1.PodSpec``.

    Args:
        spec: The job's spec.
        attempt: Number of the attempt.
        child: Name of the attempt's Job, ConfigMap and Service.
        trainer_image: Image used if the podTemplate does not set one.
        avoided_nodes: Nodes whose GPU failed in an earlier attempt.
    """
    template = spec.pod_template
    claims = claims_of(spec)
    pod: JsonObject = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
        "securityContext": _pod_security(template),
        "containers": [_container(spec, attempt, child, claims, trainer_image)],
        "volumes": _volumes(template, claims, child),
    }
    if spec.workers.nodes > 1:
        pod["subdomain"] = child
    return pod | _placement(template) | _avoiding(template.affinity, avoided_nodes)


def _avoiding(affinity: JsonObject | None, nodes: Sequence[str]) -> JsonObject:
    """Add a preference against each node to the job's own affinity.

    Not a requirement: where all other nodes are taken or there are none, the job should still run.
    """
    if not nodes:
        return {}
    # The API server accepts one value per field selector.
    terms = [
        {
            "weight": 100,
            "preference": {
                "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]
            },
        }
        for node in nodes
    ]
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    own = affinity or {}
    node_affinity = own.get("nodeAffinity") or {}
    preferred = [*(node_affinity.get(key) or []), *terms]
    return {"affinity": own | {"nodeAffinity": node_affinity | {key: preferred}}}


def _container(
    spec: JobSpec, attempt: int, child: str, claims: dict[str, bool], trainer_image: str
) -> JsonObject:
    template = spec.pod_template
    container: JsonObject = {
        "name": names.TRAINER_CONTAINER,
        "image": template.image or trainer_image,
        "imagePullPolicy": template.image_pull_policy,
        "command": [
            *("kubelora", "train", JOB_PATH),
            *("--metrics-port", str(names.METRICS_PORT), "--log-format", "json"),
        ],
        "env": _environment(template, attempt) + _rendezvous_env(spec, child),
        "ports": _ports(spec.workers.nodes),
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": names.METRICS_PORT_NAME},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "resources": _resources(template.resources, spec.workers.gpus_per_node),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(template, claims),
    }
    if template.env_from:
        container["envFrom"] = list(template.env_from)
    return container


def _ports(nodes: int) -> list[JsonObject]:
    ports = {names.METRICS_PORT_NAME: names.METRICS_PORT}
    if nodes > 1:
        ports[names.RENDEZVOUS_PORT_NAME] = names.RENDEZVOUS_PORT
    return [{"name": n, "containerPort": port, "protocol": "TCP"} for n, port in ports.items()]


def _environment(template: PodTemplate, attempt: int) -> list[JsonObject]:
    """Merge our variables and the user's, which win except for names reserved by the contract."""
    users = {e.name: e.document() for e in template.env}
    ours = [
        {"name": name, "value": value} for name, value in _ENVIRONMENT.items() if name not in users
    ]
    contract: list[JsonObject] = [
        {"name": names.ENV_ATTEMPT, "value": str(attempt)},
        {"name": names.ENV_TERMINATION_LOG, "value": names.TERMINATION_LOG},
        {
            "name": names.ENV_NODE,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}},
        },
    ]
    return contract + ours + list(users.values())


def _rendezvous_env(spec: JobSpec, child: str) -> list[JsonObject]:
    """Return the rendezvous address of several nodes: the pod of index 0, by its DNS name.

    The Job itself sets JOB_COMPLETION_INDEX, from which the trainer gets its node rank.
    """
    if spec.workers.nodes == 1:
        return []
    return [
        {"name": names.ENV_MASTER_ADDR, "value": f"{child}-0.{child}"},
        {"name": names.ENV_MASTER_PORT, "value": str(names.RENDEZVOUS_PORT)},
    ]


def _resources(resources: Resources | None, gpus: int) -> JsonObject:
    limits = dict(resources.limits) if resources else {}
    requests = dict(resources.requests) if resources else {}
    if gpus:
        limits[names.GPU_RESOURCE] = str(gpus)
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _own_mounts(template: PodTemplate) -> list[JsonObject]:
    """Return mounts for scratch space and shared memory, unless the user mounts them."""
    taken = {m.mount_path.rstrip("/") for m in template.volume_mounts}
    own: list[JsonObject] = [
        {"name": "kubelora-scratch", "mountPath": _SCRATCH},
        {"name": "kubelora-shared-memory", "mountPath": _SHARED_MEMORY},
    ]
    return [m for m in own if m["mountPath"] not in taken]


def _mounts(template: PodTemplate, claims: dict[str, bool]) -> list[JsonObject]:
    mounts = [
        {"name": "kubelora-job", "mountPath": names.JOB_DIRECTORY, "readOnly": True},
        *_own_mounts(template),
    ]
    for index, (claim, read_only) in enumerate(claims.items()):
        mount: JsonObject = {
            "name": f"kubelora-claim-{index}",
            "mountPath": f"{names.CLAIMS_DIRECTORY}/{claim}",
        }
        mounts.append(mount | {"readOnly": True} if read_only else mount)
    return mounts + [m.document() for m in template.volume_mounts]


def _volumes(template: PodTemplate, claims: dict[str, bool], config_map: str) -> list[JsonObject]:
    own = {m["name"] for m in _own_mounts(template)}
    volumes: list[JsonObject] = [{"name": "kubelora-job", "configMap": {"name": config_map}}]
    if "kubelora-scratch" in own:
        volumes.append(
            {"name": "kubelora-scratch", "emptyDir": {"sizeLimit": template.scratch_size}}
        )
    if "kubelora-shared-memory" in own:
        volumes.append(
            {
                "name": "kubelora-shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": template.shared_memory_size},
            }
        )
    for index, claim in enumerate(claims):
        volumes.append(
            {
                "name": f"kubelora-claim-{index}",
                "persistentVolumeClaim": {"claimName": claim},
            }
        )
    return volumes + [v.document() for v in template.volumes]


def _pod_security(template: PodTemplate) -> JsonObject:
    ids = template.security_context
    context: JsonObject = {
        "runAsNonRoot": True,
        "runAsUser": ids.run_as_user,
        "runAsGroup": ids.run_as_group,
        "fsGroup": ids.fs_group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if ids.supplemental_groups:
        context["supplementalGroups"] = list(ids.supplemental_groups)
    return context


def _placement(template: PodTemplate) -> JsonObject:
    """Return the scheduling fields that are set, so that cluster defaults apply to the others."""
    placement: JsonObject = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": list(template.tolerations),
        "affinity": template.affinity,
        "topologySpreadConstraints": list(template.topology_spread_constraints),
        "schedulerName": template.scheduler_name,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "serviceAccountName": template.service_account_name,
        "imagePullSecrets": [s.document() for s in template.image_pull_secrets],
    }
    return {key: value for key, value in placement.items() if value}

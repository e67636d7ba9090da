"""Rules for the fields of a podTemplate: one for every field, or the field is refused.

Pure. What the CRD refuses already, such as hostPath or a root user, is not repeated here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, Final

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.admission.policy import PodPolicy, matches_any
from kubelora_operator.admission.quantity import parse_quantity
from kubelora_operator.admission.refusal import Refusal, not_listed, too_large

_SET_BY_OTHERS: Final = (
    names.LABEL_NAME,
    names.LABEL_MANAGED_BY,
    "controller-uid",
    "job-name",
    "batch.kubernetes.io/*",
    "kueue.x-k8s.io/*",
)
"""Labels that the operator, the Job controller and Kueue select pods by."""
_SOURCES: Final = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
_SOURCES_OF_ALL: Final = ("secretRef", "configMapRef", "prefix")


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at besides the field's value."""

    policy: PodPolicy
    template: JsonObject


FieldRule = Callable[[Any, str, RuleContext], Iterator[Refusal]]


def _harmless(why: str) -> FieldRule:
    """Build the rule for a field that needs none; ``why`` is for the reader."""
    assert why

    def accept(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
        yield from ()

    return accept


def _listed(value: Any, path: str, context: RuleContext, *, name: str) -> Iterator[Refusal]:
    """Refuse a name, or keys of a map, that the policy's list ``name`` does not match."""
    for found in value:
        where = f"{path}[{found}]" if isinstance(value, dict) else path
        if not matches_any(found, getattr(context.policy, name)):
            yield not_listed(where, found, context.policy, name)


def _one_listed(value: Any, path: str, context: RuleContext, *, name: str) -> Iterator[Refusal]:
    return _listed([value], path, context, name=name)


def _priority_class(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    patterns = context.policy.priority_classes
    if value.startswith("system-"):  # of the cluster itself; `*` must not include it
        patterns = tuple(p for p in patterns if p.startswith("system-"))
    if not matches_any(value, patterns):
        yield not_listed(path, value, context.policy, "priority_classes")


def _secret(name: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    yield from _one_listed(str(name), path, context, name="secrets")


def _value_from(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    yield from _known_keys(value, path, _SOURCES)
    if "secretKeyRef" in value:
        name = _part(value, "secretKeyRef").get("name")
        yield from _secret(name, f"{path}.secretKeyRef.name", context)


def _env_from(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    for index, source in enumerate(value):
        yield from _known_keys(source, f"{path}[{index}]", _SOURCES_OF_ALL)
        if "secretRef" in source:
            name = _part(source, "secretRef").get("name")
            yield from _secret(name, f"{path}[{index}].secretRef.name", context)


def _known_keys(value: JsonObject, path: str, known: tuple[str, ...]) -> Iterator[Refusal]:
    for key in value:
        if key not in known:
            yield Refusal(f"{path}.{key}", key, f"use {', '.join(known[:-1])} or {known[-1]}")


def _tolerations(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    for index, toleration in enumerate(value):
        key, effect = (str(toleration.get(k) or "") for k in ("key", "effect"))
        if not any(_tolerated(key, effect, entry) for entry in context.policy.tolerations):
            found = f"{key or 'every taint'}:{effect or 'every effect'}"
            yield not_listed(f"{path}[{index}]", found, context.policy, "tolerations")


def _tolerated(key: str, effect: str, entry: str) -> bool:
    """Return whether an entry ``KEY`` or ``KEY:EFFECT`` covers a toleration.

    One without a key tolerates every taint, and one without an effect every effect.
    """
    allowed_key, _, allowed_effect = entry.partition(":")
    return matches_any(key or "*", [allowed_key]) and allowed_effect in ("", effect)


def _affinity(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    yield from _known_keys(value, path, ("nodeAffinity", "podAffinity", "podAntiAffinity"))
    for where, key, found in _entries(_part(value, "nodeAffinity"), f"{path}.nodeAffinity"):
        if key == "key" and not matches_any(str(found), context.policy.node_labels):
            yield not_listed(where, str(found), context.policy, "node_labels")
    if context.policy.pod_affinity_across_namespaces:
        return
    for kind in ("podAffinity", "podAntiAffinity"):
        for where, key, found in _entries(_part(value, kind), f"{path}.{kind}"):
            if key in ("namespaceSelector", "namespaces") and found is not None and found != []:
                yield Refusal(
                    where,
                    "a rule about pods of other namespaces",
                    "it could keep their pods from a node. Remove it, or ask the platform team to "
                    "set the chart value podPolicy.podAffinityAcrossNamespaces",
                )


def _entries(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, key and value of every entry below a JSON value."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield f"{path}.{key}", key, below
            yield from _entries(below, f"{path}.{key}")
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _entries(below, f"{path}[{index}]")


def _volume(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    kind = path.rpartition(".")[2]
    if kind not in context.policy.volume_kinds:
        yield not_listed(path, f"a volume of kind {kind}", context.policy, "volume_kinds")
    if kind == "secret":
        yield from _secret(value.get("secretName"), f"{path}.secretName", context)
    if kind == "csi" and (secret := value.get("nodePublishSecretRef")):
        where = f"{path}.nodePublishSecretRef.name"
        yield from _secret(_part({"": secret}, "").get("name"), where, context)
    if kind == "emptyDir":
        yield from _empty_dir(value, path, context)


def _empty_dir(value: JsonObject, path: str, context: RuleContext) -> Iterator[Refusal]:
    limit = value.get("sizeLimit")
    memory = value.get("medium") == "Memory"
    name = "max_shared_memory" if memory else "max_scratch"
    if limit is None:
        yield too_large(path, "an emptyDir without a sizeLimit", context.policy, name)
    elif not memory:  # that of memory is part of the sum of sharedMemorySize
        yield from _at_most(limit, f"{path}.sizeLimit", context, name=name)


def _at_most(value: Any, path: str, context: RuleContext, *, name: str) -> Iterator[Refusal]:
    if _exceeds([value], getattr(context.policy, name)):
        yield too_large(path, str(value), context.policy, name)


def _shared_memory(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    """Limit /dev/shm together with the other volumes in memory."""
    volumes = [_part(v, "emptyDir") for v in context.template.get("volumes", [])]
    sizes = [v.get("sizeLimit") or "0" for v in volumes if v.get("medium") == "Memory"]
    if _exceeds([value, *sizes], context.policy.max_shared_memory):
        extra = f" with {', '.join(map(str, sizes))} of emptyDirs in memory" if sizes else ""
        yield too_large(path, f"{value}{extra}", context.policy, "max_shared_memory")


def _exceeds(sizes: Iterable[Any], limit: str) -> bool:
    """Return whether the sum exceeds the limit; what is not a quantity does."""
    amounts = [parse_quantity(size) for size in (limit, *sizes)]
    most, *others = (Decimal("Infinity") if a is None else a for a in amounts)
    return sum(others) > most or Decimal("Infinity") in others


def _grace_period(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    if value > context.policy.max_termination_grace_period_seconds:
        name = "max_termination_grace_period_seconds"
        yield too_large(path, str(value), context.policy, name)


def _labels(value: Any, path: str, context: RuleContext) -> Iterator[Refusal]:
    for key in value:
        if matches_any(key, _SET_BY_OTHERS):
            advice = "the operator or Kubernetes selects pods by it: choose another"
            yield Refusal(f"{path}[{key}]", key, advice)
        elif not matches_any(key, context.policy.labels):
            yield not_listed(f"{path}[{key}]", key, context.policy, "labels")


def _part(value: Mapping[str, Any], name: str) -> JsonObject:
    part = value.get(name)
    return part if isinstance(part, dict) else {}


_OWN: Final = "it affects the trainer's own container only"
_IDS: Final = "the CRD refuses root; a shared volume is protected by no more than these IDs"
RULES: Final[Mapping[str, FieldRule]] = {
    "image": partial(_one_listed, name="images"),
    "env.name": _harmless(_OWN),
    "env.value": _harmless(_OWN),
    "env.valueFrom": _value_from,
    "envFrom": _env_from,
    "resources.requests": partial(_listed, name="resources"),
    "resources.limits": partial(_listed, name="resources"),
    "nodeSelector": partial(_listed, name="node_labels"),
    "tolerations": _tolerations,
    "affinity": _affinity,
    "topologySpreadConstraints": _harmless("it places the job's own pods only"),
    "volumes.name": _harmless("a name within the pod"),
    "volumes.persistentVolumeClaim": _volume,
    "volumes.configMap": _volume,
    "volumes.secret": _volume,
    "volumes.emptyDir": _volume,
    "volumes.ephemeral": _volume,
    "volumes.csi": _volume,
    "volumes.nfs": _volume,
    "volumes.hostPath": _volume,
    "volumes.projected": _volume,
    "volumeMounts.name": _harmless("a name within the pod"),
    "volumeMounts.mountPath": _harmless(_OWN),
    "volumeMounts.subPath": _harmless("the API server refuses one that leaves the volume"),
    "volumeMounts.readOnly": _harmless(_OWN),
    "sharedMemorySize": _shared_memory,
    "scratchSize": partial(_at_most, name="max_scratch"),
    "priorityClassName": _priority_class,
    "runtimeClassName": partial(_one_listed, name="runtime_classes"),
    "schedulerName": partial(_one_listed, name="scheduler_names"),
    "serviceAccountName": partial(_one_listed, name="service_accounts"),
    "securityContext.runAsUser": _harmless(_IDS),
    "securityContext.runAsGroup": _harmless(_IDS),
    "securityContext.fsGroup": _harmless(_IDS),
    "securityContext.supplementalGroups": _harmless(_IDS),
    "terminationGracePeriodSeconds": _grace_period,
    "imagePullPolicy": _harmless("it decides when the image is pulled"),
    "imagePullSecrets.name": _harmless("the kubelet reads it; the pod does not see it"),
    "labels": _labels,
    "annotations": partial(_listed, name="annotations"),
}
"""The rule for each field, by its path below spec.podTemplate."""

"""Hostile podTemplates, each refused by a sentence whose advice works."""

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubelora_api.decides import declarations
from kubelora_api.documents import parse_job
from kubelora_api.pod import PodTemplate
from kubelora_api.schema import JsonObject
from kubelora_operator.admission.check import refusals_of
from kubelora_operator.admission.pod_rules import RULES
from kubelora_operator.admission.policy import DEFAULT_POLICY, PodPolicy
from kubelora_operator.admission.quantity import parse_quantity
from tests.operator.world import document

VALUES = Path(__file__).parents[3] / "charts" / "kubelora" / "values.yaml"


def refused(template: JsonObject, policy: PodPolicy = DEFAULT_POLICY) -> tuple[str, ...]:
    return refusals_of(parse_job(document(podTemplate=template)), policy)


@dataclass(frozen=True)
class Hostile:
    """A template, the path that the refusal names, and the values that allow it; None: none do."""

    template: JsonObject
    path: str
    allow: JsonObject | None = field(default=None)


def _volume(kind: str, source: JsonObject) -> JsonObject:
    return {"volumes": [{"name": "v", kind: source}]}


def _node_affinity(key: str, fields: str = "matchExpressions") -> JsonObject:
    term = {fields: [{"key": key, "operator": "Exists"}]}
    required = {"nodeSelectorTerms": [term]}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


def _repels(**where: object) -> JsonObject:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **where}
    return {
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    }


CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
TERMS = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
HOSTILE: dict[str, Hostile] = {
    "AppArmor off": Hostile(
        {"annotations": {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}},
        "annotations[container.apparmor.security.beta.kubernetes.io/trainer]",
        {"annotations": ["container.apparmor.security.beta.kubernetes.io/*"]},
    ),
    "a cloud role": Hostile(
        {"annotations": {"iam.amazonaws.com/role": "admin"}},
        "annotations[iam.amazonaws.com/role]",
        {"annotations": ["iam.amazonaws.com/role"]},
    ),
    "another network": Hostile(
        {"annotations": {"k8s.v1.cni.cncf.io/networks": "kube-system/host"}},
        "annotations[k8s.v1.cni.cncf.io/networks]",
        {"annotations": ["k8s.v1.cni.cncf.io/networks"]},
    ),
    "the label of a Service": Hostile(
        {"labels": {"app": "shop"}}, "labels[app]", {"labels": ["app"]}
    ),
    "the operator's own label": Hostile(
        {"labels": {"app.kubernetes.io/name": "kubelora-operator"}},
        "labels[app.kubernetes.io/name]",
    ),
    "the Job controller's label": Hostile(
        {"labels": {"batch.kubernetes.io/job-name": "other"}},
        "labels[batch.kubernetes.io/job-name]",
    ),
    "a system priority": Hostile(
        {"priorityClassName": "system-node-critical"},
        "priorityClassName",
        {"priorityClasses": ["system-node-critical"]},
    ),
    "any priority": Hostile(
        {"priorityClassName": "high"}, "priorityClassName", {"priorityClasses": ["*"]}
    ),
    "another service account": Hostile(
        {"serviceAccountName": "deployer"},
        "serviceAccountName",
        {"serviceAccounts": ["default", "deployer"]},
    ),
    "every taint": Hostile(
        {"tolerations": [{"operator": "Exists"}]}, "tolerations[0]", {"tolerations": ["*"]}
    ),
    "the control plane's taint": Hostile(
        {"tolerations": [{"key": CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"}]},
        "tolerations[0]",
        {"tolerations": [f"{CONTROL_PLANE}:NoSchedule"]},
    ),
    "every effect": Hostile(
        {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        "tolerations[0]",
        {"tolerations": ["nvidia.com/gpu"]},
    ),
    "a key that is no text": Hostile(
        {"tolerations": [{"key": 5, "operator": "Exists"}]},
        "tolerations[0]",
        {"tolerations": ["5"]},
    ),
    "the control plane": Hostile(
        {"nodeSelector": {CONTROL_PLANE: ""}},
        f"nodeSelector[{CONTROL_PLANE}]",
        {"nodeLabels": [CONTROL_PLANE]},
    ),
    "the control plane by affinity": Hostile(
        _node_affinity(CONTROL_PLANE),
        f"affinity.nodeAffinity.{TERMS}.matchExpressions[0].key",
        {"nodeLabels": [CONTROL_PLANE]},
    ),
    "a node by its name": Hostile(
        _node_affinity("metadata.name", "matchFields"),
        f"affinity.nodeAffinity.{TERMS}.matchFields[0].key",
        {"nodeLabels": ["metadata.name"]},
    ),
    "keeping other namespaces from a node": Hostile(
        _repels(namespaceSelector={}),
        "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]"
        ".namespaceSelector",
        {"podAffinityAcrossNamespaces": True},
    ),
    "nfs": Hostile(
        _volume("nfs", {"server": "nfs", "path": "/"}), "volumes[0].nfs", {"volumeKinds": ["nfs"]}
    ),
    "a CSI driver": Hostile(
        _volume("csi", {"driver": "d"}), "volumes[0].csi", {"volumeKinds": ["csi"]}
    ),
    "a CSI driver's secret": Hostile(
        _volume("csi", {"driver": "d", "nodePublishSecretRef": {"name": "admin"}}),
        "volumes[0].csi.nodePublishSecretRef.name",
        {"volumeKinds": ["csi"], "secrets": ["admin"]},
    ),
    "a token Secret as files": Hostile(
        _volume("secret", {"secretName": "deployer-token-x2b7q"}),
        "volumes[0].secret.secretName",
        {"secrets": ["deployer-token-x2b7q"]},
    ),
    "a token Secret as a variable": Hostile(
        {
            "env": [
                {"name": "T", "valueFrom": {"secretKeyRef": {"name": "deployer", "key": "token"}}}
            ]
        },
        "env[0].valueFrom.secretKeyRef.name",
        {"secrets": ["deployer"]},
    ),
    "a token Secret as variables": Hostile(
        {"envFrom": [{"secretRef": {"name": "deployer"}}]},
        "envFrom[0].secretRef.name",
        {"secrets": ["deployer"]},
    ),
    "a source that is not known": Hostile(
        {"env": [{"name": "T", "valueFrom": {"tokenRef": {}}}]}, "env[0].valueFrom.tokenRef"
    ),
    "too much shared memory": Hostile(
        {"sharedMemorySize": "99999Gi"}, "sharedMemorySize", {"maxSharedMemory": "99999Gi"}
    ),
    "too much memory in all": Hostile(
        _volume("emptyDir", {"medium": "Memory", "sizeLimit": "64Gi"}),
        "sharedMemorySize",
        {"maxSharedMemory": "65Gi"},
    ),
    "memory without end": Hostile(_volume("emptyDir", {"medium": "Memory"}), "volumes[0].emptyDir"),
    "disk without end": Hostile(_volume("emptyDir", {}), "volumes[0].emptyDir"),
    "too much disk": Hostile(
        _volume("emptyDir", {"sizeLimit": "501Gi"}),
        "volumes[0].emptyDir.sizeLimit",
        {"maxScratch": "501Gi"},
    ),
    "a size that is none": Hostile(
        _volume("emptyDir", {"sizeLimit": "NaN"}), "volumes[0].emptyDir.sizeLimit"
    ),
    "too much scratch": Hostile({"scratchSize": "501Gi"}, "scratchSize", {"maxScratch": "501Gi"}),
    "a device": Hostile(
        {"resources": {"limits": {"devices.kubevirt.io/kvm": 1}}},
        "resources.limits[devices.kubevirt.io/kvm]",
        {"resources": ["devices.kubevirt.io/kvm"]},
    ),
    "another scheduler": Hostile(
        {"schedulerName": "mine"}, "schedulerName", {"schedulerNames": ["mine"]}
    ),
    "another runtime": Hostile(
        {"runtimeClassName": "host"}, "runtimeClassName", {"runtimeClasses": ["host"]}
    ),
    "a drain of a day": Hostile(
        {"terminationGracePeriodSeconds": 86400},
        "terminationGracePeriodSeconds",
        {"maxTerminationGracePeriodSeconds": 86400},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_the_advice_works(name: str) -> None:
    case = HOSTILE[name]
    sentences = refused(case.template)
    at_path = [s for s in sentences if s.startswith(f"spec.podTemplate.{case.path}: ")]
    assert len(at_path) == 1, sentences
    assert refused({}) == ()  # the advice to remove it works
    named = {v for s in sentences for v in re.findall(r"podPolicy\.(\w+)", s)}
    if case.allow is None:
        return
    assert named == set(case.allow), "the sentence names the values that widen it"
    assert refused(case.template, PodPolicy.model_validate_json(json.dumps(case.allow))) == ()


def test_emptydirs_pass_with_the_limit_that_the_sentence_asks_for() -> None:
    assert refused(_volume("emptyDir", {"sizeLimit": "500Gi"})) == ()
    assert refused(_volume("emptyDir", {"medium": "Memory", "sizeLimit": "63Gi"})) == ()


def test_a_star_is_not_the_clusters_own_priority() -> None:
    every = PodPolicy(priority_classes=("*",))
    assert refused({"priorityClassName": "system-cluster-critical"}, every)


def test_a_workload_priority_class_can_be_restricted() -> None:
    job = document()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": "urgent"}
    assert refusals_of(parse_job(job), DEFAULT_POLICY) == ()
    [sentence] = refusals_of(parse_job(job), PodPolicy(workload_priority_classes=("low",)))
    assert sentence.startswith("metadata.labels[kueue.x-k8s.io/priority-class]: urgent")
    assert "podPolicy.workloadPriorityClasses" in sentence


def test_images_can_be_restricted_to_a_registry() -> None:
    own = PodPolicy(images=("registry.example/*",))
    assert refused({"image": "registry.example/trainer:1"}, own) == ()
    assert refused({"image": "elsewhere.example/registry.example/x"}, own)
    assert refused({}, own) == ()  # the operator's own image needs no permission


def test_what_a_usual_job_asks_for_passes() -> None:
    template: dict[str, Any] = {
        "env": [{"name": "WANDB_MODE", "value": "offline"}],
        "envFrom": [{"secretRef": {"name": "kubelora-hub"}}, {"configMapRef": {"name": "proxy"}}],
        "resources": {"limits": {"memory": "48Gi", "rdma/hca": 1}},
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "labels": {"team": "studio"},
        "runtimeClassName": "nvidia",
        **_repels(),
        **_volume("secret", {"secretName": "kubelora-ca"}),
    }
    assert refused(template) == ()


def test_every_field_of_a_template_has_a_rule_and_no_other() -> None:
    assert set(RULES) == {path for path, _ in declarations(PodTemplate)}


def test_the_charts_values_are_the_policy_with_its_defaults() -> None:
    values = yaml.safe_load(VALUES.read_text())["podPolicy"]
    assert values == DEFAULT_POLICY.document()


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1Gi", 2**30), ("1k", 1000), ("1.5Ki", 1536), ("2e3", 2000), ("5m", "0.005"), (7, 7)]
    + [(bad, None) for bad in ("", "much", "1gi", "-1", "NaN", "1e999", True, 1.5, None)],
)
def test_quantities_are_read_as_kubernetes_does(text: object, amount: object) -> None:
    parsed = parse_quantity(text)
    assert parsed == (None if amount is None else Decimal(str(amount)))

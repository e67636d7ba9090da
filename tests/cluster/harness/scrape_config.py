"""From PodMonitor and PrometheusRule objects to Prometheus's own configuration.

The Prometheus operator does this in a real installation; its module can't be built here, so this is
the part of its translation that a PodMonitor of ours may use. A field that is not translated is an
error, never ignored: a test must not pass on a configuration that differs from the chart's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from .errors import HarnessError
from .kubectl import JsonObject, JsonValue

_SPEC_FIELDS = {
    "attachMetadata",
    "jobLabel",
    "labelLimit",
    "namespaceSelector",
    "podMetricsEndpoints",
    "podTargetLabels",
    "sampleLimit",
    "selector",
    "targetLimit",
}
_ENDPOINT_FIELDS = {
    "filterRunning",
    "honorLabels",
    "honorTimestamps",
    "interval",
    "metricRelabelings",
    "params",
    "path",
    "port",
    "portNumber",
    "relabelings",
    "scheme",
    "scrapeTimeout",
}
_RELABEL_FIELDS = {
    "action": "action",
    "modulus": "modulus",
    "regex": "regex",
    "replacement": "replacement",
    "separator": "separator",
    "sourceLabels": "source_labels",
    "targetLabel": "target_label",
}
_LIMITS = {
    "labelLimit": "label_limit",
    "sampleLimit": "sample_limit",
    "targetLimit": "target_limit",
}


def scrape_configs(monitor: JsonObject, kubeconfig: str) -> list[JsonObject]:
    """One scrape configuration for each endpoint of a PodMonitor."""
    spec = _object(monitor["spec"])
    _refuse_unknown(spec, _SPEC_FIELDS, monitor)
    endpoints = [_object(endpoint) for endpoint in _list(spec.get("podMetricsEndpoints"))]
    return [
        _scrape_config(monitor, spec, endpoint, index, kubeconfig)
        for index, endpoint in enumerate(endpoints)
    ]


def rule_groups(rules: Sequence[JsonObject]) -> JsonObject:
    """The rule file made of all PrometheusRule objects.

    Group names are unique within an object only, so they carry the object's name.
    """
    groups: list[JsonValue] = []
    for rule in rules:
        metadata = _object(rule["metadata"])
        for group in _list(_object(rule["spec"]).get("groups")):
            name = f"{metadata['namespace']}/{metadata['name']}/{_object(group)['name']}"
            groups.append({**_object(group), "name": name})
    return {"groups": groups}


def _scrape_config(
    monitor: JsonObject, spec: JsonObject, endpoint: JsonObject, index: int, kubeconfig: str
) -> JsonObject:
    _refuse_unknown(endpoint, _ENDPOINT_FIELDS, monitor)
    metadata = _object(monitor["metadata"])
    namespace, name = str(metadata["namespace"]), str(metadata["name"])
    config: JsonObject = {
        "job_name": f"podMonitor/{namespace}/{name}/{index}",
        "honor_labels": endpoint.get("honorLabels", False),
        "metrics_path": endpoint.get("path", "/metrics"),
        "scheme": str(endpoint.get("scheme", "http")).lower(),
        "kubernetes_sd_configs": [_discovery(spec, namespace, kubeconfig)],
        "relabel_configs": cast(
            JsonValue,
            [
                *_keep_selected(_object(spec.get("selector", {}))),
                *_keep_endpoint(endpoint),
                *_target_labels(spec, endpoint, f"{namespace}/{name}"),
                *_relabelings(endpoint.get("relabelings"), monitor),
            ],
        ),
        "metric_relabel_configs": cast(
            JsonValue, _relabelings(endpoint.get("metricRelabelings"), monitor)
        ),
    }
    for field, option in {
        "interval": "scrape_interval",
        "scrapeTimeout": "scrape_timeout",
        "honorTimestamps": "honor_timestamps",
        "params": "params",
    }.items():
        if field in endpoint:
            config[option] = endpoint[field]
    return config | {option: spec[field] for field, option in _LIMITS.items() if field in spec}


def _discovery(spec: JsonObject, own_namespace: str, kubeconfig: str) -> JsonObject:
    selector = _object(spec.get("namespaceSelector", {}))
    discovery: JsonObject = {"role": "pod", "kubeconfig_file": kubeconfig}
    if not selector.get("any"):
        names = _list(selector.get("matchNames")) or [own_namespace]
        discovery["namespaces"] = {"names": names}
    if "attachMetadata" in spec:
        discovery["attach_metadata"] = spec["attachMetadata"]
    return discovery


def _keep_selected(selector: JsonObject) -> list[JsonObject]:
    """Label selectors, as filters on what discovery found."""
    steps = []
    for key, value in sorted(_object(selector.get("matchLabels", {})).items()):
        steps.append(_filter("keep", key, [str(value)]))
    for expression in _list(selector.get("matchExpressions")):
        rule = _object(expression)
        key, operator = str(rule["key"]), str(rule["operator"])
        values = [str(value) for value in _list(rule.get("values"))]
        if operator in ("In", "NotIn"):
            steps.append(_filter("keep" if operator == "In" else "drop", key, values))
        else:
            present = f"__meta_kubernetes_pod_labelpresent_{_label(key)}"
            action = "keep" if operator == "Exists" else "drop"
            steps.append({"action": action, "source_labels": [present], "regex": "true"})
    return steps


def _filter(action: str, key: str, values: Sequence[str]) -> JsonObject:
    label = _label(key)
    return {
        "action": action,
        "source_labels": [
            f"__meta_kubernetes_pod_label_{label}",
            f"__meta_kubernetes_pod_labelpresent_{label}",
        ],
        "regex": f"({'|'.join(values)});true",
    }


def _keep_endpoint(endpoint: JsonObject) -> list[JsonObject]:
    steps: list[JsonObject] = []
    if endpoint.get("filterRunning", True):
        phase: JsonObject = {"action": "drop", "source_labels": ["__meta_kubernetes_pod_phase"]}
        steps.append(phase | {"regex": "(Failed|Succeeded)"})
    for field, suffix in (("port", "name"), ("portNumber", "number")):
        if field in endpoint:
            source = f"__meta_kubernetes_pod_container_port_{suffix}"
            steps.append(
                {"action": "keep", "source_labels": [source], "regex": str(endpoint[field])}
            )
    return steps


def _target_labels(spec: JsonObject, endpoint: JsonObject, job: str) -> list[JsonObject]:
    steps: list[JsonObject] = [
        {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
        for source, target in (
            ("namespace", "namespace"),
            ("pod_container_name", "container"),
            ("pod_name", "pod"),
        )
    ]
    for key in _list(spec.get("podTargetLabels")):
        label = _label(str(key))
        source = f"__meta_kubernetes_pod_label_{label}"
        steps.append({"source_labels": [source], "target_label": label, "regex": "(.+)"})
    steps.append({"target_label": "job", "replacement": job})
    if spec.get("jobLabel"):
        source = f"__meta_kubernetes_pod_label_{_label(str(spec['jobLabel']))}"
        steps.append({"source_labels": [source], "target_label": "job", "regex": "(.+)"})
    port = endpoint.get("port", endpoint.get("portNumber"))
    return [*steps, {"target_label": "endpoint", "replacement": str(port)}]


def _relabelings(steps: JsonValue, monitor: JsonObject) -> list[JsonObject]:
    translated = []
    for step in _list(steps):
        _refuse_unknown(_object(step), set(_RELABEL_FIELDS), monitor)
        translated.append({_RELABEL_FIELDS[key]: value for key, value in _object(step).items()})
    return translated


def _label(key: str) -> str:
    """A Kubernetes label's key as discovery writes it."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _refuse_unknown(found: Mapping[str, object], translated: set[str], monitor: JsonObject) -> None:
    unknown = sorted(set(found) - translated)
    if unknown:
        name = _object(monitor["metadata"])["name"]
        raise HarnessError(
            f"PodMonitor {name} uses {', '.join(unknown)}, which the harness does not translate. "
            "Teach it in tests/cluster/harness/scrape_config.py."
        )


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict), value
    return value


def _list(value: JsonValue) -> list[JsonValue]:
    assert value is None or isinstance(value, list), value
    return value or []

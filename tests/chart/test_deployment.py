"""The operator's pods: restricted, placed as told, with options that its command knows."""

from typing import Any

import pytest

from kubelora_operator.admission.policy import DEFAULT_POLICY, PodPolicy
from kubelora_operator.attempt.network_policy import NetworkSettings
from kubelora_operator.manager.main import run as run_command
from tests.chart.rendering import (
    EVERYTHING,
    FULLNAME,
    MATRIX,
    NAMESPACE,
    NAMESPACED,
    RELEASE,
    Helm,
    Object,
    of_kind,
    one,
)


def pod_of(objects: list[Object]) -> Object:
    template: Object = one(objects, "Deployment")["spec"]["template"]
    return template


def container_of(objects: list[Object]) -> Object:
    (container,) = pod_of(objects)["spec"]["containers"]
    return dict(container)


def environment_of(objects: list[Object]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container_of(objects)["env"] if "value" in e}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_meet_the_restricted_pod_security_standard(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    pod, container = pod_of(objects)["spec"], container_of(objects)

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "initContainers"))
    assert [list(v) for v in pod["volumes"]] == [["name", "emptyDir"]]


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_operators_command_takes_every_option_that_the_chart_sets(
    helm: Helm, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = helm.render(values)
    known = {str(p.envvar) for p in run_command.params if getattr(p, "envvar", None)}
    given = {e["name"] for e in container_of(objects)["env"] if e["name"].startswith("KUBELORA_")}

    assert given <= known
    assert container_of(objects)["args"] == ["run"]
    for name, value in environment_of(objects).items():
        monkeypatch.setenv(name, value)
    options = run_command.make_context("run", []).params
    assert options["trainer_image"] == environment_of(objects)["KUBELORA_TRAINER_IMAGE"]
    assert options["namespaces"] == tuple(values.get("watch", {}).get("namespaces", ()))
    assert options["metrics_port"] == 8080


def test_the_commands_defaults_are_told_as_the_charts(helm: Helm) -> None:
    environment = environment_of(helm.render({}))
    defaults = {str(p.envvar): p.default for p in run_command.params if hasattr(p, "envvar")}

    assert float(environment["KUBELORA_POLL_SECONDS"]) == defaults["KUBELORA_POLL_SECONDS"]
    assert float(environment["KUBELORA_RESYNC_SECONDS"]) == defaults["KUBELORA_RESYNC_SECONDS"]
    assert environment["KUBELORA_LOG_LEVEL"] == defaults["KUBELORA_LOG_LEVEL"]
    assert environment["KUBELORA_LOG_FORMAT"] == defaults["KUBELORA_LOG_FORMAT"]


def test_named_namespaces_reach_the_command_separated_by_spaces(helm: Helm) -> None:
    assert environment_of(helm.render(NAMESPACED))["KUBELORA_NAMESPACES"] == "lab studio"
    assert "KUBELORA_NAMESPACES" not in environment_of(helm.render({}))


def test_two_replicas_are_told_apart_and_share_one_lease(helm: Helm) -> None:
    objects = helm.render({"replicas": 2})
    environment = {e["name"]: e for e in container_of(objects)["env"]}

    assert environment["KUBELORA_IDENTITY"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.name"}
    }
    assert environment["KUBELORA_LEASE_NAMESPACE"]["value"] == NAMESPACE
    assert environment["KUBELORA_LEASE_NAME"]["value"] == FULLNAME


def test_probes_ask_the_port_that_the_command_opens(helm: Helm) -> None:
    objects = helm.render({})
    container = container_of(objects)
    (port,) = container["ports"]

    assert str(port["containerPort"]) == environment_of(objects)["KUBELORA_METRICS_PORT"]
    assert container["startupProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}


def test_services_of_the_namespace_put_no_variables_into_the_pod(helm: Helm) -> None:
    # A Service named kubelora-metrics would set KUBELORA_METRICS_PORT to tcp://...
    assert pod_of(helm.render({}))["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({"repository": "registry.example/op"}, "registry.example/op:0.1.0"),
        ({"repository": "registry.example/op", "tag": "dev"}, "registry.example/op:dev"),
        (
            {"repository": "registry.example/op", "tag": "dev", "digest": "sha256:" + "0" * 64},
            "registry.example/op@sha256:" + "0" * 64,
        ),
    ],
    ids=["the chart's version", "a tag", "a digest, over the tag"],
)
def test_an_image_is_named_by(helm: Helm, image: dict[str, str], reference: str) -> None:
    objects = helm.render({"image": image, "trainer": {"image": image}})

    assert container_of(objects)["image"] == reference
    assert environment_of(objects)["KUBELORA_TRAINER_IMAGE"] == reference


def test_placement_and_metadata_reach_the_pod(helm: Helm) -> None:
    template = pod_of(helm.render(EVERYTHING))
    pod = template["spec"]

    for key in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
        "imagePullSecrets",
    ):
        assert pod[key] == EVERYTHING[key]
    assert template["metadata"]["annotations"]["example.com/note"] == "y"
    assert template["metadata"]["labels"]["team"] == "studio"
    assert EVERYTHING["extraEnv"][0] in pod["containers"][0]["env"]


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_selectors_find_the_pods_whatever_labels_a_user_adds(
    helm: Helm, values: dict[str, Any]
) -> None:
    objects = helm.render(values)
    labels = pod_of(objects)["metadata"]["labels"].items()
    selectors = [one(objects, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors += [
        o["spec"]["selector"]["matchLabels"] for o in of_kind(objects, "PodDisruptionBudget")
    ]

    for selector in selectors:
        assert selector == {
            "app.kubernetes.io/name": "kubelora-operator",
            "app.kubernetes.io/instance": RELEASE,
        }
        assert selector.items() <= labels


@pytest.mark.parametrize(("replicas", "budgets"), [(0, 0), (1, 0), (2, 1)])
def test_a_disruption_budget_is_made_for_several_replicas_alone(
    helm: Helm, replicas: int, budgets: int
) -> None:
    objects = helm.render({"replicas": replicas})

    assert len(of_kind(objects, "PodDisruptionBudget")) == budgets


def test_the_pod_policy_reaches_the_operator(helm: Helm) -> None:
    objects = helm.render({"podPolicy": {"priorityClasses": ["training-low"]}})
    policy = PodPolicy.model_validate_json(environment_of(objects)["KUBELORA_POD_POLICY"])
    assert policy == DEFAULT_POLICY.model_copy(update={"priority_classes": ("training-low",)})


def test_the_network_policy_lets_the_operators_own_pods_in(helm: Helm) -> None:
    objects = helm.render({"networkPolicy": {"restrictEgress": True}})
    text = environment_of(objects)["KUBELORA_NETWORK_POLICY"]
    settings = NetworkSettings.model_validate_json(text)
    assert settings.restrict_egress
    peer = settings.operator
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    selected = peer["podSelector"]["matchLabels"].items()
    assert selected <= pod_of(objects)["metadata"]["labels"].items()
    assert len(settings.metrics_from) == 1


def test_the_network_policy_can_be_turned_off(helm: Helm) -> None:
    objects = helm.render({"networkPolicy": {"enabled": False}})
    assert "KUBELORA_NETWORK_POLICY" not in environment_of(objects)

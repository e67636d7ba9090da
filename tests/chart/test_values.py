"""What a person who installs the chart may say, and what is refused before it reaches a cluster."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import yaml

from tests.chart import programs
from tests.chart.rendering import CHART, MATRIX, Helm


def keys(mapping: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of every value and group of values."""
    for key, value in mapping.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def test_every_value_has_a_comment_above_it() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = [i for i, line in enumerate(lines) if re.match(r" *[a-zA-Z]+:", line)]
    # Requests and limits are a pod's own and known to all.
    values = [i for i in values if lines[i].strip().split(":")[0] not in POD_RESOURCES]

    assert [lines[i] for i in values if not re.match(r" *# \S.*[.:]?", lines[i - 1])] == []


POD_RESOURCES = ("requests", "limits", "cpu", "memory")


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def told(group: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, below in group.get("properties", {}).items():
            yield (*path, key)
            yield from told(below, (*path, key))

    free = {("resources", "requests", "cpu"), ("resources", "requests", "memory")}
    free |= {("resources", "limits", "memory")}
    optional = {("global",), ("resources", "claims"), ("imagePullSecrets", "name")}
    assert set(told(schema)) - optional == set(keys(values)) - free


def test_the_chart_and_the_package_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == version("kubelora")


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_helm_lint_finds_nothing(helm: Helm, values: dict[str, Any], tmp_path: Any) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))

    programs.run(helm.program, "lint", "--strict", CHART, "-f", file)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_every_object_is_whole_and_belongs_to_the_release(
    helm: Helm, values: dict[str, Any]
) -> None:
    cluster_wide = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
    objects = helm.render(values)

    for o in objects:
        assert o["apiVersion"]
        assert ("namespace" in o["metadata"]) == (o["kind"] not in cluster_wide)
        assert o["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "two"}, "/replicas"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"watch": {"namespaces": "lab"}}, "/watch/namespaces"),
        ({"watch": {"namespaces": ["Lab"]}}, "/watch/namespaces/0"),
        ({"operator": {"pollSeconds": 0}}, "/operator/pollSeconds"),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"podPolicy": {"volumeKinds": ["hostPath"]}}, "/podPolicy/volumeKinds/0"),
        ({"podPolicy": {"tolerations": ["a b"]}}, "/podPolicy/tolerations/0"),
        ({"podPolicy": {"maxScratch": "much"}}, "/podPolicy/maxScratch"),
        ({"podPolicy": {"nodeSelectors": []}}, "nodeSelectors"),
        ({"crds": {"keep": "no"}}, "/crds/keep"),
        ({"monitoring": {"rules": {"window": 10}}}, "/monitoring/rules/window"),
        ({"monitoring": {"rules": {"windows": "10m"}}}, "windows"),
        ({"monitoring": {"podMonitor": {"interval": "often"}}}, "/monitoring/podMonitor/interval"),
        ({"monitoring": {"rules": {"runbookUrlBase": "wiki"}}}, "runbookUrlBase"),
        ({"extraEnv": [{"value": "x"}]}, "name"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_value_is_refused_with_its_name(
    helm: Helm, values: dict[str, Any], field: str
) -> None:
    done = helm.template(values)

    assert done.returncode != 0
    assert field in done.stderr


def test_long_release_names_stay_legal(helm: Helm) -> None:
    done = helm.template({"fullnameOverride": "a" * 49 + "-" + "b" * 20})

    names = {o["metadata"]["name"] for o in yaml.safe_load_all(done.stdout) if o}
    assert all(len(name) <= 63 and not name.endswith("-") for name in names)

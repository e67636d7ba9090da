"""The chart's copies follow the contract; nobody edits them by hand."""

from pathlib import Path

import pytest

from charts import generate
from kubelora_api.crd import custom_resource_definition
from tests.chart.rendering import MATRIX, Helm, of_kind


@pytest.mark.parametrize("path", generate.rendered(), ids=lambda p: p.name)
def test_a_generated_file_is_current(path: Path) -> None:
    assert path.read_text() == generate.rendered()[path], "run: python -m charts.generate"


def integers(value: object, path: str = "") -> set[str]:
    """Paths of all whole numbers."""
    if isinstance(value, dict):
        return {p for k, v in value.items() for p in integers(v, f"{path}.{k}" if path else k)}
    if isinstance(value, list):
        return {p for i, v in enumerate(value) for p in integers(v, f"{path}.{i}")}
    return {path} if type(value) is int else set()


def test_helm_renders_the_generated_crd_number_for_number(helm: Helm) -> None:
    (rendered,) = of_kind(helm.render({}), "CustomResourceDefinition")
    expected = custom_resource_definition()

    assert rendered["spec"] == expected["spec"]
    # 10000000 and 1e7 are equal in Python, and not in an int64 field of the API server.
    whole = integers(expected["spec"])
    assert whole <= integers(rendered["spec"])
    assert len(whole) > 50
    assert rendered["metadata"]["name"] == expected["metadata"]["name"]


def test_uninstalling_keeps_the_crd_and_so_the_users_jobs(helm: Helm) -> None:
    (crd,) = of_kind(helm.render({}), "CustomResourceDefinition")

    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_crd_goes_with_the_release_only_where_that_is_asked_for(helm: Helm) -> None:
    (crd,) = of_kind(helm.render({"crds": {"keep": False}}), "CustomResourceDefinition")

    assert "annotations" not in crd["metadata"]


def test_the_crd_can_be_left_to_someone_else(helm: Helm) -> None:
    assert of_kind(helm.render(MATRIX["bare"]), "CustomResourceDefinition") == []

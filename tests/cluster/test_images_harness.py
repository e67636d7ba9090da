"""When images are built, and when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import images
from .harness.errors import HarnessError
from .harness.places import Places

DOCKERFILE = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS trainer
COPY --chown=0:0 pyproject.toml \\
    sources ./
COPY --from=elsewhere /docs /docs
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context whose Dockerfile copies one file and one folder of three."""
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "pyproject.toml").write_text("[project]")
    for folder in ("sources/deep", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("1")
    return tmp_path


@pytest.mark.parametrize("changed", ["Dockerfile", "pyproject.toml", "sources/deep/file"])
def test_a_change_of_what_goes_in_gives_another_tag(context: Path, changed: str) -> None:
    before = images.fingerprint(context, "trainer")
    path = context / changed
    path.write_text(path.read_text() + "\n# changed")
    assert images.fingerprint(context, "trainer") != before


def test_a_change_of_anything_else_gives_the_same_tag(context: Path) -> None:
    before = images.fingerprint(context, "trainer")
    (context / "docs" / "file").write_text("2")
    (context / "sources" / "__pycache__").mkdir()
    (context / "sources" / "__pycache__" / "file.pyc").write_text("compiled")
    assert images.fingerprint(context, "trainer") == before


def test_images_that_the_environment_names_are_not_built(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere/else")
    monkeypatch.setenv("KUBELORA_OPERATOR_IMAGE", "registry.example/operator:1")
    monkeypatch.setenv("KUBELORA_TRAINER_IMAGE", "registry.example/trainer:1")
    named = images.ensure(places)
    assert (named.operator, named.trainer) == (
        "registry.example/operator:1",
        "registry.example/trainer:1",
    )
    assert not named.built_here


def test_another_cluster_without_named_images_is_refused(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere/else")
    monkeypatch.delenv("KUBELORA_OPERATOR_IMAGE", raising=False)
    monkeypatch.delenv("KUBELORA_TRAINER_IMAGE", raising=False)
    with pytest.raises(HarnessError, match=r"KUBECONFIG is /somewhere/else.*Push them"):
        images.ensure(places)


def test_one_image_named_and_the_other_not_is_refused(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBELORA_OPERATOR_IMAGE", "registry.example/operator:1")
    monkeypatch.delenv("KUBELORA_TRAINER_IMAGE", raising=False)
    with pytest.raises(HarnessError, match="Only one of"):
        images.ensure(places)

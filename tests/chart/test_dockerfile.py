"""What the Dockerfile says about itself; that the images work is the cluster tier's to show."""

import re
import tomllib
from importlib.metadata import version

import pytest

from tests.chart.rendering import REPOSITORY

LINES = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def stage(name: str) -> list[str]:
    """Instructions of one stage."""
    start = next(i for i, line in enumerate(LINES) if re.fullmatch(rf"FROM \S+ AS {name}", line))
    rest = LINES[start + 1 :]
    end = next((i for i, line in enumerate(rest) if line.startswith("FROM ")), len(rest))
    return [line for line in rest[:end] if line and not line.startswith("#")]


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_runs_as_a_number_that_is_not_root(image: str) -> None:
    # runAsNonRoot can only be judged on a number.
    assert [line for line in stage(image) if line.startswith("USER ")] == ["USER 10001:10001"]


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_is_labelled_with_the_packages_version_and_licence(image: str) -> None:
    (label,) = (line for line in stage(image) if line.startswith("LABEL "))
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', label))

    assert labels.keys() == {"title", "description", "licenses", "version"}
    assert labels["title"] == f"kubelora-{image}"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == "${VERSION}"
    assert f"ARG VERSION={version('kubelora')}" in stage(image)


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_a_code_change_rebuilds_only_what_follows_the_dependencies(image: str) -> None:
    layers = [line for line in stage(image) if line.startswith(("RUN ", "COPY ", "ADD "))]

    assert layers[-1] == "COPY --from=package /opt/kubelora /opt/kubelora"
    sources = [w for line in layers if "--from=" not in line for w in line.split()[1:-1]]
    assert set(sources) & {"crds", "operator", "trainer", "."} == set()


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    copied = {
        word.removeprefix("./")
        for line in LINES
        if line.startswith("COPY ") and "--from=" not in line
        for word in line.split()[1:-1]
    }
    allowed = set(re.findall(r"^!(\S+)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE))

    assert copied == allowed


@pytest.mark.parametrize("extra", ["operator", "trainer"])
def test_every_package_that_an_image_asks_for_has_its_version_pinned(extra: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][extra]]
    pins = re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)

    assert {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in asked} <= set(pins)


def test_no_stage_is_lent_to_another_by_a_mount() -> None:
    # buildah 1.28 mounts the stage's base instead when the stage comes from its cache.
    mounts = [word for line in LINES for word in line.split() if word.startswith("--mount=")]

    assert mounts
    assert not [mount for mount in mounts if "from=" in mount]


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_that_runs_has_no_installer(image: str) -> None:
    removed = " ".join(line for line in stage(image) if "rm -rf" in line)

    assert "/usr/share/python-wheels" in removed
    assert "ensurepip" in removed
    assert not [line for line in stage(image) if line.startswith("COPY ") and "/opt/uv" in line]


def test_an_installer_that_a_layer_needs_is_gone_at_its_end() -> None:
    (install,) = (line for line in stage("trainer") if "uv pip install" in line)

    assert install.index("/tmp/uv/bin/uv pip install") < install.index("rm -rf /tmp/uv")

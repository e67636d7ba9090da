"""The chart of this repository, installed as its users do, with the images built of it."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import yaml

from .images import Images
from .kubectl import Helm, Kubectl

CHART = Path(__file__).parents[3] / "charts" / "kubelora"


def install(
    helm: Helm, images: Images, release: str, namespace: str, values: Mapping[str, object]
) -> None:
    """`helm install` into a namespace of its own; returns when the operator is ready."""
    given = {
        "image": _image(images.operator),
        "trainer": {"image": _image(images.trainer)},
        "operator": {"pollSeconds": 2, "progressSeconds": 2},
        **values,
    }
    path = helm.home / f"{release}.yaml"
    path.write_text(yaml.safe_dump(given))
    helm(
        *("install", release, str(CHART), "--namespace", namespace, "--create-namespace"),
        *("--values", str(path), "--wait", "--timeout", "600s"),
        "--take-ownership",  # of the CRD, which outlives a release and other tests
    )


def uninstall(helm: Helm, kubectl: Kubectl, release: str, namespace: str) -> None:
    """`helm uninstall`, also where a test has done so already, and the namespace with it."""
    with contextlib.suppress(Exception):
        helm("uninstall", release, "--namespace", namespace, "--wait")
    kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=280s")


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag}

"""A team's namespace beside an installed product: claims with the demo's model and photographs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kubelora_trainer.cli.demo import create_demo

from . import chart, volumes
from .images import Images
from .jobs import Jobs
from .kubectl import Helm, Kubectl


@dataclass(frozen=True)
class Studio(Jobs):
    """output: the folder of this machine that is the claim ``output``."""

    output: Path


@contextlib.contextmanager
def studio(
    name: str, kubectl: Kubectl, helm: Helm, images: Images, folder: Path
) -> Iterator[Studio]:
    """Claims model, data and output in a new namespace, a release of its own; gone afterwards."""
    demo = create_demo(folder / "demo", "small")
    namespace = f"{name}-{secrets.token_hex(3)}"
    release, system = f"kubelora-{name}", f"kubelora-{name}-system"
    kubectl.create_namespace(namespace)
    for claim, path in (("model", demo.model), ("data", demo.photos), ("output", folder / "out")):
        volumes.claim_directory(kubectl, namespace, claim, path)
    chart.install(helm, images, release, system, {})
    yield Studio(kubectl.within(namespace), folder / "out")
    kubectl("delete", "namespace", namespace, "--timeout=600s", timeout=660)
    volumes.release_volumes(kubectl, namespace)
    chart.uninstall(helm, kubectl, release, system)

"""The two images of the product: which ones tests use, and building them when they are stale.

An image's tag is a hash of everything that goes into it. So "is it current" is "does containerd
have it", and a pod never runs yesterday's code under today's tag.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from . import buildah, machine, scratch, transfer
from .errors import HarnessError
from .locks import exclusive
from .places import Places
from .report import say

REPOSITORY = Path(__file__).resolve().parents[3]
TARGETS = ("operator", "trainer")
_KEPT_VERSIONS = 4  # the current one, and some that a deployed chart may still name


@dataclass(frozen=True)
class Images:
    """Full names of the images that a test deploys."""

    operator: str
    trainer: str
    built_here: bool
    """False when the environment named them; the harness then knows nothing of their content."""


def from_environment() -> Images | None:
    """The images named by KUBELORA_OPERATOR_IMAGE and KUBELORA_TRAINER_IMAGE, if both are set."""
    names = [os.environ.get(f"KUBELORA_{target.upper()}_IMAGE", "") for target in TARGETS]
    if all(names):
        return Images(operator=names[0], trainer=names[1], built_here=False)
    if any(names):
        raise HarnessError(
            "Only one of KUBELORA_OPERATOR_IMAGE and KUBELORA_TRAINER_IMAGE is set. Set both to "
            "use images that exist, or neither to build them."
        )
    return None


def uses_local_cluster(places: Places) -> bool:
    """False when KUBECONFIG names a cluster that is not the harness's."""
    named = os.environ.get("KUBECONFIG")
    return not named or Path(named).resolve() == places.kubeconfig


def ensure(places: Places) -> Images:
    """The images to test with: those the environment names, else built and imported when stale."""
    named = from_environment()
    if named:
        return named
    if not uses_local_cluster(places):
        raise HarnessError(
            f"KUBECONFIG is {os.environ['KUBECONFIG']}, a cluster that this machine can't hand "
            "images to. Push them to a registry it pulls from, and name them in "
            "KUBELORA_OPERATOR_IMAGE and KUBELORA_TRAINER_IMAGE."
        )
    names = [ensure_target(places, REPOSITORY, target) for target in TARGETS]
    return Images(operator=names[0], trainer=names[1], built_here=True)


def ensure_target(places: Places, context: Path, target: str) -> str:
    """Build one target and hand it to containerd, unless containerd has it; returns its name."""
    name = name_of(context, target)
    if scratch.has_image(places, name):
        return name
    with exclusive(places, "images"), buildah.unmounting(places):
        if not scratch.has_image(places, name):
            _build_and_import(places, context, target, name)
    return name


def build(places: Places) -> None:
    """Build the images that tests would build, without a cluster to hand them to."""
    if from_environment() or not uses_local_cluster(places):
        return
    with exclusive(places, "images"), buildah.unmounting(places):
        for target in TARGETS:
            _build(places, REPOSITORY, target, name_of(REPOSITORY, target))


def name_of(context: Path, target: str) -> str:
    """The image's name, whose tag follows from what the image is built from."""
    return f"localhost/kubelora-{target}:{fingerprint(context, target)}"


def _build(places: Places, context: Path, target: str, name: str) -> None:
    machine.require_disk(places.cache, 8, f"to build the {target} image")
    buildah.ensure_base(places)
    if not buildah.has_image(places, name):
        say(f"building the {target} image")
        buildah.build(places, context, target, name)


def _build_and_import(places: Places, context: Path, target: str, name: str) -> None:
    started = time.monotonic()
    _build(places, context, target, name)
    built = time.monotonic()
    moved = transfer.to_containerd(places, name)
    say(
        f"{name}: {moved.image_bytes / 1e6:.0f} MB uncompressed, built in {built - started:.0f} s, "
        f"{moved.moved_bytes / 1e6:.0f} MB imported in {time.monotonic() - built:.0f} s"
    )
    scratch.ctr(places, "images", "tag", "--force", name, f"{name.rpartition(':')[0]}:dev")
    _forget_old(places, name)
    buildah.prune(places)


def ensure_base_in_cluster(places: Places) -> str:
    """The base image, for tests that need a pod with a shell and Python in it."""
    if scratch.has_image(places, buildah.BASE_IMAGE):
        return buildah.BASE_IMAGE  # without waiting for a build that may be under way
    with exclusive(places, "images"), buildah.unmounting(places):
        if not scratch.has_image(places, buildah.BASE_IMAGE):
            buildah.ensure_base(places)
            transfer.to_containerd(places, buildah.BASE_IMAGE)
    return buildah.BASE_IMAGE


def fingerprint(context: Path, target: str) -> str:
    """Hash of the Dockerfile and of every file that one of its COPY lines names."""
    dockerfile = context / "Dockerfile"
    if not dockerfile.exists():
        raise HarnessError(f"There is no {dockerfile}, and the images are built from it.")
    digest = hashlib.sha256(f"{target}\0{buildah.BASE_IMAGE}\0".encode())
    for path in (dockerfile, *_copied_files(context, dockerfile.read_text())):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(context)}\0{content}\n".encode())
    return digest.hexdigest()[:12]


def _copied_files(context: Path, dockerfile: str) -> list[Path]:
    files: set[Path] = set()
    for line in dockerfile.replace("\\\n", " ").splitlines():
        if not re.match(r"\s*(COPY|ADD)\s", line, re.IGNORECASE):
            continue
        words = shlex.split(line, comments=True)
        if any(word.startswith("--from=") for word in words):
            continue  # from another stage, not from the folder
        for source in [word for word in words[1:-1] if not word.startswith("--")]:
            for match in context.glob(source.strip("/").removeprefix("./") or "*"):
                files.update(match.rglob("*") if match.is_dir() else [match])
    return sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)


def _forget_old(places: Places, name: str) -> None:
    """Images of earlier sources, oldest first, in both stores; shared layers stay."""
    repository, _, current = name.rpartition(":")
    record = buildah.folder(places) / f"{repository.rpartition('/')[2]}.tags"
    tags = record.read_text().split() if record.exists() else []
    tags = [tag for tag in tags if tag != current] + [current]
    for tag in tags[:-_KEPT_VERSIONS]:
        if scratch.has_image(places, f"{repository}:{tag}"):
            scratch.ctr(places, "images", "rm", f"{repository}:{tag}")
        if buildah.has_image(places, f"{repository}:{tag}"):
            buildah.run(places, "rmi", f"{repository}:{tag}")
    record.write_text("\n".join(tags[-_KEPT_VERSIONS:]) + "\n")
    _forget_unnamed(places)


def _forget_unnamed(places: Places) -> None:
    """containerd's Kubernetes part lists each image by its id too, which would keep it for ever."""
    rows = [row.split() for row in scratch.ctr(places, "images", "ls").splitlines()[1:]]
    named = {row[2] for row in rows if not row[0].startswith("sha256:")}
    unnamed = [row[0] for row in rows if row[2] not in named]
    if unnamed:
        scratch.ctr(places, "images", "rm", "--sync", *unnamed)

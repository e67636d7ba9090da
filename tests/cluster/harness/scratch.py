"""Images made of a few files and nothing else, as archives that `ctr images import` reads."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import HarnessError
from .places import Places
from .settings import CONTAINERD_NAMESPACE


def write_image(
    archive: Path, name: str, files: Mapping[str, Path], entrypoint: Sequence[str]
) -> None:
    """Write a one-layer image of executables: path in the image to path here."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for inside, outside in sorted(files.items()):
            member = tarfile.TarInfo(inside.lstrip("/"))
            member.size, member.mode = outside.stat().st_size, 0o755
            with outside.open("rb") as stream:
                tar.addfile(member, stream)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "User": "65535:65535"},
        "rootfs": {
            "type": "layers",
            "diff_ids": ["sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()],
        },
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, mode="w") as tar:
        for member_name, content in (
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def ctr_command(places: Places) -> tuple[str, ...]:
    socket = str(places.containerd_socket)
    return ("ctr", "--address", socket, "--namespace", CONTAINERD_NAMESPACE)


def ctr(places: Places, *arguments: str, timeout: float = 600.0) -> str:
    """containerd's own command line, in the namespace that the kubelet uses."""
    done = subprocess.run(
        [*ctr_command(places), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise HarnessError(f"`ctr {' '.join(arguments)}` failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def has_image(places: Places, name: str) -> bool:
    return name in ctr(places, "images", "ls", "-q").splitlines()

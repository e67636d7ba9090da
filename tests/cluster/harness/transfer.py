"""Carry an image from buildah to containerd, moving only the layers that containerd lacks.

skopeo copies to an OCI layout without compression (buildah can't), so a layer's digest is known
beforehand and a blob that lies in the layout is not written again. After the import the large blobs
are replaced by holes of the same size: skopeo still finds them, and they take no disk. A change of
a few source files thus moves a few kilobytes past a dependency layer of gigabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from . import buildah, scratch
from .errors import HarnessError
from .places import Places

_HOLE_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Transfer:
    """What a transfer moved."""

    image_bytes: int
    """All layers, uncompressed."""
    moved_bytes: int


def to_containerd(places: Places, name: str) -> Transfer:
    """Make buildah's image `name` known to containerd under the same name."""
    layout = buildah.folder(places) / "layout"
    layout.mkdir(parents=True, exist_ok=True)
    present = set(scratch.ctr(places, "content", "ls", "-q").split())
    _drop_unusable_blobs(layout, present)
    (layout / "index.json").unlink(missing_ok=True)
    _copy_to_layout(places, name, layout)
    index = json.loads((layout / "index.json").read_text())
    descriptor = index["manifests"][0]
    descriptor["annotations"] = {"io.containerd.image.name": name}
    manifest = json.loads(_blob(layout, descriptor["digest"]).read_text())
    digests = [descriptor["digest"], manifest["config"]["digest"]]
    digests += [layer["digest"] for layer in manifest["layers"]]
    wanted = [digest for digest in dict.fromkeys(digests) if digest not in present]
    _import(places, layout, {"schemaVersion": 2, "manifests": [descriptor]}, wanted)
    _punch_holes(layout)
    return Transfer(
        image_bytes=sum(layer["size"] for layer in manifest["layers"]),
        moved_bytes=sum(_blob(layout, digest).stat().st_size for digest in wanted),
    )


def _copy_to_layout(places: Places, name: str, layout: Path) -> None:
    command = ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
    command += [f"containers-storage:{buildah.store(places)}{name}", f"oci:{layout}:image"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"skopeo did not copy {name}: {done.stderr.strip()[-800:]}")


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _blobs(layout: Path) -> list[Path]:
    return list((layout / "blobs" / "sha256").glob("*"))


def _is_hole(blob: Path) -> bool:
    status = blob.stat()
    return status.st_size > 0 and status.st_blocks == 0


def _drop_unusable_blobs(layout: Path, present: set[str]) -> None:
    """A hole stands for a blob that containerd has; in a new cluster it stands for nothing."""
    for blob in _blobs(layout):
        if _is_hole(blob) and f"sha256:{blob.name}" not in present:
            blob.unlink()


def _punch_holes(layout: Path) -> None:
    for blob in _blobs(layout):
        size = blob.stat().st_size
        if size >= _HOLE_FROM_BYTES and not _is_hole(blob):
            os.truncate(blob, 0)
            os.truncate(blob, size)


def _import(places: Places, layout: Path, index: dict[str, object], digests: list[str]) -> None:
    index_file = layout / "import-index.json"
    index_file.write_text(json.dumps(index))
    with subprocess.Popen(
        [*scratch.ctr_command(places), "images", "import", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
                tar.add(layout / "oci-layout", "oci-layout")
                for digest in digests:
                    tar.add(_blob(layout, digest), f"blobs/sha256/{digest.removeprefix('sha256:')}")
                tar.add(index_file, "index.json")
            process.stdin.close()
        except BrokenPipeError:
            pass  # ctr says why on its standard error
        error = process.stderr.read().decode(errors="replace")
        if process.wait() != 0:
            raise HarnessError(f"containerd did not import the image: {error.strip()[-800:]}")

"""Image building with buildah, in a storage of the harness's own.

A storage of its own keeps a developer's images out of reach and makes the layer cache one folder
that can be measured and removed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import kernel, machine
from .errors import HarnessError, tail
from .locks import exclusive_if_free
from .places import Places
from .report import say

BASE_IMAGE = "localhost/kubelora-base:bookworm"  # bookworm's Python is the project's 3.11
_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
# Settings of the package installers that a build behind a mirror needs; unset ones are not passed.
_INSTALLER_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
_LAYER_CACHE_GIB = 25
_ATTEMPTS = 4


def folder(places: Places) -> Path:
    return places.cache / "images"


def store(places: Places) -> str:
    """The storage as other programs of buildah's family name it."""
    return f"[overlay@{folder(places) / 'storage'}+{folder(places) / 'run'}]"


@contextlib.contextmanager
def unmounting(places: Places) -> Iterator[None]:
    """Leave nothing of the storage mounted behind the block, whatever it does with the storage.

    The overlay driver binds the storage's folder onto itself and never lets go of it: the cache
    could then not be removed, and would look like a file system of its own. The images' lock must
    be held.
    """
    try:
        yield
    finally:
        kernel.unmount_under((folder(places) / "storage").resolve())


def unmount_if_idle(places: Places) -> None:
    """What an earlier, killed build left mounted; a build that is under way keeps its own."""
    with exclusive_if_free(places, "images") as ours:
        if ours:
            with unmounting(places):
                pass


def run(places: Places, *arguments: str, log: Path | None = None) -> str:
    """Run buildah and return its output; with `log`, everything it prints goes there."""
    storage = folder(places)
    storage.mkdir(parents=True, exist_ok=True)
    command = ["buildah", "--root", str(storage / "storage"), "--runroot", str(storage / "run")]
    command += ["--storage-driver", "overlay", *arguments]
    if log is None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = done.stderr.strip()[-1500:]
    else:
        with log.open("w") as stream:
            done = subprocess.run(command, stdout=stream, stderr=stream, text=True, check=False)
        text = f"the end of {log}:\n{tail(log, 30)}"
    if done.returncode != 0:
        raise HarnessError(f"`buildah {' '.join(arguments[:2])} …` failed: {text}")
    return done.stdout or ""


def has_image(places: Places, name: str) -> bool:
    return name in run(places, "images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split()


def ensure_base(places: Places) -> str:
    """The base image: Debian's minimal root file system with Python. Made once."""
    machine.install(machine.IMAGE_PACKAGES)
    if has_image(places, BASE_IMAGE):
        return BASE_IMAGE
    machine.require_disk(places.cache, 3, "for the base image")
    say("making the base image with debootstrap")
    with tempfile.TemporaryDirectory(dir=folder(places)) as scratch_folder:
        root = Path(scratch_folder) / "root"
        _debootstrap(root, folder(places) / "debootstrap.log")
        container = run(places, "from", "scratch").strip()
        try:
            run(places, "add", "--quiet", container, str(root), "/")
            run(places, "config", "--cmd", "python3", container)
            run(places, "commit", "--quiet", container, BASE_IMAGE)
        finally:
            run(places, "rm", container)
    return BASE_IMAGE


def _debootstrap(root: Path, log: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_BASE_PACKAGES)}"]
    command += ["bookworm", str(root)]
    mirror = os.environ.get("KUBELORA_DEBIAN_MIRROR")
    with log.open("w") as stream:
        done = subprocess.run(
            command + ([mirror] if mirror else []), stdout=stream, stderr=stream, check=False
        )
    if done.returncode != 0:
        raise HarnessError(
            f"debootstrap failed; the end of {log}:\n{tail(log)}\n"
            "Set KUBELORA_DEBIAN_MIRROR if this machine reaches Debian by a mirror of its own."
        )
    for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*"):
        for leftover in root.glob(pattern):
            leftover.unlink()


def build(places: Places, context: Path, target: str, name: str) -> None:
    """Build one target of the Dockerfile; layers that did not change come from the cache."""
    run(places, "rm", "--all")  # what a failed build left
    _bud(places, context, target, name)


def _bud(places: Places, context: Path, target: str, name: str) -> None:
    log = folder(places) / f"build-{name.rpartition('/')[2].partition(':')[0]}.log"
    options = ["--isolation", "chroot", "--network", "host", "--layers"]
    options += ["--target", target, "--tag", name]
    options += ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}", *_certificates(), *_installer_settings()]
    command = ("bud", *options, "--file", str(context / "Dockerfile"), str(context))
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            run(places, *command, log=log)
            return
        except HarnessError:
            # buildah seals a copy of itself in memory before each RUN, and the kernel sometimes
            # holds a page of it at that moment. The layers made so far are in the cache.
            if attempt == _ATTEMPTS or "sealing memfd copy" not in log.read_text():
                raise
            say(f"buildah could not seal its own copy; going on with the {target} image")


def _certificates() -> Sequence[str]:
    """Lend the build this machine's certificate bundle, as a secret: it stays out of the image."""
    bundle = os.environ.get("SSL_CERT_FILE")
    if not bundle or not Path(bundle).is_file():
        return ()
    return (
        *("--secret", f"id=ca,src={Path(bundle).resolve()}"),
        *("--build-arg", "SSL_CERT_FILE=/run/secrets/ca"),
    )


def _installer_settings() -> Sequence[str]:
    present = [name for name in _INSTALLER_SETTINGS if os.environ.get(name)]
    return [word for name in present for word in ("--build-arg", f"{name}={os.environ[name]}")]


def prune(places: Places) -> None:
    """Drop layers that no tagged image needs, once they have grown large: they are the cache."""
    storage = folder(places) / "storage"
    command = ["du", "-s", "-BG", str(storage)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    gibibytes = int(done.stdout.partition("G")[0] or 0)
    if gibibytes > _LAYER_CACHE_GIB:
        say(f"removing unused image layers ({gibibytes} GiB in {storage})")
        run(places, "rmi", "--prune", "--force")

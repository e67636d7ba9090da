"""What the machine must offer, checked before anything is started, and Debian's part of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import HarnessError
from .report import say

# What each package is for. Debian's services are never used: the harness runs the programs itself.
CLUSTER_PACKAGES = {
    "etcd-server": "/usr/bin/etcd",
    "containerd": "/usr/bin/containerd",
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "nftables": "/usr/sbin/nft",
    "iproute2": "/usr/sbin/ip",
    "openssl": "/usr/bin/openssl",
}
IMAGE_PACKAGES = {
    "buildah": "/usr/bin/buildah",
    "debootstrap": "/usr/sbin/debootstrap",
    "skopeo": "/usr/bin/skopeo",
}
MONITORING_PACKAGES = {"prometheus-alertmanager": "/usr/bin/prometheus-alertmanager"}

_POLICY = Path("/usr/sbin/policy-rc.d")
_UNITS = ("etcd", "containerd", "prometheus-alertmanager")


def require_root(what: str = "A kubelet, containerd and network namespaces need") -> None:
    if os.geteuid() != 0:
        raise HarnessError(
            f"{what} root, and this is user {os.geteuid()}. Run the command as root, or set "
            "KUBECONFIG to another cluster."
        )


def require_debian() -> None:
    release = Path("/etc/os-release")
    text = release.read_text() if release.exists() else "no /etc/os-release"
    if not shutil.which("apt-get") or not any(
        line in text.splitlines() for line in ("ID=debian", "ID=ubuntu", "ID_LIKE=debian")
    ):
        raise HarnessError(
            "The local cluster takes etcd, containerd and runc from Debian packages, and this "
            "machine is not Debian or Ubuntu. Set KUBECONFIG to another cluster instead."
        )


def require_go() -> None:
    if not shutil.which("go"):
        raise HarnessError(
            "Go is not on the PATH, and Kubernetes is built from source once. Install Go 1.26 or "
            "newer (https://go.dev/dl), or copy a filled cache to ~/.cache/kubelora."
        )


def require_disk(folder: Path, gibibytes: float, purpose: str) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < gibibytes:
        raise HarnessError(
            f"{free:.1f} GiB are free at {existing}, and {gibibytes:g} GiB are needed {purpose}. "
            "Free some space, or set KUBELORA_CACHE and KUBELORA_STATE to folders on a larger disk."
        )


def require_port(address: str, port: int, component: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise HarnessError(
                f"Port {port} on {address}, which {component} needs, is in use by "
                f"{_holder_of(port)} ({error.strerror}). Stop that process and try again."
            ) from error


def _holder_of(port: int) -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True, check=False
        )
        if "users:" in done.stdout:
            return done.stdout.partition("users:")[2].strip()
    return "another process"


def install(packages: dict[str, str]) -> None:
    """Install the Debian packages whose program is missing, without letting a service start."""
    missing = [name for name, program in packages.items() if not Path(program).exists()]
    if not missing:
        return
    require_root(f"Installing {', '.join(missing)} needs")
    require_debian()
    say(f"installing {', '.join(missing)}")
    with _services_held_back():
        _apt(["update", "-qq"])
        _apt(["install", "-y", "-qq", "--no-install-recommends", *missing])
    still = [name for name, program in packages.items() if not Path(program).exists()]
    if still:
        raise HarnessError(f"apt-get installed {', '.join(still)}, but the programs are not there.")


def _apt(arguments: Sequence[str]) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise HarnessError(
            f"`apt-get {' '.join(arguments)}` failed:\n{(done.stdout + done.stderr)[-2000:]}"
        )


@contextlib.contextmanager
def _services_held_back() -> Iterator[None]:
    """Debian starts a package's service on installation and at boot; both are prevented."""
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    enabled_before = _enabled_units()
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink(missing_ok=True)
        for unit in _enabled_units() - enabled_before:
            command = ["systemctl", "disable", "--now", unit]
            subprocess.run(command, capture_output=True, check=False)


def _enabled_units() -> set[str]:
    if not Path("/run/systemd/system").exists():
        return set()
    return {
        unit
        for unit in _UNITS
        if subprocess.run(
            ["systemctl", "is-enabled", "--quiet", unit], capture_output=True, check=False
        ).returncode
        == 0
    }


def node_address() -> str:
    """This machine's address on its default route, else its first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # no packet is sent; this asks the routing table
        return str(probe.getsockname()[0])
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    if not done.stdout.split():
        raise HarnessError(
            "This machine has no network address but 127.0.0.1, and a node needs one."
        )
    return done.stdout.split()[0]

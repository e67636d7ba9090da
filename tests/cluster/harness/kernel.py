"""What the cluster changes in the kernel's state outside its folders: network, cgroups, one sysctl.

Each change is made here and undone here, so that the two lists can be compared by eye.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from .errors import HarnessError
from .places import Places
from .settings import NFT_TABLE, POD_SUBNET

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_CGROUPS = Path("/sys/fs/cgroup")
_OWNER = Path("/run/kubelora-cluster.owner")
_KUBE_PROXY_TABLES = ("ip kube-proxy", "ip6 kube-proxy")


def refuse_foreign_kubelet() -> None:
    """Two kubelets on one machine fight over the same cgroups."""
    pids = pod_pids()
    if pids:
        raise HarnessError(
            f"Processes {', '.join(map(str, pids[:5]))} run in /sys/fs/cgroup/…/kubepods: another "
            "kubelet manages pods on this machine. Stop it, or set KUBECONFIG to use its cluster."
        )


def refuse_other_owner(state: Path) -> None:
    """Tables, cgroups and links are the machine's, so it has room for one cluster."""
    owner = Path(_OWNER.read_text().strip()) if _OWNER.exists() else state
    if owner != state and owner.exists():
        raise HarnessError(
            f"A cluster with its state in {owner} exists on this machine, and this command is "
            f"about {state}. Set KUBELORA_STATE={owner} to mean that one, or take it down first."
        )


def prepare(places: Places) -> None:
    """Forward packets between pods and the world, and masquerade those that leave."""
    _OWNER.write_text(f"{places.state}\n")
    before = places.state / "ip_forward.before"
    if not before.exists():
        before.write_text(_FORWARD.read_text())
    _FORWARD.write_text("1\n")
    if not _table_exists(f"ip {NFT_TABLE}"):
        _run(["nft", "-f", str(places.config / "masquerade.nft")])


def undo(places: Places) -> None:
    """Remove tables, cgroups and links, and restore the sysctl."""
    for table in (f"ip {NFT_TABLE}", *_KUBE_PROXY_TABLES):
        if _table_exists(table):
            _run(["nft", "delete", "table", *table.split()])
    for link in pod_links():
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    _remove_cgroups()
    before = places.state / "ip_forward.before"
    if before.exists():
        _FORWARD.write_text(before.read_text())
    _OWNER.unlink(missing_ok=True)


def tables() -> list[str]:
    """The nft tables that are ours and still there."""
    return [name for name in (f"ip {NFT_TABLE}", *_KUBE_PROXY_TABLES) if _table_exists(name)]


def _table_exists(table: str) -> bool:
    done = subprocess.run(
        ["nft", "list", "table", *table.split()], capture_output=True, check=False
    )
    return done.returncode == 0


def pod_links() -> list[str]:
    """Host ends of the pods' links: those whose route leads into the pod subnet."""
    command = ["ip", "-json", "route", "show", "root", POD_SUBNET]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        return []
    return sorted({str(route["dev"]) for route in json.loads(done.stdout) if "dev" in route})


def cgroup_roots() -> list[Path]:
    """kubepods in each hierarchy of cgroup v1, and in that of v2."""
    candidates = [_CGROUPS / "kubepods", *_CGROUPS.glob("*/kubepods")]
    return [path for path in candidates if path.is_dir()]


def pod_pids() -> list[int]:
    """Processes that run in any pod's cgroup."""
    found: set[int] = set()
    for root in cgroup_roots():
        for listing in root.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(word) for word in listing.read_text().split())
    return sorted(found)


def _remove_cgroups() -> None:
    # A cgroup is busy for a moment after its last process has died.
    deadline = time.monotonic() + 5
    while cgroup_roots() and time.monotonic() < deadline:
        for root in cgroup_roots():
            folders = [path for path in root.rglob("*") if path.is_dir()]
            for folder in [*sorted(folders, key=lambda path: -len(path.parts)), root]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if cgroup_roots():
            time.sleep(0.1)


def mounts_under(folder: Path) -> list[Path]:
    """Mount points at or below a folder, deepest first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point == folder or folder in point.parents:
            points.append(point)
    return sorted(points, key=lambda path: -len(path.parts))


def unmount_under(folder: Path) -> None:
    for _ in range(3):  # mounts can lie on top of each other
        for point in mounts_under(folder):
            subprocess.run(["umount", str(point)], capture_output=True, check=False)
    for point in mounts_under(folder):
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True, check=False)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")

"""Take the cluster down completely, and say what would be left.

The order matters: the kubelet first, or it restarts what is stopped; containers before containerd,
or their shims outlive it; mounts before files, or removing files reaches through a mount into a
user's folder.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from . import buildah, kernel, processes, scratch
from .errors import HarnessError
from .places import Places
from .probes import containerd_answers
from .report import say
from .settings import NETWORK_NAME

# Folders that the programs write to however they are configured.
_CONTAINER_LOG_LINKS = Path("/var/log/containers")
_CNI_RESULTS = Path("/var/lib/cni/results")
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_SHIM_SOCKETS = Path("/run/containerd/s")


def down(places: Places) -> None:
    """Stop everything and remove it. Does nothing, quietly, when there is nothing."""
    kernel.refuse_other_owner(places.state)
    buildah.unmount_if_idle(places)
    if not places.state.exists() and not check_clean(places):
        return
    say("stopping the cluster")
    processes.stop(places, "kubelet")
    _remove_containers(places)
    for name in ("kube-proxy", "coredns", "kube-scheduler", "kube-controller-manager"):
        processes.stop(places, name)
    processes.stop(places, "kube-apiserver", grace=3.0)  # it lingers for open watches
    for name in processes.remembered(places):
        processes.stop(places, name)
    kernel.unmount_under(places.state)
    kernel.undo(places)
    _remove_stray_files(places)
    remaining = kernel.mounts_under(places.state)
    if remaining:
        raise HarnessError(
            f"{remaining[0]} is still mounted, so {places.state} was not removed: it could hold a "
            "user's folder. Find who uses it (`fuser -m`), unmount it, and run the command again."
        )
    shutil.rmtree(places.state, ignore_errors=True)
    left = check_clean(places)
    if left:
        raise HarnessError("The teardown left something behind:\n" + "\n".join(left))


def check_clean(places: Places) -> list[str]:
    """What of a cluster is on this machine: one sentence for each thing; empty when nothing is."""
    found = []
    # Every process of the cluster names a file of the state folder, the shims by their socket.
    # The administrator's kubeconfig is named by clients, which are not the cluster's.
    for pid, command in processes.processes_mentioning(f"{places.state}/").items():
        if str(places.kubeconfig) not in command:
            found.append(f"Process {pid} still runs: {command[:160]}")
    found += [f"Process {pid} still runs in a pod's cgroup." for pid in kernel.pod_pids()]
    found += [f"{point} is still mounted." for point in kernel.mounts_under(places.state)]
    found += [f"Network link {link} still leads to the pods." for link in kernel.pod_links()]
    found += [f"nft table {table} still exists." for table in kernel.tables()]
    found += [f"Cgroup {path} still exists." for path in kernel.cgroup_roots()]
    found += [f"{path} still exists." for path in _stray_files(places)]
    if places.state.exists():
        found.append(f"{places.state} still exists.")
    return found


def _remove_containers(places: Places) -> None:
    """Through containerd when it answers; whatever is left then dies by signal."""
    if containerd_answers(places):
        with contextlib.suppress(HarnessError):
            for task in scratch.ctr(places, "tasks", "ls", "-q").split():
                scratch.ctr(places, "tasks", "delete", "--force", task)
            containers = scratch.ctr(places, "containers", "ls", "-q").split()
            if containers:
                scratch.ctr(places, "containers", "delete", *containers)
    processes.kill_and_wait(kernel.pod_pids())
    shims = processes.processes_mentioning(f"-address {places.containerd_socket}")
    processes.kill_and_wait([pid for pid, line in shims.items() if "containerd-shim" in line])


def _stray_files(places: Places) -> list[Path]:
    """Files of this cluster outside its state folder."""
    found = []
    if _CONTAINER_LOG_LINKS.is_dir():
        for link in _CONTAINER_LOG_LINKS.iterdir():
            if link.is_symlink() and str(link.readlink()).startswith(str(places.pod_logs)):
                found.append(link)
    if _CNI_RESULTS.is_dir():
        found += list(_CNI_RESULTS.glob(f"{NETWORK_NAME}-*"))
    return found


def remember_foreign_files(places: Places) -> None:
    """Note before the first start whether the folder that every kubelet uses was another's."""
    if not _DEVICE_PLUGINS.exists():
        _device_plugins_marker(places).touch()


def _device_plugins_marker(places: Places) -> Path:
    return places.state / "device-plugins.ours"


def _remove_stray_files(places: Places) -> None:
    for path in _stray_files(places):
        path.unlink(missing_ok=True)
    if _device_plugins_marker(places).exists():
        shutil.rmtree(_DEVICE_PLUGINS, ignore_errors=True)
    # A folder that another program still uses is not empty, and stays.
    for folder in (
        _CONTAINER_LOG_LINKS,
        _CNI_RESULTS,
        _CNI_RESULTS.parent,
        _DEVICE_PLUGINS.parent,
        _SHIM_SOCKETS,
        _SHIM_SOCKETS.parent,
    ):
        with contextlib.suppress(OSError):
            folder.rmdir()

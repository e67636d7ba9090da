"""Bring the cluster up, or find that it is up already.

`up` goes through the components in the order of their needs and starts those that are not healthy,
so one code path serves the first start, the repair of a half-dead cluster and the case that nothing
is to be done.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from . import addons, configs, gobuild, kernel, machine, processes, scratch, teardown
from .components import Component, all_components
from .errors import HarnessError, tail
from .kubectl import Kubectl, KubectlError
from .locks import exclusive, without_users
from .pki import write_pki
from .places import Places
from .probes import wait_until
from .report import say
from .settings import PAUSE_IMAGE
from .tools import COREDNS, KUBERNETES, PAUSE, path_of


def up(places: Places) -> Path:
    """Make sure that the cluster runs; returns the administrator's kubeconfig."""
    started = time.monotonic()
    machine.require_root()
    machine.require_debian()
    machine.require_disk(places.state, 3, "for the cluster's state")
    gobuild.ensure(places, (KUBERNETES, COREDNS, PAUSE))
    with exclusive(places, "cluster"):
        machine.install(machine.CLUSTER_PACKAGES)
        _ensure_up(places)
    say(f"the cluster is up ({time.monotonic() - started:.1f} s)")
    return places.kubeconfig


def down(places: Places) -> None:
    """Stop the cluster and remove every trace of it, unless a test run uses it."""
    machine.require_root()
    with exclusive(places, "cluster"), without_users(places):
        teardown.down(places)


def _ensure_up(places: Places) -> None:
    kernel.refuse_other_owner(places.state)
    address = machine.node_address()
    if places.state.exists() and not _is_worth_keeping(places, address):
        say("removing what is left of an earlier cluster")
        with without_users(places):
            teardown.down(places)
    if not _fingerprint_file(places).exists():
        _prepare(places, address)
    kernel.prepare(places)
    for component in all_components(places, address):
        _ensure_running(places, component)
        if component.name == "containerd":
            _import_pause_image(places)
        elif component.name == "kube-apiserver":
            _grant_dns(places, address)
    _wait_for_node(places)


def admin_kubectl(places: Places) -> Kubectl:
    return Kubectl(path_of(places, "kubectl"), places.kubeconfig)


def is_healthy(places: Places) -> bool:
    """Every process runs and answers. Starts nothing."""
    if not places.kubeconfig.exists():
        return False
    return all(
        processes.running_pid(places, component.name) is not None and component.healthy()
        for component in all_components(places, machine.node_address())
    )


def _is_worth_keeping(places: Places, address: str) -> bool:
    """The same settings, and at least one process still alive (after a reboot, none is)."""
    try:
        recorded = _fingerprint_file(places).read_text()
    except OSError:
        return False
    alive = any(processes.running_pid(places, name) for name in processes.remembered(places))
    return alive and recorded == _fingerprint(places, address)


def _fingerprint_file(places: Places) -> Path:
    return places.state / "fingerprint"


def _fingerprint(places: Places, address: str) -> str:
    """Changes with every setting of every component."""
    commands = {c.name: c.command for c in all_components(places, address)}
    text = json.dumps([commands, configs.all_files(places, address)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _prepare(places: Places, address: str) -> None:
    say(f"preparing {places.state}")
    places.state.mkdir(parents=True, exist_ok=True)
    kernel.refuse_foreign_kubelet()
    for component in all_components(places, address):
        for bind, port in component.ports:
            machine.require_port(bind, port, component.name)
    for name, content in configs.all_files(places, address).items():
        path = places.config / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    write_pki(places, address)
    places.pod_logs.mkdir(exist_ok=True)
    teardown.remember_foreign_files(places)
    _fingerprint_file(places).write_text(_fingerprint(places, address))


def _ensure_running(places: Places, component: Component) -> None:
    if processes.running_pid(places, component.name) is not None and component.healthy():
        return
    processes.stop(places, component.name)
    for address, port in component.ports:
        machine.require_port(address, port, component.name)
    say(f"starting {component.name}")
    pid = processes.spawn(places, component.name, component.command)
    log = places.logs / f"{component.name}.log"

    def settled() -> bool:
        return processes.start_time(pid) is None or component.healthy()

    in_time = wait_until(settled, component.deadline)
    if processes.start_time(pid) is None:
        raise HarnessError(f"{component.name} ended at once; the end of {log}:\n{tail(log)}")
    if not in_time:
        raise HarnessError(
            f"{component.name} was not ready after {component.deadline:g} s; "
            f"the end of {log}:\n{tail(log)}"
        )


def _import_pause_image(places: Places) -> None:
    if scratch.has_image(places, PAUSE_IMAGE):
        return
    archive = places.state / "pause.tar"
    scratch.write_image(archive, PAUSE_IMAGE, {"/pause": path_of(places, "pause")}, ["/pause"])
    scratch.ctr(places, "images", "import", str(archive))
    archive.unlink()


def _grant_dns(places: Places, address: str) -> None:
    """CoreDNS is not ready before it may read Services."""
    done = places.state / "addons-applied"
    if not done.exists():
        admin_kubectl(places).apply(*addons.dns_objects(address))
        done.touch()


def _wait_for_node(places: Places) -> None:
    """Until a pod that asks for a GPU could start: a ready node, GPUs, a service account."""
    kubectl = admin_kubectl(places)
    if not wait_until(lambda: addons.node_is_ready(kubectl), 180, pause=0.3):
        log = places.logs / "kubelet.log"
        raise HarnessError(f"The node was not Ready after 180 s; the end of {log}:\n{tail(log)}")
    addons.offer_gpus(kubectl)

    try:
        kubectl.wait_for("create", "serviceaccount/default", "--namespace=default", seconds=180)
    except KubectlError as error:
        log = places.logs / "kube-controller-manager.log"
        raise HarnessError(
            f"The controller manager made no default service account: {error}\n"
            f"The end of {log}:\n{tail(log)}"
        ) from error


def describe(places: Places) -> str:
    """One line a component, for `status`."""
    address = machine.node_address()
    rows = []
    for component in all_components(places, address):
        pid = processes.running_pid(places, component.name)
        state = "not running" if pid is None else "healthy" if component.healthy() else "unhealthy"
        rows.append(f"{component.name:<26}{state:<14}{pid or ''}")
    return "\n".join(rows)

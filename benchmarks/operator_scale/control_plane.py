"""A small control plane on loopback, gone without a trace after the block that uses it.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler are those of the cluster tier, with
ports and a folder of their own; kwok simulates the nodes. The tier's cluster may run meanwhile.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.operator_scale import simulated_nodes
from tests.cluster.harness import components, gobuild, machine, processes
from tests.cluster.harness.errors import HarnessError, tail
from tests.cluster.harness.pki import IDENTITIES, Identity, kubeconfig_of, token_of, write_pki
from tests.cluster.harness.places import Places, default_places
from tests.cluster.harness.probes import answers, wait_until
from tests.cluster.harness.tools import KUBERNETES, KWOK, path_of

OPERATOR_NAMESPACE: Final = "kubelora-system"
OPERATOR_USER: Final = f"system:serviceaccount:{OPERATOR_NAMESPACE}:kubelora-operator"
_OPERATOR: Final = Identity(
    "operator",
    OPERATOR_USER,
    # A service account's groups: priority and fairness treats the operator as in production.
    ("system:serviceaccounts", f"system:serviceaccounts:{OPERATOR_NAMESPACE}"),
)
_ETCD_PACKAGE: Final = {name: machine.CLUSTER_PACKAGES[name] for name in ("etcd-server", "openssl")}
_ADDRESS: Final = "127.0.0.1"
_PATIENCE: Final = 120.0


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane.

    server: URL of the API server.
    """

    places: Places
    server: str

    @property
    def audit_log(self) -> Path:
        """One JSON line for each request of the operator that was answered."""
        return self.places.logs / "audit.jsonl"

    @property
    def authority(self) -> Path:
        """Certificate with which the API server is verified."""
        return self.places.pki / "ca.crt"

    @property
    def admin_token(self) -> str:
        """Bearer token of an administrator."""
        return token_of(self.places, "admin")

    @property
    def operator_kubeconfig(self) -> Path:
        """Kubeconfig with the rights that the chart gives to the operator."""
        return kubeconfig_of(self.places, _OPERATOR.name)


@contextmanager
def control_plane(run_seconds: float | None) -> Iterator[ControlPlane]:
    """Start a control plane; stop it and remove its folder afterwards.

    Args:
        run_seconds: How long a pod runs before it completes; None for ever.
    """
    places = Places(
        cache=default_places().cache, state=Path(tempfile.mkdtemp(prefix="kubelora-bench-"))
    )
    started: list[str] = []
    try:
        gobuild.ensure(places, (KUBERNETES, KWOK))
        machine.install(_ETCD_PACKAGE)
        yield _start(places, started, run_seconds)
    finally:
        # The first component is needed by all others, so it is stopped last.
        for name in reversed(started):
            processes.stop(places, name)
        shutil.rmtree(places.state, ignore_errors=True)


def _start(places: Places, started: list[str], run_seconds: float | None) -> ControlPlane:
    etcd, peer, api, manager, scheduler, kwok = free_ports(6)
    places.logs.mkdir(parents=True)
    write_pki(places, _ADDRESS, api, (*IDENTITIES, _OPERATOR))
    _write_json(places.config / "audit.json", _audit_policy())
    _write_json(places.config / "scheduler.json", _scheduler_configuration(places))
    (places.config / "kwok.yaml").write_text(simulated_nodes.configuration(run_seconds))
    plane = ControlPlane(places, f"https://{_ADDRESS}:{api}")

    def start(name: str, command: Sequence[str], healthy: Callable[[], bool]) -> None:
        started.append(name)
        _spawn(places, name, command, healthy)

    store, peers = f"http://{_ADDRESS}:{etcd}", f"http://{_ADDRESS}:{peer}"
    start("etcd", _etcd(places, store, peers), lambda: answers(f"{store}/health"))
    token = plane.admin_token
    start(
        "kube-apiserver",
        _api_server(places, plane, store, api),
        lambda: answers(f"{plane.server}/readyz", token=token),
    )
    for name, command, port in (
        ("kube-controller-manager", components.controller_manager(places).command, manager),
        ("kube-scheduler", _scheduler(places), scheduler),
    ):
        local = with_flags(command, {"--secure-port": str(port), "--bind-address": _ADDRESS})
        start(name, local, partial(answers, f"https://{_ADDRESS}:{port}/healthz"))
    start("kwok", _kwok(places, kwok), lambda: answers(f"http://{_ADDRESS}:{kwok}/healthz"))
    return plane


def _etcd(places: Places, client: str, peer: str) -> tuple[str, ...]:
    changes = {
        "--listen-client-urls": client,
        "--advertise-client-urls": client,
        "--listen-peer-urls": peer,
        "--initial-advertise-peer-urls": peer,
        "--initial-cluster": f"default={peer}",
    }
    return with_flags(components.etcd(places).command, changes)


def _api_server(places: Places, plane: ControlPlane, store: str, port: int) -> tuple[str, ...]:
    changes = {
        "--etcd-servers": store,
        "--secure-port": str(port),
        "--bind-address": _ADDRESS,
        # Nothing reaches the API server by its Service, and a loopback address can't be advertised.
        "--endpoint-reconciler-type": "none",
        # On etcd 3.4 such a list never begins, and kwok tries it for half a minute.
        "--feature-gates": "WatchList=false",
        "--audit-policy-file": str(places.config / "audit.json"),
        "--audit-log-path": str(plane.audit_log),
        "--audit-log-maxsize": "100000",  # MiB; by default the file is rotated at 100
    }
    return with_flags(components.api_server(places, _ADDRESS).command, changes)


def _scheduler(places: Places) -> tuple[str, ...]:
    program, *_ = components.scheduler(places).command
    return (program, f"--config={places.config / 'scheduler.json'}")


def _kwok(places: Places, port: int) -> tuple[str, ...]:
    return (
        str(path_of(places, "kwok")),
        f"--config={places.config / 'kwok.yaml'}",
        f"--kubeconfig={places.kubeconfig}",
        "--manage-all-nodes=true",
        f"--cidr={simulated_nodes.POD_ADDRESSES}",
        f"--node-ip={_ADDRESS}",
        "--node-lease-duration-seconds=40",  # as a kubelet's
        f"--server-address={_ADDRESS}:{port}",
    )


def _audit_policy() -> dict[str, Any]:
    """Log the operator's requests alone, each once, when it has been answered."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata", "users": [OPERATOR_USER]}, {"level": "None"}],
    }


def _scheduler_configuration(places: Places) -> dict[str, Any]:
    """Lift the default throttle of 50 requests a second, which would be what is measured."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {
            "kubeconfig": str(kubeconfig_of(places, "scheduler")),
            "qps": 1000,
            "burst": 2000,
        },
        "leaderElection": {"leaderElect": False},
    }


def _spawn(places: Places, name: str, command: Sequence[str], healthy: Callable[[], bool]) -> None:
    pid = processes.spawn(places, name, command)
    log = places.logs / f"{name}.log"
    in_time = wait_until(lambda: processes.start_time(pid) is None or healthy(), _PATIENCE)
    if processes.start_time(pid) is None or not in_time:
        raise HarnessError(f"{name} did not become healthy; the end of its log:\n{tail(log)}")


def with_flags(command: Sequence[str], changes: dict[str, str]) -> tuple[str, ...]:
    """Return the command with these flags set, in place of their earlier values if any."""
    kept = [word for word in command if word.partition("=")[0] not in changes]
    return (*kept, *(f"{flag}={value}" for flag, value in changes.items()))


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody uses, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_ADDRESS, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))

"""The components of the cluster: how each is started and how one knows that it works.

Pure: nothing here starts anything. The flags are those with which this cluster was seen to work;
each unusual one carries its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import probes
from .errors import HarnessError
from .pki import kubeconfig_of, token_of
from .places import Places
from .settings import (
    API_PORT,
    CONTROLLER_MANAGER_PORT,
    DNS_PORT,
    DNS_READY_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    KUBE_PROXY_HEALTH_PORT,
    KUBE_PROXY_METRICS_PORT,
    KUBELET_HEALTH_PORT,
    KUBELET_PORT,
    NODE,
    SCHEDULER_PORT,
    SERVICE_SUBNET,
)
from .tools import path_of


@dataclass(frozen=True)
class Component:
    """One process of the cluster."""

    name: str
    command: tuple[str, ...]
    healthy: Callable[[], bool]
    ports: tuple[tuple[str, int], ...] = ()
    """Address and port pairs that must be free before the start."""
    deadline: float = 180.0
    """Seconds from start to healthy before the harness gives up."""


def all_components(places: Places, node_address: str) -> tuple[Component, ...]:
    """Every component, in the order of its needs."""
    return (
        etcd(places),
        containerd(places),
        api_server(places, node_address),
        controller_manager(places),
        scheduler(places),
        coredns(places, node_address),
        kubelet(places, node_address),
        kube_proxy(places),
    )


def component(places: Places, node_address: str, name: str) -> Component:
    for candidate in all_components(places, node_address):
        if candidate.name == name:
            return candidate
    raise HarnessError(f"No component is called {name!r}.")


def etcd(places: Places) -> Component:
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    return Component(
        name="etcd",
        command=(
            "/usr/bin/etcd",
            f"--data-dir={places.state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # a test's data: speed matters, a power cut does not
        ),
        healthy=lambda: probes.answers(f"{client}/health"),
        ports=(("127.0.0.1", ETCD_PORT), ("127.0.0.1", ETCD_PEER_PORT)),
    )


def containerd(places: Places) -> Component:
    return Component(
        name="containerd",
        command=("/usr/bin/containerd", f"--config={places.config / 'containerd.toml'}"),
        healthy=lambda: probes.containerd_answers(places),
    )


def api_server(places: Places, node_address: str) -> Component:
    pki = places.pki
    return Component(
        name="kube-apiserver",
        command=(
            str(path_of(places, "kube-apiserver")),
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={node_address}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--service-account-key-file={pki / 'service-account.pub'}",
            f"--service-account-signing-key-file={pki / 'service-account.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",  # the node's name resolves nowhere
            "--endpoint-reconciler-type=lease",
            # Aggregated APIs answer 403 without these, and namespaces then never finish deleting.
            f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        ),
        healthy=lambda: probes.answers(
            f"https://127.0.0.1:{API_PORT}/readyz", token=token_of(places, "admin")
        ),
        ports=(("0.0.0.0", API_PORT),),
        deadline=400.0,
    )


def controller_manager(places: Places) -> Component:
    return Component(
        name="kube-controller-manager",
        command=(
            str(path_of(places, "kube-controller-manager")),
            f"--kubeconfig={kubeconfig_of(places, 'controller-manager')}",
            f"--service-account-private-key-file={places.pki / 'service-account.key'}",
            f"--root-ca-file={places.pki / 'ca.crt'}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            # The default throttle would be what a test with hundreds of Jobs measures.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
        ),
        healthy=lambda: probes.answers(f"https://127.0.0.1:{CONTROLLER_MANAGER_PORT}/healthz"),
        ports=(("0.0.0.0", CONTROLLER_MANAGER_PORT),),
    )


def scheduler(places: Places) -> Component:
    return Component(
        name="kube-scheduler",
        command=(
            str(path_of(places, "kube-scheduler")),
            f"--kubeconfig={kubeconfig_of(places, 'scheduler')}",
            "--leader-elect=false",
        ),
        healthy=lambda: probes.answers(f"https://127.0.0.1:{SCHEDULER_PORT}/healthz"),
        ports=(("0.0.0.0", SCHEDULER_PORT),),
    )


def kubelet(places: Places, node_address: str) -> Component:
    return Component(
        name="kubelet",
        command=(
            str(path_of(places, "kubelet")),
            f"--config={places.config / 'kubelet.json'}",
            f"--kubeconfig={kubeconfig_of(places, 'node')}",
            f"--hostname-override={NODE}",
            f"--node-ip={node_address}",
            f"--root-dir={places.kubelet_root}",
            f"--cert-dir={places.pki / 'kubelet'}",
        ),
        healthy=lambda: probes.answers(f"http://127.0.0.1:{KUBELET_HEALTH_PORT}/healthz"),
        ports=(("0.0.0.0", KUBELET_PORT), ("127.0.0.1", KUBELET_HEALTH_PORT)),
    )


def kube_proxy(places: Places) -> Component:
    return Component(
        name="kube-proxy",
        command=(
            str(path_of(places, "kube-proxy")),
            f"--config={places.config / 'kube-proxy.json'}",
            f"--hostname-override={NODE}",
        ),
        healthy=lambda: probes.answers(f"http://127.0.0.1:{KUBE_PROXY_HEALTH_PORT}/healthz"),
        ports=(
            ("127.0.0.1", KUBE_PROXY_HEALTH_PORT),
            ("127.0.0.1", KUBE_PROXY_METRICS_PORT),
        ),
    )


def coredns(places: Places, node_address: str) -> Component:
    """A process of the host behind a Service: it needs no image and works before the first pod."""
    return Component(
        name="coredns",
        command=(str(path_of(places, "coredns")), "-conf", str(places.config / "Corefile")),
        healthy=lambda: probes.answers(f"http://127.0.0.1:{DNS_READY_PORT}/ready"),
        ports=((node_address, DNS_PORT), ("127.0.0.1", DNS_READY_PORT)),
    )

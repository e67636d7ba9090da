"""The configuration files of the components, as pure functions to text."""

from __future__ import annotations

import json

from .pki import kubeconfig_of
from .places import Places
from .settings import (
    DNS_DOMAIN,
    DNS_PORT,
    DNS_READY_PORT,
    DNS_SERVICE_ADDRESS,
    KUBE_PROXY_HEALTH_PORT,
    KUBE_PROXY_METRICS_PORT,
    NETWORK_NAME,
    NFT_TABLE,
    PAUSE_IMAGE,
    POD_SUBNET,
)


def all_files(places: Places, node_address: str) -> dict[str, str]:
    """File name under the config folder to its content."""
    return {
        "containerd.toml": containerd(places),
        "cni/10-kubelora.conflist": network(places),
        "kubelet.json": kubelet(places),
        "kube-proxy.json": kube_proxy(places),
        "Corefile": corefile(places, node_address),
        "masquerade.nft": masquerade(),
    }


def containerd(places: Places) -> str:
    # Every path is the cluster's own, so that a containerd of the system is never touched.
    return f"""version = 2
root = "{places.state}/containerd/root"
state = "{places.state}/containerd/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{places.containerd_socket}"
[ttrpc]
  address = "{places.containerd_socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Where root may not lower its own score (a sandboxed machine), runc fails each pod without this.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{places.config}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{places.state}/runc"
"""


def network(places: Places) -> str:
    """Point-to-point links: no bridge to remove, and traffic between pods is always routed.

    On a bridge the answer of a pod on the same bridge would bypass the address translation unless
    the kernel's br_netfilter is on.
    """
    plugin = {
        "type": "ptp",
        # The plugin's masquerading writes iptables chains for each pod; one nft table does for all.
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{places.state}/cni",
            "ranges": [[{"subnet": POD_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": NETWORK_NAME, "plugins": [plugin]}, indent=2)


def kubelet(places: Places) -> str:
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(places.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{places.containerd_socket}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            # A developer's disk is often nearly full, and the cluster must not evict for it.
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,  # images exist here alone; none can be pulled again
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(places.pod_logs),
            "volumePluginDir": f"{places.state}/volume-plugins",
            "clusterDNS": [DNS_SERVICE_ADDRESS],
            "clusterDomain": DNS_DOMAIN,
        },
        indent=2,
    )


def kube_proxy(places: Places) -> str:
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": POD_SUBNET,
            "clientConnection": {"kubeconfig": str(kubeconfig_of(places, "kube-proxy"))},
            "healthzBindAddress": f"127.0.0.1:{KUBE_PROXY_HEALTH_PORT}",
            "metricsBindAddress": f"127.0.0.1:{KUBE_PROXY_METRICS_PORT}",
            "conntrack": {"maxPerCore": 0},  # the machine's own limit stays as it is
        },
        indent=2,
    )


def corefile(places: Places, node_address: str) -> str:
    return f""".:{DNS_PORT} {{
    bind {node_address}
    errors
    ready 127.0.0.1:{DNS_READY_PORT}
    kubernetes {DNS_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig_of(places, "coredns")}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
    }}
    forward . /etc/resolv.conf
    cache 5
}}
"""


def masquerade() -> str:
    """What pods send out of the machine leaves under the machine's own address."""
    return f"""table ip {NFT_TABLE} {{
    chain postrouting {{
        type nat hook postrouting priority srcnat;
        ip saddr {POD_SUBNET} ip daddr != {POD_SUBNET} masquerade
    }}
}}
"""

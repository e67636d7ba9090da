"""Names, addresses and ports of the one-node cluster, in one place."""

from __future__ import annotations

NODE = "kubelora-node"
GPUS = 8
GPU_RESOURCE = "nvidia.com/gpu"

POD_SUBNET = "10.244.0.0/24"
SERVICE_SUBNET = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
DNS_DOMAIN = "cluster.local"

ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
API_PORT = 6443
CONTROLLER_MANAGER_PORT = 10257
SCHEDULER_PORT = 10259
KUBELET_PORT = 10250
KUBELET_HEALTH_PORT = 10248
KUBE_PROXY_HEALTH_PORT = 10256
KUBE_PROXY_METRICS_PORT = 10249
DNS_PORT = 10053
DNS_READY_PORT = 10055

PAUSE_IMAGE = "localhost/kubelora-pause:1"
NETWORK_NAME = "kubelora"
NFT_TABLE = "kubelora"
CONTAINERD_NAMESPACE = "k8s.io"  # where the kubelet's runtime looks for images and containers

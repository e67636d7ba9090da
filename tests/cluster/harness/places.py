"""Where the harness keeps things: a cache that outlives clusters, and the state of the one cluster.

The split is what makes teardown simple: everything under `state` belongs to the running cluster and
goes with it; nothing under `cache` belongs to any cluster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """Folders of the harness, derived from two roots."""

    cache: Path
    state: Path

    @property
    def binaries(self) -> Path:
        """One folder per tool and version."""
        return self.cache / "bin"

    @property
    def build(self) -> Path:
        """Go modules that hold the tool directives, and Go's caches while something is built."""
        return self.cache / "build"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def pids(self) -> Path:
        return self.state / "pids"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def kubelet_root(self) -> Path:
        return self.state / "kubelet"

    @property
    def pod_logs(self) -> Path:
        return self.state / "pod-logs"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state / "admin.kubeconfig"


def default_places() -> Places:
    """Read KUBELORA_CACHE and KUBELORA_STATE, or take their defaults."""
    cache = os.environ.get("KUBELORA_CACHE") or "~/.cache/kubelora"
    state = os.environ.get("KUBELORA_STATE") or "/var/lib/kubelora-cluster"
    return Places(cache=Path(cache).expanduser().resolve(), state=Path(state).resolve())

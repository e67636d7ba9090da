"""Fixtures of the cluster tier: a real cluster, its tools, the images, a namespace for each test.

A cluster that was up before the tests stays up; one that the tests started is taken down again,
unless KUBELORA_KEEP_CLUSTER is set. With KUBECONFIG pointing at another cluster, that one is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiers.skips import not_applicable

from .harness import cluster as local_cluster
from .harness import gobuild, locks, monitoring, volumes
from .harness import images as product_images
from .harness.images import Images
from .harness.kubectl import Helm, Kubectl
from .harness.monitoring import Monitoring
from .harness.places import Places, default_places
from .harness.studio import Studio, studio

ClaimDirectory = Callable[[str, Path], None]


@pytest.fixture(scope="session")
def places() -> Places:
    """The harness's folders."""
    return default_places()


@pytest.fixture(scope="session")
def is_local_cluster(places: Places) -> bool:
    """Whether the tests run on the harness's cluster rather than on one named by KUBECONFIG."""
    return product_images.uses_local_cluster(places)


@pytest.fixture(scope="session")
def cluster(places: Places, is_local_cluster: bool) -> Iterator[Path]:
    """The kubeconfig of a cluster that works."""
    if not is_local_cluster:
        yield Path(os.environ["KUBECONFIG"])
        return
    was_up = local_cluster.is_healthy(places)
    kubeconfig = local_cluster.up(places)
    with locks.in_use(places):
        yield kubeconfig
    if not was_up and not os.environ.get("KUBELORA_KEEP_CLUSTER"):
        with contextlib.suppress(locks.InUseError):  # another test run has joined: it stays up
            local_cluster.down(places)


@pytest.fixture(scope="session")
def kubectl(places: Places, cluster: Path) -> Kubectl:
    """kubectl with an administrator's rights; `kubectl.within(namespace)` scopes it."""
    return Kubectl(gobuild.tool(places, "kubectl"), cluster)


@pytest.fixture(scope="session")
def helm(places: Places, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm against the cluster, with a home of its own."""
    return Helm(gobuild.tool(places, "helm"), cluster, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def images(places: Places, cluster: Path) -> Images:
    """The operator's and the trainer's image, current, and known to the cluster."""
    return product_images.ensure(places)


@pytest.fixture(scope="session")
def shell_image(places: Places, cluster: Path, is_local_cluster: bool) -> str:
    """An image with a shell and Python, for pods that are not about the product."""
    if not is_local_cluster:
        not_applicable("the shell image is built for the harness's own cluster")
    return product_images.ensure_base_in_cluster(places)


@pytest.fixture(scope="session")
def ended_namespaces(kubectl: Kubectl) -> Iterator[list[str]]:
    """Namespaces whose deletion has begun; it takes seconds each, so it is awaited once."""
    names: list[str] = []
    yield names
    for name in names:
        kubectl.wait_for("delete", f"namespace/{name}", seconds=400)


@pytest.fixture
def namespace(kubectl: Kubectl, ended_namespaces: list[str]) -> Iterator[str]:
    """A namespace for one test, deleted with everything in it when the test ends."""
    name = f"test-{secrets.token_hex(4)}"
    kubectl.create_namespace(name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")
    ended_namespaces.append(name)
    volumes.release_volumes(kubectl, name)


@pytest.fixture
def claim_directory(kubectl: Kubectl, namespace: str, is_local_cluster: bool) -> ClaimDirectory:
    """Make a claim in the test's namespace that is a folder of this machine."""
    if not is_local_cluster:
        not_applicable("claims on folders of this machine need the harness's own cluster")

    def claim(name: str, directory: Path) -> None:
        volumes.claim_directory(kubectl, namespace, name, directory)

    return claim


@pytest.fixture(scope="module")
def own_studio(
    request: pytest.FixtureRequest,
    kubectl: Kubectl,
    helm: Helm,
    images: Images,
    is_local_cluster: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Studio]:
    """The product installed for one module of tests, which also gives its name."""
    if not is_local_cluster:
        not_applicable("claims on folders of this machine need the harness's own cluster")
    name = request.module.__name__.rpartition(".test_")[2]
    with studio(name, kubectl, helm, images, tmp_path_factory.mktemp(name)) as made:
        yield made


@pytest.fixture
def monitored(places: Places, kubectl: Kubectl, tmp_path: Path) -> Iterator[Monitoring]:
    """Prometheus and Alertmanager for one test; call `prometheus.reload()` after `helm install`."""
    with monitoring.monitor(places, kubectl, tmp_path / "monitoring") as running:
        yield running

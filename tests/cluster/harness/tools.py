"""The tools the cluster and its tests need, one table, each built once and kept by version.

To add a tool, add a `ToolFamily` here. Programs that share a Go module are one family: they are
built together, because most of the cost is compiling what they share. Families that agree about the
versions of what they share (`resolved_together`) compile it once as well: helm, CoreDNS and
Prometheus each contain the whole of Kubernetes' client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError
from .places import Places

KUBERNETES_VERSION = "1.34.4"  # 1.34 is the last line that runs on cgroup v1 and containerd 1.6
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")


@dataclass(frozen=True)
class ToolFamily:
    """Programs of one Go module at one version."""

    name: str
    version: str
    module: str
    module_version: str
    programs: tuple[str, ...]
    """Program names; `packages` gives where each lives in the module."""
    packages: tuple[str, ...]
    variables: tuple[str, ...] = ()
    """`path.Name=value` strings for the linker, mostly versions that a plain build leaves empty."""
    staging_version: str = ""
    """Version of the modules that `module` replaces by folders of its own repository."""
    tags: tuple[str, ...] = ()
    """Build tags, which leave out what no test uses."""
    resolved_together: bool = False
    """Whether the versions of all that is imported are settled with the other such families."""
    generates: tuple[str, ...] = ()
    """Files that the family's program writes from `input_module`, kept instead of the program."""
    input_module: str = ""
    input_version: str = ""
    keeps: tuple[str, ...] = ()
    """Files of the module that are kept next to its programs."""
    source: Path | None = None
    """A folder of Go source next to this file, for a program of our own or a `main` of our own."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.generates or (*self.programs, *(Path(name).name for name in self.keeps))

    @property
    def imports(self) -> tuple[str, ...]:
        """What the go command is to find, each as ``package@version``."""
        if not self.module_version:
            return ()
        if self.source:
            text = (self.source / "main.go").read_text()
            names = re.findall(rf'"({re.escape(self.module)}/[^"]+)"', text)
        else:
            names = [self.module if p == "." else f"{self.module}/{p}" for p in self.packages]
        return tuple(f"{name}@{self.module_version}" for name in names)

    def folder(self, places: Places) -> Path:
        return places.binaries / f"{self.name}-{self.version}"

    def missing(self, places: Places) -> tuple[str, ...]:
        return tuple(name for name in self.outputs if not (self.folder(places) / name).exists())


KUBERNETES = ToolFamily(
    name="kubernetes",
    version=KUBERNETES_VERSION,
    module="k8s.io/kubernetes",
    module_version=f"v{KUBERNETES_VERSION}",
    programs=(
        "kube-apiserver",
        "kubectl",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
    ),
    packages=(
        "cmd/kube-apiserver",
        "cmd/kubectl",
        "cmd/kube-controller-manager",
        "cmd/kube-scheduler",
        "cmd/kubelet",
        "cmd/kube-proxy",
    ),
    variables=(
        # Without these the server calls itself v0.0.0 and clients refuse it.
        f"k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}",
        f"k8s.io/component-base/version.gitMajor={_MAJOR}",
        f"k8s.io/component-base/version.gitMinor={_MINOR}",
    ),
    staging_version=f"v0.{_MINOR}.{KUBERNETES_VERSION.rpartition('.')[2]}",
)

HELM = ToolFamily(
    name="helm",
    version="3.22.0",
    module="helm.sh/helm/v3",
    module_version="v3.22.0",
    programs=("helm",),
    packages=("cmd/helm",),
    variables=(
        "helm.sh/helm/v3/internal/version.version=v3.22.0",
        # What `helm template` assumes of a cluster it does not ask; the plain build says 1.20.
        f"helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor={_MAJOR}",
        f"helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={_MINOR}",
        f"helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor={_MAJOR}",
        f"helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor={_MINOR}",
    ),
    resolved_together=True,
)

COREDNS = ToolFamily(
    name="coredns",
    version="1.15.0",
    module="github.com/coredns/coredns",
    module_version="v1.15.0",
    programs=("coredns",),
    packages=(".",),
    # Its own main compiles in forty plugins, the clients of three clouds among them.
    source=Path(__file__).parent / "coredns",
    resolved_together=True,
)

PROMETHEUS = ToolFamily(
    name="prometheus",
    version="3.16.0",
    module="github.com/prometheus/prometheus",
    module_version="v0.316.0",  # the Go module counts 3.16.0 as 0.316.0
    programs=("prometheus", "promtool"),
    packages=("cmd/prometheus", "cmd/promtool"),
    variables=("github.com/prometheus/common/version.Version=3.16.0",),
    # Of the service discoveries, those of the clouds are two thirds of what there is to compile.
    tags=("remove_all_sd", "enable_kubernetes_sd"),
    resolved_together=True,
)

MONITORING_CRDS = ToolFamily(
    name="monitoring-crds",
    version="0.95.2",
    module="sigs.k8s.io/controller-tools",
    module_version="v0.18.0",
    programs=("controller-gen",),
    packages=("cmd/controller-gen",),
    generates=(
        "monitoring.coreos.com_podmonitors.yaml",
        "monitoring.coreos.com_prometheusrules.yaml",
    ),
    input_module="github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring",
    input_version="v0.95.2",
)

KWOK = ToolFamily(
    name="kwok",
    version="0.7.0",
    module="sigs.k8s.io/kwok",
    module_version="v0.7.0",
    programs=("kwok",),
    packages=("cmd/kwok",),
)

PAUSE = ToolFamily(
    name="pause",
    version="1",
    module="kubelora.dev/tools",
    module_version="",
    programs=("pause",),
    packages=(".",),
    source=Path(__file__).parent / "pause",
)

TRAINING_OPERATOR = ToolFamily(
    name="training-operator",
    version="1.9.3",
    module="github.com/kubeflow/training-operator",
    module_version="v1.9.3",
    programs=("training-operator.v1",),
    packages=("cmd/training-operator.v1",),
    keeps=("manifests/base/crds/kubeflow.org_pytorchjobs.yaml",),
)
"""Not among the families of `FAMILIES`: a benchmark builds it on request, no test needs it."""

# In the order in which a cold machine should build them: the cluster's own first.
FAMILIES = (KUBERNETES, PAUSE, COREDNS, HELM, PROMETHEUS, MONITORING_CRDS, KWOK)


def imports_of(family: ToolFamily) -> tuple[str, ...]:
    """What the versions in a family's go.mod are settled for: the same for all that share them."""
    if not family.resolved_together:
        return family.imports
    return tuple(name for other in FAMILIES if other.resolved_together for name in other.imports)


def family_of(tool: str) -> ToolFamily:
    """The family that provides a program, or is named so itself."""
    for family in FAMILIES:
        if tool == family.name or tool in family.outputs:
            return family
    known = sorted({name for family in FAMILIES for name in (family.name, *family.outputs)})
    raise HarnessError(f"No tool is called {tool!r}. Known tools: {', '.join(known)}.")


def path_of(places: Places, tool: str) -> Path:
    """Where a program lies once built; a family's folder when its name is not a program's."""
    family = family_of(tool)
    return family.folder(places) / tool if tool in family.outputs else family.folder(places)

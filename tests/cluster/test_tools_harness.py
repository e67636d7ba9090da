"""What is compiled: nothing twice, and nothing short of what the cluster's configuration names."""

from __future__ import annotations

import re
from pathlib import Path

from .harness import configs, tools
from .harness.places import Places


def test_families_that_share_the_client_of_kubernetes_settle_its_version_together() -> None:
    """Else each compiles one of its own, for a minute and a half of processor time."""
    sharing = (tools.HELM, tools.COREDNS, tools.PROMETHEUS)
    assert len({tools.imports_of(family) for family in sharing}) == 1
    assert {
        "helm.sh/helm/v3/cmd/helm@v3.22.0",
        "github.com/coredns/coredns/coremain@v1.15.0",
        "github.com/prometheus/prometheus/cmd/promtool@v0.316.0",
    } < set(tools.imports_of(tools.HELM))
    assert tools.imports_of(tools.KUBERNETES) == tools.KUBERNETES.imports


def test_coredns_has_the_plugins_that_the_corefile_names(tmp_path: Path) -> None:
    corefile = configs.corefile(Places(cache=tmp_path, state=tmp_path), "192.0.2.1")
    named = set(re.findall(r"^    (\w+)", corefile, re.MULTILINE))
    assert {"kubernetes", "forward"} < named
    assert {f"plugin/{name}" for name in named} | {"coremain"} == {
        name.partition("@")[0].partition("coredns/coredns/")[2] for name in tools.COREDNS.imports
    }

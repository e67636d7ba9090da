"""The chart as helm renders it, parsed."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "kubelora"
RELEASE = "studio"
NAMESPACE = "kubelora-system"
FULLNAME = "studio-kubelora"
"""Release and chart, as in helm's own naming convention."""

Values = Mapping[str, Any]
Object = dict[str, Any]

MONITORING: Values = {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}}
EVERYTHING: Values = {
    "image": {"repository": "registry.example/op", "digest": "sha256:" + "a" * 64},
    "trainer": {"image": {"repository": "registry.example/train", "tag": "7"}},
    "replicas": 3,
    "imagePullSecrets": [{"name": "pull"}],
    "serviceAccount": {"name": "robot", "annotations": {"example.com/role": "x"}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "cpu-only", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"team": "studio", "app.kubernetes.io/name": "mine"},
    "podAnnotations": {"example.com/note": "y"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    **MONITORING,
}
NAMESPACED: Values = {"watch": {"namespaces": ["lab", "studio"]}, **MONITORING}
BARE: Values = {
    "crds": {"install": False},
    "rbac": {"create": False, "aggregate": False},
    "serviceAccount": {"create": False, "name": "given"},
    "resources": {},
}
MATRIX: Mapping[str, Values] = {
    "defaults": {},
    "monitoring": MONITORING,
    "everything": EVERYTHING,
    "namespaced": NAMESPACED,
    "bare": BARE,
}


class _Loader(yaml.SafeLoader):
    """Reads numbers as kubectl does: `1e-08` is one, though YAML 1.1 wants a dot in it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(frozen=True)
class Helm:
    """helm, on this repository's chart."""

    program: Path

    def template(self, values: Values, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`helm template`, with values on standard input."""
        return subprocess.run(
            [self.program, "template", RELEASE, CHART, "-n", NAMESPACE, "-f", "-", *arguments],
            input=json.dumps(values),
            capture_output=True,
            text=True,
        )

    def render(self, values: Values) -> list[Object]:
        """The chart's objects under these values."""
        done = self.template(values)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, _Loader) if document]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Objects of one kind, in the order of their rendering."""
    return [o for o in objects if o["kind"] == kind]


def one(objects: list[Object], kind: str, name: str = FULLNAME) -> Object:
    """The one object of this kind and name."""
    found = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects {kind} {name}"
    return found[0]

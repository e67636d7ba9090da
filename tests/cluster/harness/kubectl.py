"""kubectl and helm as callables, with errors that say what was run and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError

JsonObject = dict[str, "JsonValue"]
JsonValue = None | bool | int | float | str | list["JsonValue"] | JsonObject


class KubectlError(HarnessError):
    """kubectl ended with an error; the message holds the command and what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl against one cluster, in one namespace unless a call names another."""

    program: Path
    kubeconfig: Path
    namespace: str = ""

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Run `kubectl ARGUMENTS` and return its standard output; raises KubectlError."""
        done = self.attempt(*arguments, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            raise KubectlError(f"`kubectl {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def attempt(
        self, *arguments: str, stdin: str | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return whatever came of it, for calls that may fail."""
        scope = ["--namespace", self.namespace] if self.namespace else []
        try:
            return subprocess.run(
                [str(self.program), "--kubeconfig", str(self.kubeconfig), *scope, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(
                f"`kubectl {' '.join(arguments)}` gave no answer in {timeout:g} s."
            ) from error

    def within(self, namespace: str) -> Kubectl:
        """The same kubectl, in another namespace."""
        return Kubectl(self.program, self.kubeconfig, namespace)

    def apply(self, *objects: Mapping[str, object]) -> str:
        """`kubectl apply` of objects given as dictionaries."""
        return self("apply", "-f", "-", stdin=_as_list(objects))

    def create(self, *objects: Mapping[str, object]) -> str:
        return self("create", "-f", "-", stdin=_as_list(objects))

    def get(self, *arguments: str) -> JsonObject:
        """`kubectl get ARGUMENTS -o json`, parsed."""
        parsed: JsonObject = json.loads(self("get", *arguments, "-o", "json"))
        return parsed

    def items(self, *arguments: str) -> list[JsonObject]:
        """The items of a list."""
        listed = self.get(*arguments)["items"]
        assert isinstance(listed, list)
        return [item for item in listed if isinstance(item, dict)]


def _as_list(objects: Sequence[Mapping[str, object]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


@dataclass(frozen=True)
class Helm:
    """helm against one cluster."""

    program: Path
    kubeconfig: Path
    home: Path
    """Where helm keeps its own files, so that a developer's are not touched."""

    def __call__(self, *arguments: str, timeout: float = 300.0) -> str:
        """Run `helm ARGUMENTS` and return its standard output; raises HarnessError."""
        done = subprocess.run(
            [str(self.program), "--kubeconfig", str(self.kubeconfig), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={
                **os.environ,
                "HELM_CACHE_HOME": str(self.home / "cache"),
                "HELM_CONFIG_HOME": str(self.home / "config"),
                "HELM_DATA_HOME": str(self.home / "data"),
            },
        )
        if done.returncode != 0:
            raise HarnessError(f"`helm {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

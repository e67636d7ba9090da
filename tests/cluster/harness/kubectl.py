"""kubectl and helm as callables, with errors that say what was run and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError
from .probes import wait_until

_PAUSE = 0.3  # between two tries of something that is not there yet

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

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 300.0) -> str:
        """Run `kubectl ARGUMENTS` and return its standard output; raises KubectlError."""
        done = self.attempt(*arguments, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            raise KubectlError(f"`kubectl {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def attempt(
        self, *arguments: str, stdin: str | None = None, timeout: float = 300.0
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

    def wait_for(self, state: str, *objects: str, seconds: float) -> None:
        """Wait until objects that may not be there yet are in a state.

        `kubectl wait` by itself ends at once where the object is not found, where its kind was
        defined a moment ago, and where its status is still empty (".status.conditions accessor
        error"): on a busy machine all of these come right after the object was applied. So each
        failure is tried again until the time is over.

        Args:
            state: What `kubectl wait --for` takes, for example ``condition=Ready``.
            objects: What it is to wait for, for example ``pod/server`` or ``-f FILE``.
            seconds: How long to wait.

        Raises:
            KubectlError: The time is over; the message is the last answer of kubectl.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(1.0, deadline - time.monotonic())
            wait = ("wait", f"--for={state}", *objects, f"--timeout={left:.0f}s")
            done = self.attempt(*wait, timeout=left + 60)
            if done.returncode == 0:
                return
            if time.monotonic() + _PAUSE > deadline:
                raise KubectlError(
                    f"{' '.join(objects)} did not reach {state} in {seconds:g} s; the last answer "
                    f"of `kubectl wait`: {done.stderr.strip()}"
                )
            time.sleep(_PAUSE)

    def create_namespace(self, name: str, seconds: float = 180.0) -> None:
        """Create a namespace in which pods can be created: one with its default service account."""
        self("create", "namespace", name)
        self.within(name).wait_for("create", "serviceaccount/default", seconds=seconds)

    def define(self, definitions: Path, seconds: float = 180.0) -> None:
        """Apply CustomResourceDefinitions, and wait until objects of their kinds can be listed.

        Args:
            definitions: A file, or a folder of files.
            seconds: How long to wait for each step.

        Raises:
            KubectlError: The API server does not serve a kind in time.
        """
        self("apply", "--server-side", "--force-conflicts", "-f", str(definitions))
        self.wait_for("condition=Established", "-f", str(definitions), seconds=seconds)
        found = self("get", "-f", str(definitions), "-o", "name").split()
        kinds = [definition.partition("/")[2] for definition in found]

        def served() -> bool:  # a moment after Established
            return all(self.attempt("get", kind).returncode == 0 for kind in kinds)

        if not wait_until(served, seconds):
            raise KubectlError(f"The API server did not serve {kinds} in {seconds:g} s.")

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

    def __call__(self, *arguments: str, timeout: float = 900.0) -> str:
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

"""Waiting for what was created a moment ago, which may not be there yet, or have no status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .harness.kubectl import Kubectl, KubectlError

NO_STATUS = "error: .status.conditions accessor error: <nil> is of the type <nil>"
SIGNALS = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: signals.test.kubelora.dev}
spec:
  group: test.kubelora.dev
  names: {kind: Signal, plural: signals, singular: signal}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""


@pytest.fixture
def signals(kubectl: Kubectl, namespace: str, tmp_path: Path) -> Iterator[Kubectl]:
    """The test's namespace, in a cluster where a kind was defined a moment ago."""
    (tmp_path / "crd.yaml").write_text(SIGNALS)
    kubectl.define(tmp_path / "crd.yaml")
    yield kubectl.within(namespace)
    kubectl("delete", "-f", str(tmp_path / "crd.yaml"), "--wait=false")


@pytest.fixture
def answering(tmp_path: Path) -> Callable[[int], Kubectl]:
    """A program that fails as kubectl does, the given number of times, and then succeeds."""

    def kubectl(failures: int) -> Kubectl:
        calls, program = tmp_path / "calls", tmp_path / "kubectl"
        program.write_text(
            f"#!/bin/sh\necho >> {calls}\n"
            f"[ $(wc -l < {calls}) -gt {failures} ] || {{ echo '{NO_STATUS}' >&2; exit 1; }}\n"
        )
        program.chmod(0o755)
        return Kubectl(program, tmp_path / "kubeconfig")

    return kubectl


def test_a_failure_of_the_first_answers_is_no_failure(
    answering: Callable[[int], Kubectl], tmp_path: Path
) -> None:
    answering(2).wait_for("condition=Established", "crd/x", seconds=20)
    assert len((tmp_path / "calls").read_text()) == 3


def test_when_the_time_is_over_the_last_answer_is_in_the_message(
    answering: Callable[[int], Kubectl],
) -> None:
    with pytest.raises(
        KubectlError, match=r"crd/x did not reach condition=Established in 0\.5 s"
    ) as e:
        answering(1000).wait_for("condition=Established", "crd/x", seconds=0.5)
    assert NO_STATUS in str(e.value)


def test_a_wait_begun_before_the_object_and_its_conditions_exist_ends_when_they_do(
    signals: Kubectl,
) -> None:
    """Both ends of the race, held open for a second each on the real API server.

    A new CustomResourceDefinition has the same status as this object: conditions that are null.
    """
    signal = {"apiVersion": "test.kubelora.dev/v1", "kind": "Signal", "metadata": {"name": "green"}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(signals.wait_for, "condition=Lit", "signal/green", seconds=60)
        time.sleep(1)
        signals.create({**signal, "status": {"conditions": None}})
        by_itself = signals.attempt("wait", "--for=condition=Lit", "signal/green", "--timeout=5s")
        assert ".status.conditions accessor error" in by_itself.stderr
        time.sleep(1)
        assert not waiting.done()
        lit = '{"status":{"conditions":[{"type":"Lit","status":"True"}]}}'
        signals("patch", "signal", "green", "--type=merge", "-p", lit)
        waiting.result(60)


def test_a_new_namespace_takes_a_pod_at_once(kubectl: Kubectl, namespace: str) -> None:
    assert kubectl.within(namespace).get("serviceaccount", "default")["kind"] == "ServiceAccount"

"""Waiting for what was created a moment ago, which may not be there yet, or have no status."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.api.contract_documents import base

from .harness.kubectl import Kubectl, KubectlError
from .test_contract import CRD

NO_STATUS = "error: .status.conditions accessor error: <nil> is of the type <nil>"
COMPLETE = (
    '{"status":{"conditions":[{"type":"Complete","status":"True","reason":"Done","message":"",'
    '"lastTransitionTime":"2026-01-01T00:00:00Z"}]}}'
)


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


def test_a_wait_begun_before_the_object_and_its_status_exist_ends_when_they_do(
    kubectl: Kubectl, namespace: str
) -> None:
    """Both ends of the race, held open for a second each on the real API server."""
    kubectl.define(CRD)
    here = kubectl.within(namespace)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.wait_for, "condition=Complete", "ltj/bottles", seconds=60)
        time.sleep(1)
        here.create({**base(), "spec": {**base()["spec"], "suspend": True}})
        refused = here.attempt("wait", "--for=condition=Complete", "ltj/bottles", "--timeout=10s")
        assert "accessor error" in refused.stderr  # what kubectl does by itself
        time.sleep(1)
        assert not waiting.done()
        here("patch", "ltj", "bottles", "--subresource=status", "--type=merge", "-p", COMPLETE)
        waiting.result(60)


def test_a_new_namespace_takes_a_pod_at_once(kubectl: Kubectl, namespace: str) -> None:
    assert kubectl.within(namespace).get("serviceaccount", "default")["kind"] == "ServiceAccount"

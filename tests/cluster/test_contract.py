"""The API server and `kubelora validate` give the same verdict on the same documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.contract_documents import CHANGES, RIGHT, WRONG, Document, Wrong, base

from .harness.kubectl import Kubectl

CRD = Path(__file__).parents[2] / "crds" / "kubelora.dev_loratrainingjobs.yaml"
KUBELORA = Path(sys.executable).with_name("kubelora")


@pytest.fixture(scope="module")
def contract(kubectl: Kubectl) -> Kubectl:
    """kubectl on a cluster that knows the resource."""
    kubectl.define(CRD)
    return kubectl


def verdict(contract: Kubectl, verb: str, document: Document, *flags: str) -> str:
    """What the API server says against ``document``; empty when it takes it."""
    done = contract.attempt(verb, *flags, "-f", "-", stdin=json.dumps(document))
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_the_api_server_refuses_what_validate_refuses(contract: Kubectl, wrong: Wrong) -> None:
    said = verdict(contract, "create", wrong.document(), "--dry-run=server")
    assert wrong.field in said


@pytest.mark.parametrize("name", RIGHT)
def test_the_api_server_takes_what_validate_takes(contract: Kubectl, name: str) -> None:
    assert verdict(contract, "create", RIGHT[name], "--dry-run=server") == ""


@pytest.fixture
def started(contract: Kubectl, namespace: str) -> Kubectl:
    """A namespace with a job that has had an attempt, though no operator runs it."""
    within = contract.within(namespace)
    document = base()
    document["spec"]["suspend"] = True
    assert verdict(within, "apply", document) == ""
    within(
        "patch",
        "ltj",
        "bottles",
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status":{"attempt":1}}',
    )
    return within


def test_changes_of_a_started_job_are_judged_alike(started: Kubectl, tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(started("get", "ltj", "bottles", "-o", "yaml"))
    for change in CHANGES:
        document = change.edit(base())
        said = verdict(started, "apply", document, "--dry-run=server")
        local = validate_change(document, old, tmp_path)
        if change.field is None:
            assert (said, local) == ("", ""), change.name
        else:
            assert f"{change.field}: cannot change" in said, change.name
            assert f"{change.field}: cannot change" in local, change.name


def validate_change(document: Document, old: Path, folder: Path) -> str:
    """What `kubelora validate NEW --against OLD` says; empty when it takes the change."""
    new = folder / "new.json"
    new.write_text(json.dumps(document))
    done = subprocess.run(
        [str(KUBELORA), "validate", str(new), "--against", str(old)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 2), done.stderr
    return "" if done.returncode == 0 else done.stderr


def test_a_status_can_be_written_whatever_the_spec_leaves_out(
    contract: Kubectl, namespace: str
) -> None:
    within = contract.within(namespace)
    for index, name in enumerate(("least", "on a CPU", "a queue, suspended")):
        document = {**RIGHT[name], "metadata": {"name": f"job-{index}"}}
        assert verdict(within, "create", document) == ""
        for attempt in (1, 2):
            within(
                "patch",
                "ltj",
                f"job-{index}",
                "--subresource=status",
                "--type=merge",
                "-p",
                json.dumps({"status": {"attempt": attempt, "state": "Running"}}),
            )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ltj.spec.precision", ["Defaults lose no gradient", "allowLossyPrecision", "enum: bf16"]),
        (
            "ltj.spec.training.steps",
            ["Optimizer steps to train", "Exactly one of steps and epochs"],
        ),
        ("ltj.spec.output.uri", ["pvc://claim/path"]),
        ("ltj.status.conditions", ["NumericallyHealthy"]),
    ],
)
def test_kubectl_explain_reads_well(contract: Kubectl, path: str, said: list[str]) -> None:
    explained = contract("explain", path)
    for words in said:
        assert words in " ".join(explained.split())


def test_every_field_of_the_spec_is_explained_or_named_by_its_type(contract: Kubectl) -> None:
    explained = contract("explain", "ltj.spec", "--recursive")
    for field in ("model", "gradientAccumulation", "securityContext", "queueName", "maxRestarts"):
        assert field in explained


def test_the_columns_are_there(contract: Kubectl, namespace: str) -> None:
    within = contract.within(namespace)
    assert verdict(within, "create", base()) == ""
    header = within("get", "ltj").splitlines()[0].split()
    assert header == ["NAME", "STATE", "STEP", "PROGRESS", "LOSS", "HEALTH", "ETA", "AGE"]

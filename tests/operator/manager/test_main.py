"""The command line, without a cluster."""

import pytest
from click.testing import CliRunner

from kubelora_operator.manager.main import operator_cli


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_has_examples_and_needs_no_cluster(arguments: list[str]) -> None:
    result = CliRunner().invoke(operator_cli, arguments)
    assert result.exit_code == 0
    assert "Examples:" in result.output


def test_contradicting_options_are_a_sentence() -> None:
    result = CliRunner().invoke(operator_cli, ["run", "-A", "-n", "x", "--trainer-image", "t"])
    assert result.exit_code == 2
    assert "either --all-namespaces or --namespace" in result.output


def test_no_cluster_is_a_sentence_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = CliRunner().invoke(
        operator_cli, ["run", "--trainer-image", "t", "--metrics-port", "0"]
    )
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("option", "text", "field"),
    [
        ("--pod-policy", '{"maxScratch": "much"}', "maxScratch"),
        ("--pod-policy", '{"images": "all"}', "images"),
        ("--pod-policy", "images", "the JSON"),
        ("--network-policy", "{}", "operator"),
    ],
)
def test_a_wrong_policy_is_a_sentence_with_its_field(option: str, text: str, field: str) -> None:
    result = CliRunner().invoke(operator_cli, ["run", "--trainer-image", "t", option, text])
    assert result.exit_code == 2
    assert f"{option}: {field}: " in result.output

"""Inhibition rules: of the alerts of one cause, one notifies."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from charts.alert_rules import alerts
from charts.inhibition import inhibition_rules

PAGE = Path(__file__).parents[2] / "docs" / "alertmanager-inhibition.yaml"


def names_in(matchers: list[str]) -> set[str]:
    (named,) = (m for m in matchers if m.startswith("alertname="))
    return set(named.split('"')[1].split("|"))


def notified(firing: set[str]) -> set[str]:
    """The alerts of one job that no other of them mutes, as Alertmanager decides."""
    rules = inhibition_rules()
    muted = {
        target
        for rule in rules
        for target in names_in(rule["target_matchers"]) & firing
        if names_in(rule["source_matchers"]) & firing - {target}
    }
    return firing - muted


@pytest.mark.parametrize(
    ("firing", "first"),
    [
        ({"UpdatesTooLarge", "GradientUnderflow", "LossDiverged"}, "UpdatesTooLarge"),
        ({"GradientImbalance", "RanksDiverged"}, "RanksDiverged"),
        ({"UpdatesLost", "JobSuspended"}, "UpdatesLost"),
        ({"GradientNonFinite", "JobFailed"}, "GradientNonFinite"),
        ({"OperatorAbsent", "JobSilent", "TelemetryMissing"}, "OperatorAbsent"),
        ({"PodNotEnding", "TelemetryMissing"}, "PodNotEnding"),
    ],
)
def test_one_cause_notifies_once(firing: set[str], first: str) -> None:
    assert notified({f"Kubelora{name}" for name in firing}) == {f"Kubelora{first}"}


def test_the_rules_name_alerts_that_exist() -> None:
    named = {
        name
        for rule in inhibition_rules()
        for matchers in (rule["source_matchers"], rule["target_matchers"])
        for name in names_in(matchers)
    }
    assert named <= {alert.name for alert in alerts()}


def test_alertmanager_accepts_the_rules(tmp_path: Path) -> None:
    amtool = shutil.which("amtool")
    if amtool is None:
        pytest.skip("amtool is not on the PATH")
    document = yaml.safe_load(PAGE.read_text())
    route = {"receiver": "none", "group_by": ["cluster", "job_namespace", "name"]}
    path = tmp_path / "alertmanager.yaml"
    path.write_text(yaml.safe_dump({**document, "route": route, "receivers": [{"name": "none"}]}))
    done = subprocess.run([amtool, "check-config", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

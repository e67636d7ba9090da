"""The last word of a pod fits into what the kubelet keeps of it."""

import json

import pytest

from kubelora_api.report import FinalReport
from kubelora_api.status import Artifact, Finding, HealthStatus


@pytest.mark.parametrize("size", [1, 200, 1024, 30_000])
def test_a_termination_message_fits_and_keeps_the_code(size: int) -> None:
    report = FinalReport(
        run_id="r" * 36,
        attempt=3,
        exit_code=2,
        message="é" * size,
        health=HealthStatus(
            verdict="Critical",
            findings=[Finding(name="X", severity="critical", message="m" * 1000)] * 10,
        ),
        artifacts=[Artifact(uri="pvc://a/" + "x" * 500, sha256="0" * 64, bytes=1)] * 8,
    )
    message = report.to_termination_message()
    assert len(message) <= 4096
    told = json.loads(message)
    assert told["exitCode"] == 2
    assert told["attempt"] == 3
    assert told["message"].startswith("é")


def test_a_short_report_is_kept_whole() -> None:
    report = FinalReport(run_id="r", attempt=1, exit_code=0, message="done", loss=0.5)
    assert FinalReport.model_validate_json(report.to_termination_message()) == report


def test_the_finding_that_blames_the_device_is_dropped_last() -> None:
    others = [Finding(name="X", severity="critical", message="m" * 1000)] * 8
    blamed = Finding(name="Y", severity="critical", message="m" * 1000, cause="Hardware")
    report = FinalReport(
        run_id="r",
        attempt=1,
        exit_code=7,
        message="it miscomputes",
        health=HealthStatus(verdict="Critical", findings=[*others, blamed]),
    )
    kept = FinalReport.model_validate_json(report.to_termination_message())
    assert [finding.name for finding in kept.health.findings] == ["Y"]
    assert kept.message == "it miscomputes"

"""The operator's metrics, and its log lines."""

import json
import logging
from typing import Literal

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kubelora_api.metrics import OPERATOR_METRICS
from kubelora_api.status import Condition, Finding, HealthStatus, JobStatus, Progress
from kubelora_operator.observability.job_series import acknowledged
from kubelora_operator.observability.logging import job_log_context, json_formatter
from kubelora_operator.observability.metrics import OperatorMetrics
from tests.operator.world import spec

KEY = ("studio", "bottles")
LABELS = {"job_namespace": "studio", "name": "bottles"}


def condition(kind: str, reason: str, status: Literal["True", "False"] = "True") -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message="",
        last_transition_time="2026-03-01T12:00:00Z",
    )


FOUND = Finding(
    name="UpdatesLost",
    severity="critical",
    group="down.lora_A",
    value=0.96,
    threshold=0.5,
    since_step=8,
    message="",
)
SUSPENDED = JobStatus(
    state="Suspended",
    attempt=2,
    restarts=1,
    conditions=[condition("Suspended", "HealthPolicy")],
    progress=Progress(step=9, total_steps=2000, loss=0.5, last_report_time="2026-03-01T11:59:50Z"),
    health=HealthStatus(verdict="Critical", findings=[FOUND]),
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def operator(registry: CollectorRegistry) -> OperatorMetrics:
    return OperatorMetrics(registry)


@pytest.mark.usefixtures("operator")
def test_every_metric_of_the_contract_is_there_with_its_labels(registry: CollectorRegistry) -> None:
    exported = {f.name for f in registry.collect() if not f.name.endswith("_created")}
    assert exported == {m.name.removesuffix("_total") for m in OPERATOR_METRICS}


def test_a_jobs_series_follow_its_state_and_end_with_it(
    operator: OperatorMetrics, registry: CollectorRegistry
) -> None:
    operator.set_job(KEY, JobStatus(state="Running", progress=Progress(step=3)))
    operator.set_job(("studio", "b"), JobStatus(state="Running"))
    value = registry.get_sample_value
    assert value("kubelora_jobs", {"job_namespace": "studio", "state": "Running"}) == 2
    assert value("kubelora_job_last_step", LABELS) == 3
    operator.set_job(KEY, JobStatus(state="Failed", conditions=[condition("Failed", "X")]))
    assert value("kubelora_jobs", {"job_namespace": "studio", "state": "Running"}) == 1
    assert value("kubelora_job_state", LABELS | {"state": "Failed", "reason": "X"}) == 1
    assert value("kubelora_job_last_step", LABELS) is None
    operator.remove_job(KEY)
    assert b"bottles" not in generate_latest(registry)


def test_what_a_suspended_job_found_is_exported_from_its_status_alone(
    operator: OperatorMetrics, registry: CollectorRegistry
) -> None:
    operator.set_job(KEY, SUSPENDED)
    value = registry.get_sample_value
    finding = {"finding": "UpdatesLost"}
    labels = LABELS | finding | {"severity": "critical", "group": "down.lora_A", "attempt": "2"}
    assert value("kubelora_job_finding", labels) == 0.96
    assert value("kubelora_job_finding_limit", LABELS | finding) == 0.5
    assert value("kubelora_job_finding_since_step", LABELS | finding) == 8
    assert value("kubelora_job_verdict", LABELS | {"verdict": "Critical"}) == 1
    assert value("kubelora_job_last_loss", LABELS) == 0.5
    # 2026-03-01T12:00:00Z is 20,513 days and 12 hours after the epoch.
    assert value("kubelora_job_state_since_timestamp_seconds", LABELS) == 20513 * 86400 + 43200
    assert value("kubelora_job_last_report_timestamp_seconds", LABELS) == 20513 * 86400 + 43190


@pytest.mark.parametrize(
    ("state", "conditions", "reason"),
    [
        ("Pending", [condition("Running", "NodeLost", "False")], "NodeLost"),
        (
            "Suspending",
            [
                condition("Running", "PodTerminating", "False"),
                condition("Suspended", "Suspending", "False"),
            ],
            "PodTerminating",
        ),
        ("Invalid", [condition("Accepted", "InvalidSpec", "False")], "InvalidSpec"),
        ("Accepted", [condition("Accepted", "Valid")], "Valid"),
        (None, [], ""),
    ],
)
def test_a_states_reason_is_that_of_the_condition_behind_it(
    operator: OperatorMetrics,
    registry: CollectorRegistry,
    state: str | None,
    conditions: list[Condition],
    reason: str,
) -> None:
    operator.set_job(KEY, JobStatus(state=state, conditions=conditions))
    labels = LABELS | {"state": state or "Unknown", "reason": reason}
    assert registry.get_sample_value("kubelora_job_state", labels) == 1


def test_the_spec_gives_dtypes_gpus_and_the_interval_of_checkpoints(
    operator: OperatorMetrics, registry: CollectorRegistry
) -> None:
    job = spec(
        precision={"accumulator": "bf16", "allowLossyPrecision": True},
        training={"steps": 100, "gradientAccumulation": 8},
        workers={"nodes": 2, "gpusPerNode": 4},
        checkpoint={"everySteps": 70},
        health={"policy": "Suspend"},
    )
    operator.set_job(KEY, JobStatus(), job)
    value = registry.get_sample_value
    dtypes = {"compute": "bf16", "accumulator": "bf16", "master_weights": "fp32"}
    assert value("kubelora_job_info", LABELS | dtypes | {"policy": "Suspend"}) == 1
    assert value("kubelora_job_gpus", LABELS) == 8
    assert value("kubelora_job_checkpoint_interval_steps", LABELS) == 70


@pytest.mark.parametrize(
    ("annotation", "alerts"),
    [
        (None, []),
        ("UpdatesLost@2", ["KubeloraUpdatesLost"]),
        ("UpdatesLost@1", []),
        ("JobFailed, KubeloraUpdatesLost@2", ["KubeloraJobFailed", "KubeloraUpdatesLost"]),
        ("all, *, UpdatesLost@, @2, updates lost", []),
    ],
)
def test_an_acknowledgement_holds_for_the_attempt_it_names(
    annotation: str | None, alerts: list[str]
) -> None:
    assert acknowledged(annotation, attempt=2) == alerts


def test_an_annotation_makes_a_bounded_number_of_series() -> None:
    many = ",".join("A" + "b" * n for n in range(1, 64)) + "," + "A" * 10_000
    many += "," + ",".join("B" + "c" * n for n in range(1, 64))
    assert len(acknowledged(many, attempt=1)) == 64


def test_a_log_line_is_json_and_names_job_and_attempt() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 1, "said %s", ("it",), None)
    with job_log_context("studio", "bottles", 2):
        line = json.loads(json_formatter().format(record))
    assert (line["namespace"], line["name"], line["attempt"]) == ("studio", "bottles", 2)
    assert (line["message"], line["level"]) == ("said it", "info")
    assert "attempt" not in json.loads(json_formatter().format(record))

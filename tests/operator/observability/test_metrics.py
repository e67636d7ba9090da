"""The operator's metrics, and its log lines."""

import json
import logging

from prometheus_client import CollectorRegistry, generate_latest

from kubelora_api.metrics import OPERATOR_METRICS
from kubelora_api.status import Condition, JobStatus, Progress
from kubelora_operator.observability.logging import job_log_context, json_formatter
from kubelora_operator.observability.metrics import OperatorMetrics

KEY = ("studio", "bottles")


def failed(reason: str) -> Condition:
    return Condition(
        type="Failed",
        status="True",
        reason=reason,
        message="",
        last_transition_time="2026-03-01T12:00:00Z",
    )


def test_every_metric_of_the_contract_is_there_and_no_other() -> None:
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    told = {f.name for f in registry.collect() if not f.name.endswith("_created")}
    assert told == {m.name.removesuffix("_total") for m in OPERATOR_METRICS}


def test_a_jobs_series_follow_its_state_and_go_with_it() -> None:
    registry = CollectorRegistry()
    metrics = OperatorMetrics(registry)
    metrics.set_job(KEY, JobStatus(state="Running", progress=Progress(step=3)))
    metrics.set_job(("studio", "b"), JobStatus(state="Running"))
    value = registry.get_sample_value
    assert value("kubelora_jobs", {"namespace": "studio", "state": "Running"}) == 2
    labels = {"namespace": "studio", "name": "bottles"}
    assert value("kubelora_job_last_step", labels) == 3
    metrics.set_job(
        KEY, JobStatus(state="Failed", conditions=[failed("X")], progress=Progress(step=4))
    )
    assert value("kubelora_jobs", {"namespace": "studio", "state": "Running"}) == 1
    assert value("kubelora_job_failed", labels | {"reason": "X"}) == 1
    metrics.remove_job(KEY)
    assert b"bottles" not in generate_latest(registry)


def test_a_log_line_is_json_and_names_job_and_attempt() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 1, "said %s", ("it",), None)
    with job_log_context("studio", "bottles", 2):
        line = json.loads(json_formatter().format(record))
    assert (line["namespace"], line["name"], line["attempt"]) == ("studio", "bottles", 2)
    assert (line["message"], line["level"]) == ("said it", "info")
    assert "attempt" not in json.loads(json_formatter().format(record))

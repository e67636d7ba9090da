"""Generator of ``docs/findings.md``, the page on all findings."""

from charts.finding_rules import finding_runbook
from charts.runbooks import runbook_lines
from kubelora_api.thresholds import FINDINGS, Event, Threshold

_HEAD = """\
<!-- Generated from kubelora_api.thresholds by `python -m charts.generate`. Do not edit. -->
# What the watchdog finds

Every pod checks its own run: a finding appears in the job's status (`kubectl describe ltj NAME`),
in the metrics `kubelora_health_finding` (while the pod runs) and `kubelora_job_finding` (as long as
the job exists), and in an alert of its name with the prefix `Kubelora`, whose runbook is its
section. [alerts.md](alerts.md) has the other alerts, and how one is acknowledged.
`health.policy` sets what a critical finding does. Values are medians over the last steps of each
group of layers; the first steps, where lora_A has no gradient because lora_B is 0, are ignored.
"""


def findings_page() -> str:
    """Render the page, with a section for each finding."""
    return "\n".join([_HEAD, *(_section(found) for found in FINDINGS)])


def _section(found: Threshold | Event) -> str:
    lines = [f"## {found.finding}", "", found.sentence, "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in _rows(found)]
    return "\n".join([*lines, "", *runbook_lines(finding_runbook(found))])


def _rows(found: Threshold | Event) -> list[tuple[str, str]]:
    rows = [("severity", found.severity)]
    if isinstance(found, Event):
        limit = "" if found.limit is None else f", limit {found.limit:g}"
        return [*rows, ("what is judged", f"{found.quantity}{limit}")]
    metric = f"`{found.metric.name}`"
    quantity = f"{found.quantity} (from {metric})" if found.quantity else metric
    limits = [f"{found.op} {found.limit:g}"]
    if found.limits:
        limits = [f"{found.op} {limit:g} in {compute}" for compute, limit in found.limits.items()]
    steps = "a single step" if found.window == 1 else f"the median of {found.window} steps"
    after = f", from step {found.skip_steps + 1} on" if found.skip_steps else ""
    return [
        *rows,
        ("what is judged", quantity),
        ("wrong where", f"{steps} is {', '.join(limits)}{after}"),
    ]

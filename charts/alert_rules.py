"""The rule groups of the chart: what is recorded, and every alert.

Limits, windows and severities come from the table used by the in-pod watchdog, metric names from
the contract, so an alert cannot diverge from what trainer and operator check and export.
"""

from typing import Any

from charts.finding_rules import finding_alert, records
from charts.job_rules import job_alerts
from charts.operator_rules import operator_alerts
from charts.rule import Alert, Knob
from kubelora_api.thresholds import FINDINGS


def alerts() -> list[Alert]:
    """Build all alerts, those of findings first."""
    return [*(finding_alert(f) for f in FINDINGS), *job_alerts(), *operator_alerts()]


def groups() -> list[dict[str, Any]]:
    """Build all rule groups, as under ``groups`` of a rule file.

    Findings are evaluated as often as pods are scraped, so that every sample counts once in a
    median; recording rules come first, because a group is evaluated in order.
    """
    findings = [a.document() for a in alerts() if a.finding]
    recorded = [r.document() for r in records()]
    return [
        {"name": "kubelora-findings", "interval": str(Knob.INTERVAL), "rules": recorded + findings},
        {"name": "kubelora-jobs", "rules": [a.document() for a in job_alerts()]},
        {"name": "kubelora-operator", "rules": [a.document() for a in operator_alerts()]},
    ]

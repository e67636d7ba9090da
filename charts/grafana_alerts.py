"""The chart's alerts as Grafana-managed ones: provisioning of apiVersion 1, from the same rules.

They read the recording rules, which stay in Prometheus. A query counts what a rule's expression
selects, so that a series whose value is NaN counts like any other; a second one gives the value.
No data means that nothing is wrong; a query that fails is an alert of its own.
"""

import re
from typing import Any

import yaml

from charts.alert_rules import alerts
from charts.rule import Alert, Knob

_HEAD = (
    "# Generated from charts/*_rules.py by `python -m charts.generate`. Do not edit.\n"
    "# $(...) is filled in by templates/grafana.yaml from the chart's values.\n"
)
_WINDOW_SECONDS = 600
"""An instant query reads the end of its range; Grafana asks for one all the same."""


def grafana_alerts() -> str:
    """Render the provisioning file."""
    group = {
        "orgId": 1,
        "name": "kubelora",
        "folder": "KubeLoRA",
        "interval": "1m",
        "rules": [_rule(alert) for alert in alerts()],
    }
    document = {"apiVersion": 1, "groups": [group]}
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=100_000, allow_unicode=True)


def _rule(alert: Alert) -> dict[str, Any]:
    prometheus = alert.document()
    return {
        # Stable, so that an upgrade changes the rule rather than adding another.
        "uid": alert.name.lower(),
        "title": alert.name,
        "condition": "C",
        "data": [
            _query("A", f"count without () (\n{alert.expr}\n)"),
            _query("B", alert.expr),
            _threshold(),
        ],
        "for": alert.hold or "0s",
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {k: _in_grafana(v) for k, v in prometheus["labels"].items()},
        "annotations": {k: _in_grafana(v) for k, v in prometheus["annotations"].items()},
    }


def _query(ref: str, expr: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "relativeTimeRange": {"from": _WINDOW_SECONDS, "to": 0},
        "datasourceUid": str(Knob.DATASOURCE),
        "model": {"refId": ref, "expr": expr, "instant": True, "range": False},
    }


def _threshold() -> dict[str, Any]:
    conditions = [{"evaluator": {"type": "gt", "params": [0]}}]
    model = {"refId": "C", "type": "threshold", "expression": "A", "conditions": conditions}
    return {"refId": "C", "datasourceUid": "__expr__", "model": model}


def _in_grafana(template: str) -> str:
    """Rewrite a template for Grafana, which has no queries in templates and names each value.

    ``$`` is doubled: in a provisioned file a single one begins an environment variable.
    """
    without_queries = re.sub(r"{{ with printf .*?\| query }}.*?\. {{ end }}", "", template)
    named = re.sub(r"\$value\b", "$values.B.Value", without_queries)
    return re.sub(r"\$(?!\()", "$$", named)

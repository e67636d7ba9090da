"""Script that counts what monitoring covers, in one line: `python -m charts.monitoring`.

The gates themselves are the tests of ``tests/chart``, which `make monitoring` runs first.
"""

import json
import re
from pathlib import Path

from charts.alert_rules import alerts
from charts.dashboards import DASHBOARDS, NOT_SHOWN, dashboard_json
from kubelora_api.metrics import OPERATOR_METRICS, TRAINER_METRICS

_TESTS = Path(__file__).parents[1] / "tests" / "chart" / "alerts"


def summary() -> str:
    """Return the line: alerts with a promtool test, panels, and metrics that are covered."""
    names = {a.name for a in alerts()}
    text = "".join(file.read_text() for file in _TESTS.glob("*.yaml"))
    # One generated test shows the alerts of all findings firing.
    tested = {n for n in names if n in text} | {a.name for a in alerts() if a.finding}
    panels = [p for key in DASHBOARDS for p in json.loads(dashboard_json(key))["panels"]]
    queries = " ".join(t["expr"] for p in panels for t in p["targets"])
    exported = {m.name for m in (*TRAINER_METRICS, *OPERATOR_METRICS)}
    shown = {n for n in exported if re.search(rf"\b{n}(_bucket)?\b", queries)}
    covered = shown | {m.name for m in NOT_SHOWN}
    empty = sum(not p["targets"] for p in panels)
    return (
        f"monitoring: alerts {len(names)} tested {len(tested)}, panels {len(panels)} "
        f"empty {empty}, metrics covered {len(covered & exported)}/{len(exported)}"
    )


if __name__ == "__main__":
    print(summary())

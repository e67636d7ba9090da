"""Script that generates files from the contract: the chart's CRD and rules, pages of the docs.

A chart must carry its files inside its own folder, and helm can neither import Python nor follow a
link without a warning. `python -m charts.generate` from the repository's root writes all.
"""

from pathlib import Path

import yaml

from charts.alert_rules import groups
from charts.dashboards import DASHBOARDS, dashboard_json
from charts.findings_page import findings_page
from charts.grafana_alerts import grafana_alerts
from charts.inhibition import inhibition_page
from charts.job_page import job_page
from charts.runbooks import alerts_page
from kubelora_api.crd import custom_resource_definition

FILES = Path(__file__).parent / "kubelora" / "files"
DOCS = Path(__file__).parents[1] / "docs"
CRD_HEADER = "# Generated from crds/kubelora_api by `python -m charts.generate`. Do not edit.\n"
RULES_HEADER = (
    "# Generated from kubelora_api.thresholds and kubelora_api.metrics by "
    "`python -m charts.generate`. Do not edit.\n"
    "# $(...) is filled in by templates/rules.yaml from the chart's values.\n"
)


class _BlockDumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings, such as expressions, as blocks."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_BlockDumper.add_representer(str, _string)


def rendered() -> dict[Path, str]:
    """Render each generated file."""
    rules = {"groups": groups()}
    return {
        FILES / "crd.yaml": CRD_HEADER
        + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=100),
        FILES / "rules.yaml": RULES_HEADER
        + yaml.dump(rules, Dumper=_BlockDumper, sort_keys=False, width=10_000, allow_unicode=True),
        FILES / "grafana-alerts.yaml": grafana_alerts(),
        **{FILES / f"dashboard-{key}.json": dashboard_json(key) for key in DASHBOARDS},
        DOCS / "findings.md": findings_page(),
        DOCS / "alerts.md": alerts_page(),
        DOCS / "alertmanager-inhibition.yaml": inhibition_page(),
        DOCS / "job-reference.md": job_page(),
    }


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(f"wrote {path}")

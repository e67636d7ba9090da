"""Dashboards and Grafana's alerts: each expression parses and reads what is exported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.dashboards import DASHBOARDS, NOT_SHOWN, dashboard_json, limit_of
from kubelora_api import metrics
from kubelora_api.metrics import Metric
from tests.chart import programs
from tests.chart.rendering import MONITORING, Helm, Object, of_kind, one

EXPORTED = {m.name: m for m in (*metrics.TRAINER_METRICS, *metrics.OPERATOR_METRICS)}
TARGET_LABELS = {"cluster", "namespace", "pod", "release", "job_namespace", "name", "attempt"}
"""Labels that scraping adds to what a program exports."""
GRAFANA = {
    "monitoring": {
        **MONITORING["monitoring"],
        "grafana": {"alerts": {"enabled": True}, "dashboards": {"enabled": True}},
    }
}


def panels(key: str) -> list[Any]:
    return list(json.loads(dashboard_json(key))["panels"])


def expressions(key: str) -> list[str]:
    return [t["expr"] for p in panels(key) for t in p["targets"]]


def metric_of(name: str) -> Metric:
    family = re.sub("_(bucket|sum|count)$", "", name)
    return EXPORTED[name] if name in EXPORTED else EXPORTED[family]


def rule_file_of(expressions: list[str], path: Path) -> Path:
    """A rule file that records each expression: the simplest document that promtool parses."""
    rules = [{"record": f"parsed:{n}", "expr": e} for n, e in enumerate(expressions)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "parsed", "rules": rules}]}))
    return path


def test_promtool_parses_every_expression_of_every_dashboard(
    promtools: list[Path], tmp_path: Path
) -> None:
    found = [e.replace("$__rate_interval", "5m") for key in DASHBOARDS for e in expressions(key)]
    assert len(found) > 50
    for promtool in promtools:
        programs.run(promtool, "check", "rules", rule_file_of(found, tmp_path / "parsed.yaml"))


@pytest.mark.parametrize("key", DASHBOARDS)
def test_a_dashboard_reads_exported_metrics_by_labels_that_they_have(key: str) -> None:
    for expression in expressions(key):
        names = set(re.findall(r"\bkubelora_\w+", expression))
        known = {label for n in names for label in metric_of(n).labels} | TARGET_LABELS | {"le"}
        used = set(re.findall(r"(\w+)=~?\"", expression))
        for grouping in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
            used |= {label.strip() for label in grouping.split(",")}
        assert used <= known, expression


def test_every_exported_metric_is_on_a_panel_or_listed_with_a_reason() -> None:
    shown = {
        metric_of(n).name
        for key in DASHBOARDS
        for e in expressions(key)
        for n in re.findall(r"\bkubelora_\w+", e)
    }
    left_out = {m.name: reason for m, reason in NOT_SHOWN.items()}
    assert shown | set(left_out) == set(EXPORTED)
    assert not shown & set(left_out)
    assert all(len(reason) > 10 for reason in left_out.values())


@pytest.mark.parametrize("key", DASHBOARDS)
def test_every_panel_has_title_unit_description_and_the_dashboards_datasource(key: str) -> None:
    document = json.loads(dashboard_json(key))
    assert document["uid"] == f"kubelora-{key}"
    titles = [p["title"] for p in document["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in document["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len(panel["description"]) > 15
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(t["legendFormat"] and t["expr"] for t in panel["targets"])


def test_a_limit_of_the_table_is_a_line_on_its_panel() -> None:
    (lost,) = (p for p in panels("run") if p["title"] == "Lost updates")
    steps = lost["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [(s["value"], s["color"]) for s in steps] == [(None, "green"), (0.5, "red")]
    assert limit_of(metrics.LOSS) is None  # its limit is on the ratio to the first steps


def test_variables_choose_cluster_namespace_and_job() -> None:
    variables = json.loads(dashboard_json("run"))["templating"]["list"]
    assert [v["name"] for v in variables] == ["datasource", "cluster", "namespace", "job"]


def provisioned(helm: Helm) -> tuple[list[Object], list[Any]]:
    objects = helm.render(GRAFANA)
    text = one(objects, "ConfigMap", "studio-kubelora-grafana-alerts")["data"][
        "kubelora-alerts.yaml"
    ]
    document = yaml.safe_load(text)
    assert document["apiVersion"] == 1
    return objects, [r for g in document["groups"] for r in g["rules"]]


def test_grafana_has_the_same_alerts_and_prometheus_then_none(helm: Helm) -> None:
    alerts = {
        r["alert"]: r
        for g in one(helm.render(MONITORING), "PrometheusRule")["spec"]["groups"]
        for r in g["rules"]
        if "alert" in r
    }
    objects, rules = provisioned(helm)

    assert {r["title"]: r["data"][1]["model"]["expr"] for r in rules} == {
        name: alert["expr"] for name, alert in alerts.items()
    }
    assert {r["title"]: r["for"] for r in rules} == {
        n: a.get("for", "0s") for n, a in alerts.items()
    }
    uids = [r["uid"] for r in rules]
    assert len(set(uids)) == len(uids)
    assert all(len(uid) <= 40 for uid in uids)  # Grafana's limit
    left = [r for g in one(objects, "PrometheusRule")["spec"]["groups"] for r in g["rules"]]
    assert left
    assert all("record" in r for r in left)


def test_grafanas_alerts_parse_and_no_template_is_left_that_grafana_lacks(
    helm: Helm, promtools: list[Path], tmp_path: Path
) -> None:
    _, rules = provisioned(helm)
    found = [q["model"]["expr"] for r in rules for q in r["data"][:2]]
    for promtool in promtools:
        programs.run(promtool, "check", "rules", rule_file_of(found, tmp_path / "parsed.yaml"))
    for rule in rules:
        text = yaml.safe_dump([rule["annotations"], rule["labels"]])
        assert "query" not in text
        assert "$(" not in text
        assert not re.search(r"(?<!\$)\$(?!\$)", text), "an environment variable for Grafana"


def test_dashboards_are_config_maps_that_the_sidecar_finds(helm: Helm) -> None:
    maps = [
        o
        for o in of_kind(helm.render(GRAFANA), "ConfigMap")
        if "dashboard" in o["metadata"]["name"]
    ]
    assert len(maps) == len(DASHBOARDS)
    for config_map in maps:
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((_, text),) = config_map["data"].items()
        assert json.loads(text)["uid"].startswith("kubelora-")


def test_grafanas_alerts_without_recording_rules_are_refused(helm: Helm) -> None:
    done = helm.template({"monitoring": {"grafana": {"alerts": {"enabled": True}}}})
    assert done.returncode != 0
    assert "needs monitoring.rules.enabled=true" in done.stderr

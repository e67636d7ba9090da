"""What Prometheus scrapes, and that its rules are those of the contract."""

import re
from pathlib import Path

import pytest
import yaml

from charts.rule import JOB
from kubelora_api import metrics, names
from kubelora_api.thresholds import FINDINGS, Threshold
from tests.chart import programs
from tests.chart.rendering import (
    CHART,
    FULLNAME,
    MONITORING,
    NAMESPACE,
    NAMESPACED,
    RELEASE,
    Helm,
    Object,
    Values,
    of_kind,
    one,
)

LEADS = f'{metrics.OPERATOR_IS_LEADER.name}{{namespace="{NAMESPACE}",release="{RELEASE}"}}'
ALERT_TESTS = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))


def rules_of(objects: list[Object]) -> list[Object]:
    return [r for g in one(objects, "PrometheusRule")["spec"]["groups"] for r in g["rules"]]


def alerts_of(objects: list[Object]) -> dict[str, Object]:
    return {r["alert"]: r for r in rules_of(objects) if "alert" in r}


def with_rules(**rules: object) -> Values:
    return {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True, **rules}}}


def with_runbooks(base: str) -> Values:
    return with_rules(runbookUrlBase=base)


def test_nothing_needs_the_prometheus_operator_unless_asked_for(helm: Helm) -> None:
    assert not [o for o in helm.render({}) if "monitoring.coreos.com" in o["apiVersion"]]


def test_training_pods_are_found_by_the_contracts_names_and_told_by_namespace_and_name(
    helm: Helm,
) -> None:
    spec = one(helm.render(MONITORING), "PodMonitor", f"{FULLNAME}-training")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]

    assert spec["selector"]["matchLabels"] == {names.LABEL_NAME: names.TRAINER_APP}
    assert spec["namespaceSelector"] == {"any": True}
    assert endpoint["port"] == names.METRICS_PORT_NAME
    discovered = "__meta_kubernetes_pod_label_"
    assert {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]} == {
        "job_namespace": ["__meta_kubernetes_namespace"],
        "name": [discovered + re.sub(r"\W", "_", names.LABEL_JOB)],
        "attempt": [discovered + re.sub(r"\W", "_", names.LABEL_ATTEMPT)],
    }


def test_only_served_namespaces_are_scraped(helm: Helm) -> None:
    spec = one(helm.render(NAMESPACED), "PodMonitor", f"{FULLNAME}-training")["spec"]

    assert spec["namespaceSelector"] == {"matchNames": ["lab", "studio"]}


def test_the_operators_series_keep_the_namespace_of_the_job_they_tell_of(helm: Helm) -> None:
    objects = helm.render(MONITORING)
    spec = one(objects, "PodMonitor", f"{FULLNAME}-operator")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    pod = one(objects, "Deployment")["spec"]["template"]

    assert "honorLabels" not in endpoint  # a Prometheus may ignore it
    assert {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]} == {
        "release": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]
    }
    assert not [m for m in metrics.OPERATOR_METRICS if "namespace" in m.labels]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert endpoint["port"] in [p["name"] for p in pod["spec"]["containers"][0]["ports"]]


def test_monitors_and_rules_carry_the_labels_that_a_prometheus_selects_by(helm: Helm) -> None:
    labels = {"release": "kube-prometheus-stack"}
    objects = helm.render(
        {
            "monitoring": {
                "podMonitor": {"enabled": True, "labels": labels},
                "rules": {"enabled": True, "labels": labels},
            }
        }
    )

    for o in [*of_kind(objects, "PodMonitor"), *of_kind(objects, "PrometheusRule")]:
        assert labels.items() <= o["metadata"]["labels"].items()


def test_every_finding_of_the_table_has_an_alert_of_its_name_and_limit(helm: Helm) -> None:
    objects = helm.render(MONITORING)
    alerts = alerts_of(objects)
    judged = {
        r["labels"]["finding"]: r
        for r in rules_of(objects)
        if "judged" in r.get("record", "") and "labels" in r
    }

    for found in FINDINGS:
        alert = alerts[f"Kubelora{found.finding}"]
        assert found.sentence in alert["annotations"]["description"]
        assert f'finding="{found.finding}"' in alert["expr"]
        if not (isinstance(found, Threshold) and found.in_prometheus):
            continue
        assert judged[found.finding]["labels"]["severity"] == found.severity
        if found.metric.type != "counter":
            assert f" {found.op} {found.limit:g}" in judged[found.finding]["expr"]


def test_rules_read_no_metric_that_nobody_exports(helm: Helm) -> None:
    rules = rules_of(helm.render(MONITORING))
    exported = {m.name for m in (*metrics.TRAINER_METRICS, *metrics.OPERATOR_METRICS)}
    recorded = {r["record"] for r in rules if "record" in r}

    read = {word for r in rules for word in re.findall(r"\bkubelora[\w:]+", r["expr"])}
    assert read - recorded <= exported
    assert recorded <= read


def test_every_alert_says_what_to_do_with_a_command(helm: Helm) -> None:
    for alert in alerts_of(helm.render(MONITORING)).values():
        assert alert["labels"].get("severity") in (None, "info", "warning", "critical")
        assert "kubectl " in alert["annotations"]["description"]
        summary = alert["annotations"]["summary"]
        filled = summary.replace(JOB, "product-photography/summer-bottles-07")
        assert 10 < len(re.sub("{{.*?}}", "ImagePullFailed", filled)) < 100, summary


def test_every_alert_has_a_section_in_the_docs_and_every_section_an_alert(helm: Helm) -> None:
    docs = Path(__file__).parents[2] / "docs"

    def sections(page: str) -> set[str]:
        return set(re.findall(r"^## (\w+)$", (docs / page).read_text(), re.MULTILINE))

    told = {f"Kubelora{name}" for name in sections("findings.md")} | sections("alerts.md")
    assert told == set(alerts_of(helm.render(MONITORING)))


@pytest.mark.parametrize("page", ["alerts.md", "findings.md"])
def test_every_runbook_has_meaning_impact_diagnosis_and_mitigation_with_commands(page: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    sections = re.split(r"^## (?=[A-Z]\w+$)", (docs / page).read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) > 15
    for section in sections:
        parts = re.split(r"^\*\*(Meaning|Impact|Diagnosis|Mitigation)\.\*\*", section, flags=re.M)
        assert parts[1::2] == ["Meaning", "Impact", "Diagnosis", "Mitigation"], section[:40]
        meaning, impact, diagnosis, mitigation = parts[2::2]
        assert min(len(meaning), len(impact)) > 20, section[:40]
        for commands in (diagnosis, mitigation):
            assert re.search(r"^(kubectl|helm) ", commands, re.MULTILINE), section[:40]


def test_alerts_link_runbooks_of_the_charts_version_and_dashboards(helm: Helm) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for alert in alerts_of(helm.render(MONITORING)).values():
        link = alert["annotations"]["runbook_url"]
        assert link.startswith(f"https://kubelora.dev/docs/v{version}/")
        assert alert["annotations"]["dashboard_url"].startswith("/d/kubelora-")


def test_no_alert_links_a_runbook_where_the_base_is_empty(helm: Helm) -> None:
    for alert in alerts_of(helm.render(with_runbooks(""))).values():
        assert "runbook_url" not in alert["annotations"]


@pytest.mark.parametrize("base", ["https://git.example/docs", "https://git.example/docs/"])
def test_every_alert_links_a_section_that_is_there(helm: Helm, base: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    alerts = alerts_of(helm.render(with_runbooks(base)))

    links = {name: alert["annotations"]["runbook_url"] for name, alert in alerts.items()}
    assert len(set(links.values())) == len(links) > len(FINDINGS)
    for name, link in links.items():
        page, _, anchor = link.removeprefix("https://git.example/docs/").partition("#")
        heading = re.findall(r"^#+ (.+)$", (docs / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heading}
        assert name.lower().endswith(anchor)


def test_promtool_accepts_the_rules_with_runbooks(
    helm: Helm, promtools: list[Path], tmp_path: Path
) -> None:
    rules = one(helm.render(with_runbooks("https://git.example/docs")), "PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    for promtool in promtools:
        programs.run(promtool, "check", "rules", tmp_path / "rules.yaml")


def test_times_follow_the_values_and_no_placeholder_is_left(helm: Helm) -> None:
    objects = helm.render(
        {
            "monitoring": {
                "podMonitor": {"enabled": True, "interval": "1s"},
                "rules": {
                    "enabled": True,
                    "window": "20s",
                    "for": "3s",
                    "stalledAfterSeconds": 77,
                    "operatorAbsentFor": "4s",
                    "unseenFor": "5s",
                },
            }
        }
    )
    alerts = alerts_of(objects)
    group = one(objects, "PrometheusRule")["spec"]["groups"][0]

    assert "$(" not in yaml.safe_dump(one(objects, "PrometheusRule"))
    assert group["interval"] == "1s"
    judged = "".join(r["expr"] for r in rules_of(objects) if "judged" in r.get("record", ""))
    assert "[20s] offset 3s" in judged
    assert alerts["KubeloraUpdatesLost"]["keep_firing_for"] == "5m"
    assert "offset 77s" in alerts["KubeloraTrainingStalled"]["expr"]
    assert alerts["KubeloraOperatorAbsent"]["for"] == "4s"
    assert alerts["KubeloraOperatorAbsent"]["labels"]["namespace"] == NAMESPACE
    assert alerts["KubeloraTelemetryMissing"]["for"] == "5s"


def test_one_non_finite_gradient_is_enough_whatever_the_hold_time(helm: Helm) -> None:
    assert "for" not in alerts_of(helm.render(MONITORING))["KubeloraGradientNonFinite"]


def test_alerts_take_labels_for_routing_and_can_be_left_out(helm: Helm) -> None:
    objects = helm.render(
        with_rules(alertLabels={"team": "studio"}, disabled=["KubeloraJobFailed"])
    )
    alerts = alerts_of(objects)

    assert {a["labels"]["team"] for a in alerts.values()} == {"studio"}
    assert "KubeloraJobFailed" not in alerts
    assert "KubeloraTrainingStalled" in alerts


def test_an_alert_that_is_left_out_by_a_wrong_name_is_refused_with_the_names_that_there_are(
    helm: Helm,
) -> None:
    done = helm.template(with_rules(disabled=["KubeloraJobFailed", "KubeloraUpdateLost"]))

    assert done.returncode != 0
    assert "monitoring.rules.disabled: no alert is called KubeloraUpdateLost" in done.stderr
    assert all(alert in done.stderr for alert in alerts_of(helm.render(MONITORING)))


def test_a_single_alert_takes_another_severity(helm: Helm) -> None:
    severities = {"KubeloraJobFailed": "critical", "KubeloraStepSpiked": "info"}
    alerts = alerts_of(helm.render(with_rules(severities=severities)))

    assert {n: alerts[n]["labels"]["severity"] for n in severities} == severities
    assert "severity" not in alerts["KubeloraUpdatesLost"]["labels"]


@pytest.mark.parametrize(
    ("monitoring", "sentence"),
    [
        ({"podMonitor": {"enabled": False}}, "set monitoring.rules.scrapedElsewhere=true"),
        ({"podMonitor": {"enabled": True, "interval": "0s"}}, "set 1s to 2m"),
        ({"podMonitor": {"enabled": True, "interval": "5m"}}, "set 1s to 2m"),
        (
            {"rules": {"window": "1m"}},
            "set at least six times monitoring.podMonitor",
        ),
        ({"rules": {"stalledAfterSeconds": 59}}, "set at least four times"),
        ({"rules": {"alertLabels": {"severity": "x"}}}, "monitoring.rules.severities"),
        ({"rules": {"severities": {"KubeloraJobFail": "info"}}}, "no alert is called"),
    ],
)
def test_values_with_which_no_rule_could_work_are_refused_with_what_to_set(
    helm: Helm, monitoring: dict[str, dict[str, object]], sentence: str
) -> None:
    given = {
        part: {"enabled": True, **monitoring.get(part, {})} for part in ("podMonitor", "rules")
    }
    done = helm.template({"monitoring": given})

    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_prometheus_with_a_configuration_of_its_own_can_have_the_rules(helm: Helm) -> None:
    rules = {"enabled": True, "scrapedElsewhere": True, "window": "90s"}
    assert alerts_of(helm.render({"monitoring": {"rules": rules}}))


def test_promtool_accepts_the_rules(rule_file: Path, promtools: list[Path]) -> None:
    for promtool in promtools:
        programs.run(promtool, "check", "rules", rule_file)


@pytest.mark.parametrize("file", ALERT_TESTS, ids=lambda f: f.stem)
def test_alerts_fire_and_stay_silent_as_told_in(
    file: Path, rule_file: Path, promtools: list[Path]
) -> None:
    copy = rule_file.parent / file.name
    copy.write_text(file.read_text())

    for promtool in promtools:
        programs.run(promtool, "test", "rules", file.name, folder=rule_file.parent)


JOB_OF_ALERT = 'name="bottles",job_namespace="studio",namespace="studio"'


def reported_by_the_watchdog() -> Object:
    """Return promtool's test of their alerts: one job shows each from 1:45 on, another none."""
    pod = 'job_namespace="studio",name="{name}",pod="p"'
    job = f"{metrics.HEALTH_FINDING.name}{{{{{pod},{{labels}}}}}}"
    series, firing = [{"series": LEADS, "values": "1x80"}], []
    for found in FINDINGS:
        labels = f'finding="{found.finding}",severity="{found.severity}"'
        for name, values in (("bottles", "0x7 1x70"), ("cans", "0x80")):
            series.append({"series": job.format(name=name, labels=labels), "values": values})
        alert = f'alertname="Kubelora{found.finding}",alertstate="firing",{labels}'
        firing.append({"labels": f"ALERTS{{{alert},{JOB_OF_ALERT}}}", "value": 1})
    fired = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "2m", "exp_samples": firing}
    test = {
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [
            {"expr": "ALERTS", "eval_time": "1m45s", "exp_samples": []},
            fired,
        ],
    }
    return {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [test]}


def test_what_the_watchdog_finds_is_alerted_at_once_for_the_job_alone_that_shows_it(
    rule_file: Path, promtools: list[Path]
) -> None:
    file = rule_file.parent / "reported_by_the_watchdog.yaml"
    file.write_text(yaml.safe_dump(reported_by_the_watchdog()))
    for promtool in promtools:
        programs.run(promtool, "test", "rules", file.name, folder=rule_file.parent)


def test_every_alert_is_shown_firing_and_silent(helm: Helm) -> None:
    told = "".join(f.read_text() for f in ALERT_TESTS)
    defined = set(alerts_of(helm.render(MONITORING)))
    shown = set(re.findall(r'alertname="(\w+)",alertstate="firing"', told))

    assert shown | {f"Kubelora{f.finding}" for f in FINDINGS} == defined


def test_the_generated_rules_are_no_templates_of_helm() -> None:
    text = (CHART / "files" / "rules.yaml").read_text()

    words = set(re.findall(r"{{ *(\S+)", text))
    assert {w for w in words if not w.startswith("$")} == {"with", "end", "."}


def test_a_training_pod_has_a_limited_number_of_samples_unless_turned_off(helm: Helm) -> None:
    limited = one(helm.render(MONITORING), "PodMonitor", f"{FULLNAME}-training")["spec"]
    assert limited["sampleLimit"] == 1000
    off = {"monitoring": {"podMonitor": {"enabled": True, "sampleLimit": 0}}}
    assert "sampleLimit" not in one(helm.render(off), "PodMonitor", f"{FULLNAME}-training")["spec"]

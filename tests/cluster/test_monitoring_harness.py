"""From PodMonitor and PrometheusRule objects to an alert at a webhook, by the real programs."""

from __future__ import annotations

import pytest

from .harness.errors import HarnessError
from .harness.kubectl import JsonObject, Kubectl
from .harness.monitoring import Monitoring
from .harness.scrape_config import scrape_configs
from .test_harness import shell_pod

EXPORTER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/telemetry"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b"harness_depth VALUE\\n" if found else b"")
    def log_message(self, *arguments): pass
http.server.ThreadingHTTPServer(("", 9464), Handler).serve_forever()
"""


def exporter(name: str, image: str, value: float, labels: dict[str, str]) -> JsonObject:
    """A pod that exports `harness_depth` on a port called `metrics`."""
    pod = shell_pod(name, image, EXPORTER.replace("VALUE", str(value)))
    pod["metadata"] = {"name": name, "labels": dict(labels)}
    spec = pod["spec"]
    assert isinstance(spec, dict)
    containers = spec["containers"]
    assert isinstance(containers, list)
    container = containers[0]
    assert isinstance(container, dict)
    container["ports"] = [{"name": "metrics", "containerPort": 9464}]
    return pod


def pod_monitor(**endpoint: str) -> JsonObject:
    """A PodMonitor that selects `app: exporter` of a tier that is not `hidden`."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "exporters"},
        "spec": {
            "selector": {
                "matchLabels": {"app": "exporter"},
                "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["hidden"]}],
            },
            "podMetricsEndpoints": [
                {
                    "port": "metrics",
                    "path": "/telemetry",
                    "interval": "1s",
                    "scrapeTimeout": "1s",
                    "relabelings": [
                        {
                            "sourceLabels": ["__meta_kubernetes_pod_label_example_com_run"],
                            "targetLabel": "run",
                        }
                    ],
                    **endpoint,
                }
            ],
        },
    }


RULE: JsonObject = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PrometheusRule",
    "metadata": {"name": "depths"},
    "spec": {
        "groups": [
            {
                "name": "depths",
                "interval": "1s",
                "rules": [
                    {
                        "alert": "TooDeep",
                        "expr": "harness_depth > 10",
                        "for": "2s",
                        "labels": {"severity": "warning"},
                        "annotations": {"summary": "{{ $labels.pod }} is at {{ $value }}."},
                    }
                ],
            }
        ]
    },
}


def test_an_alert_of_a_scraped_pod_reaches_the_webhook(
    kubectl: Kubectl, namespace: str, shell_image: str, monitored: Monitoring
) -> None:
    here = kubectl.within(namespace)
    app = {"app": "exporter"}
    here.apply(
        exporter("deep", shell_image, 12, {**app, "example.com/run": "seven"}),
        exporter("shallow", shell_image, 3, app),
        exporter("unselected", shell_image, 99, {"app": "other"}),
        exporter("excluded", shell_image, 99, {**app, "tier": "hidden"}),
    )
    here.wait_for("condition=Ready", "pod", "--all", seconds=180)
    here.apply(pod_monitor(), RULE)
    monitored.prometheus.reload()

    alert = monitored.receiver.wait_for("TooDeep", 180)
    assert alert.labels["pod"] == "deep"
    assert alert.labels["namespace"] == namespace
    assert alert.labels["run"] == "seven"
    assert alert.labels["job"] == f"{namespace}/exporters"
    assert alert.labels["container"] == "main"
    assert alert.labels["severity"] == "warning"
    assert alert.annotations["summary"] == "deep is at 12."

    scraped = monitored.prometheus.wait_for('harness_depth{pod="shallow"}', 90)
    assert [sample.value for sample in scraped] == [3.0]
    everything = monitored.prometheus.query(f'harness_depth{{namespace="{namespace}"}}')
    assert {sample.labels["pod"] for sample in everything} == {"deep", "shallow"}
    assert {a.labels["pod"] for a in monitored.receiver.alerts} == {"deep"}


def test_a_pod_monitor_sees_only_its_own_namespace_unless_told() -> None:
    monitor = pod_monitor()
    monitor["metadata"] = {"name": "exporters", "namespace": "studio"}
    discovery: JsonObject = {"role": "pod", "kubeconfig_file": "/kubeconfig"}
    (config,) = scrape_configs(monitor, "/kubeconfig")
    assert config["kubernetes_sd_configs"] == [discovery | {"namespaces": {"names": ["studio"]}}]
    spec = monitor["spec"]
    assert isinstance(spec, dict)
    spec["namespaceSelector"] = {"any": True}
    (config,) = scrape_configs(monitor, "/kubeconfig")
    assert config["kubernetes_sd_configs"] == [discovery]


def test_a_field_that_is_not_translated_is_refused() -> None:
    monitor = pod_monitor(basicAuth="")
    monitor["metadata"] = {"name": "exporters", "namespace": "studio"}
    with pytest.raises(HarnessError, match="PodMonitor exporters uses basicAuth"):
        scrape_configs(monitor, "/kubeconfig")

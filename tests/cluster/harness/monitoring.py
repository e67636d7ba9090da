"""A real Prometheus and a real Alertmanager beside the cluster, configured from its own objects.

Both run as processes of this machine: they reach pods by the pods' addresses, and need no image.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import gobuild, machine, processes
from .errors import HarnessError, tail
from .kubectl import JsonObject, Kubectl
from .places import Places
from .probes import answers, wait_until
from .scrape_config import rule_groups, scrape_configs
from .webhook import Receiver, receive_alerts

_ALERTMANAGER = machine.MONITORING_PACKAGES["prometheus-alertmanager"]


@dataclass(frozen=True)
class Sample:
    """One series of an instant query's result."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus and the folder of its configuration."""

    url: str
    folder: Path
    kubectl: Kubectl
    promtool: Path
    alertmanager: str
    evaluation_interval: str

    def reload(self) -> None:
        """Read PodMonitors and PrometheusRules from the cluster again and apply them."""
        self.write_configuration()
        _fetch(f"{self.url}/-/reload", method="POST")

    def query(self, expression: str) -> list[Sample]:
        """An instant query."""
        parameters = urllib.parse.urlencode({"query": expression})
        data = self._api(f"query?{parameters}")
        result = data["result"]
        assert isinstance(result, list)
        samples = []
        for row in result:
            assert isinstance(row, dict)
            labels, value = row["metric"], row["value"]
            assert isinstance(labels, dict)
            assert isinstance(value, list)
            samples.append(Sample({k: str(v) for k, v in labels.items()}, float(str(value[1]))))
        return samples

    def wait_for(self, expression: str, seconds: float) -> list[Sample]:
        """Query until there is a result; raises TimeoutError with the targets' errors."""
        if not wait_until(lambda: bool(self.query(expression)), seconds, pause=0.5):
            raise TimeoutError(
                f"`{expression}` had no result in {seconds:g} s; targets: {self.targets()}"
            )
        return self.query(expression)

    def targets(self) -> list[str]:
        """Address, health and last error of each active target."""
        active = self._api("targets?state=active")["activeTargets"]
        assert isinstance(active, list)
        lines = []
        for target in active:
            assert isinstance(target, dict)
            lines.append(f"{target['scrapeUrl']} {target['health']} {target['lastError']}".strip())
        return lines

    def _api(self, path: str) -> JsonObject:
        parsed: JsonObject = json.loads(_fetch(f"{self.url}/api/v1/{path}"))["data"]
        return parsed

    def write_configuration(self) -> None:
        """Derive the configuration from the cluster's objects and have promtool check it."""
        monitors = self.kubectl.items("podmonitors.monitoring.coreos.com", "--all-namespaces")
        rules = self.kubectl.items("prometheusrules.monitoring.coreos.com", "--all-namespaces")
        kubeconfig = str(self.kubectl.kubeconfig)
        configuration = {
            "global": {"evaluation_interval": self.evaluation_interval, "scrape_interval": "15s"},
            "rule_files": [str(self.folder / "rules.json")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alertmanager]}]}]},
            "scrape_configs": [
                config for monitor in monitors for config in scrape_configs(monitor, kubeconfig)
            ],
        }
        (self.folder / "rules.json").write_text(json.dumps(rule_groups(rules), indent=2))
        path = self.folder / "prometheus.json"
        path.write_text(json.dumps(configuration, indent=2))
        done = subprocess.run(
            [str(self.promtool), "check", "config", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise HarnessError(
                f"promtool refuses what was derived from the cluster's objects, {path}:\n"
                f"{done.stdout}{done.stderr}"
            )


@dataclass(frozen=True)
class Monitoring:
    """Prometheus, and the alerts that came out at the far end of Alertmanager."""

    prometheus: Prometheus
    receiver: Receiver


def install_crds(places: Places, kubectl: Kubectl) -> None:
    """The kinds PodMonitor and PrometheusRule, as the Prometheus operator defines them."""
    folder = gobuild.tool(places, "monitoring-crds")
    kubectl.define(folder)


@contextlib.contextmanager
def monitor(
    places: Places, kubectl: Kubectl, folder: Path, evaluation_interval: str = "5s"
) -> Iterator[Monitoring]:
    """Run Prometheus and Alertmanager on the cluster's objects as they are now.

    `folder` receives data, logs and the derived configuration. After installing a chart, call
    `prometheus.reload()`, as the Prometheus operator would.
    """
    machine.install(machine.MONITORING_PACKAGES)
    program = gobuild.tool(places, "prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    install_crds(places, kubectl)
    with receive_alerts() as receiver, _alertmanager(folder, receiver.url) as alertmanager:
        address = f"127.0.0.1:{_free_port()}"
        prometheus = Prometheus(
            url=f"http://{address}",
            folder=folder,
            kubectl=kubectl,
            promtool=program.with_name("promtool"),
            alertmanager=alertmanager,
            evaluation_interval=evaluation_interval,
        )
        prometheus.write_configuration()
        options = (
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'prometheus-data'}",
            f"--web.listen-address={address}",
            "--web.enable-lifecycle",
        )
        with _running("prometheus", folder, (str(program), *options), prometheus.url):
            yield Monitoring(prometheus, receiver)


@contextlib.contextmanager
def _alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """Send every alert on at once; yields the address that Prometheus posts to."""
    configuration = {
        "route": {
            "receiver": "webhook",
            "group_by": ["..."],  # each alert by itself, so that none waits for another
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        },
        "receivers": [
            {"name": "webhook", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
        ],
    }
    path = folder / "alertmanager.json"
    path.write_text(json.dumps(configuration, indent=2))
    address = f"127.0.0.1:{_free_port()}"
    command = (
        _ALERTMANAGER,
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # alone: no gossip, no second port
    )
    with _running("alertmanager", folder, command, f"http://{address}"):
        yield address


@contextlib.contextmanager
def _running(name: str, folder: Path, command: tuple[str, ...], url: str) -> Iterator[None]:
    log = folder / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if not wait_until(lambda: answers(f"{url}/-/ready"), 180):
            raise HarnessError(f"{name} was not ready after 180 s; the end of {log}:\n{tail(log)}")
        yield
    finally:
        processes.terminate_group(process.pid, grace=10.0)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fetch(url: str, method: str = "GET") -> bytes:
    """The body of an answer from the loopback, past any proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, method=method), timeout=30) as answer:
        return bytes(answer.read())

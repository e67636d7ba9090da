"""The metrics port: what it serves, and how long a finished run waits for Prometheus."""

import gzip
import http.client
import json
import math
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kubelora_api import metrics
from kubelora_api.report import ModuleNumbers, RunReport
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.reporting.http_server import PROMETHEUS_HEADER, Exporter
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.telemetry.step_metrics import CategoryLoss, GroupNumbers, StepNumbers

REPORT = RunReport(run_id="abc", attempt=2, phase="Training", step=3, total_steps=9)
GROUP = GroupNumbers(
    *(1.5, 0.5, 0.25, 2, 0.125, 0.0625, math.nan),
    accumulation_error_ratio=0.004,
    update_scale=0.3,
    optimizer_stuck_ratio=0.01,
    adam_eps_damping_ratio=0.9,
    lora_balance=0.002,
)
NUMBERS = StepNumbers(
    *(3, 1e-4, 0.75, 8, 1.5, {"down.lora_A": GROUP}, [1.5], [0.5]),
    clipped_norm=1.0,
    backward_passes=7.0,
    micro_steps=8,
    dead_modules=5,
    rank_divergence=0.0,
    host_memory_peak=2.0**30,
    category_losses={"cans": CategoryLoss(0.25, 3)},
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exporter(clock: Clock) -> Iterator[Exporter]:
    registry = CollectorRegistry()
    plan = PrecisionPlan(torch.bfloat16, torch.float32, torch.float32)
    families = TrainerMetrics(registry, plan)
    families.plan_steps(0, 9)
    families.publish(NUMBERS, WatchState(active=frozenset({"UpdatesLost"})), seconds=0.5)
    families.publish(NUMBERS, WatchState(active=frozenset({"UpdatesLost"})), seconds=0.5)
    families.checkpointed(2, 1_800_000_000.0)
    served = Exporter(registry, REPORT, 0, any_port=True, everywhere=False, clock=clock)
    yield served
    served.close()


def get(exporter: Exporter, path: str, **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{exporter.port}{path}"
    request = urllib.request.Request(
        url, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(exporter: Exporter) -> None:
    before = exporter.scrapes_seen
    assert get(exporter, "/metrics", **{PROMETHEUS_HEADER: "10"})[0] == 200
    while exporter.scrapes_seen == before:  # noted after the answer has gone out
        time.sleep(0.001)


def test_every_metric_of_the_contract_is_served_with_its_labels(exporter: Exporter) -> None:
    text = get(exporter, "/metrics")[1]
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    for metric in metrics.TRAINER_METRICS:
        assert metric.name in samples, metric.name
        assert set(samples[metric.name].labels) == set(metric.labels), metric.name
    assert samples["kubelora_grad_norm"].value == 1.5
    assert samples["kubelora_grad_norm"].labels == {"group": "down.lora_A"}
    assert samples["kubelora_grad_nonfinite_total"].value == 4  # 2 in each of two steps
    assert samples["kubelora_grad_underflow_ratio"].labels["dtype"] == "bf16"
    assert math.isnan(samples["kubelora_update_lost_ratio"].value)
    assert samples["kubelora_steps_planned"].value == 9
    assert samples["kubelora_checkpoint_step"].value == 2
    assert samples["kubelora_numerics_info"].labels == {
        "compute": "bf16",
        "accumulator": "fp32",
        "master_weights": "fp32",
    }


def test_each_measurement_is_told_under_its_own_name(exporter: Exporter) -> None:
    lines = get(exporter, "/metrics")[1].splitlines()
    for line in (
        'kubelora_accumulation_error_ratio{group="down.lora_A"} 0.004',
        'kubelora_update_scale{group="down.lora_A"} 0.3',
        'kubelora_optimizer_stuck_ratio{group="down.lora_A"} 0.01',
        'kubelora_adam_eps_damping_ratio{group="down.lora_A"} 0.9',
        'kubelora_lora_balance{group="down.lora_A"} 0.002',
        "kubelora_clipped_grad_norm 1.0",
        "kubelora_backward_passes 7.0",
        "kubelora_micro_steps 8.0",
        "kubelora_dead_modules 5.0",
        "kubelora_rank_divergence 0.0",
        "kubelora_host_memory_peak_bytes 1.073741824e+09",
        "kubelora_device_memory_peak_bytes NaN",
        "kubelora_learning_rate 0.0001",
        'kubelora_category_loss{category="cans"} 0.25',
    ):
        assert line in lines


def test_a_finding_reads_one_while_it_lasts_and_zero_otherwise(exporter: Exporter) -> None:
    text = get(exporter, "/metrics")[1]
    assert 'kubelora_health_finding{finding="UpdatesLost",severity="critical"} 1.0' in text
    assert 'kubelora_health_finding{finding="GradientAbsorbed",severity="critical"} 0.0' in text


def test_a_scrape_shows_the_newest_step_and_what_steps_since_the_last_one_left() -> None:
    """A category seen in one step alone, groups before a skipped step, all counts."""
    registry = CollectorRegistry()
    families = TrainerMetrics(registry, PrecisionPlan(torch.float16, torch.float32, torch.float32))
    infinite = replace(GROUP, grad_norm=math.inf, grad_nonfinite=5)
    skipped = replace(NUMBERS, step=5, grad_norm=math.inf, loss_scale=2.0**16)
    skipped = replace(skipped, groups={"down.lora_A": infinite}, category_losses={})
    assert skipped.skipped
    for numbers in (NUMBERS, replace(NUMBERS, step=4, category_losses={}), skipped):
        families.publish(numbers, WatchState(), seconds=0.5)

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert shown("kubelora_step") == 5
    assert shown("kubelora_samples_total") == 3 * NUMBERS.samples > 0
    assert shown("kubelora_steps_skipped_total") == 1
    assert shown("kubelora_grad_norm", group="down.lora_A") == 1.5
    assert shown("kubelora_grad_nonfinite_total", group="down.lora_A") == 4
    assert shown("kubelora_category_loss", category="cans") == 0.25
    families.publish(replace(NUMBERS, step=6), WatchState(), seconds=0.5)
    assert shown("kubelora_step") == 6
    assert shown("kubelora_grad_nonfinite_total", group="down.lora_A") == 6


def test_waiting_for_data_is_counted_up_to_the_scrape() -> None:
    registry = CollectorRegistry()
    families = TrainerMetrics(registry, PrecisionPlan(torch.bfloat16, torch.float32, torch.float32))
    total = iter([1.5, 1.5, 4.0])
    families.data_wait = lambda: next(total)
    seen = [registry.get_sample_value("kubelora_data_wait_seconds_total") for _ in range(3)]
    assert seen == [1.5, 1.5, 4.0]


def test_the_worst_modules_are_found_when_the_status_is_asked_for(exporter: Exporter) -> None:
    asked = []

    def found() -> list[ModuleNumbers]:
        asked.append(1)
        return [ModuleNumbers(module="down.a.lora_A", metric="grad_norm", value=0.5)]

    exporter.worst_modules = found
    get(exporter, "/metrics")
    assert not asked
    told = json.loads(get(exporter, "/status")[1])["worstModules"]
    assert told == [{"module": "down.a.lora_A", "metric": "grad_norm", "value": 0.5}]


def test_the_status_is_the_run_report(exporter: Exporter) -> None:
    status, body = get(exporter, "/status")
    assert status == 200
    assert RunReport.model_validate(json.loads(body)) == REPORT
    exporter.report = REPORT.model_copy(update={"step": 4})
    assert json.loads(get(exporter, "/status")[1])["step"] == 4


def test_the_health_probe_answers_and_other_paths_do_not(exporter: Exporter) -> None:
    assert get(exporter, "/healthz") == (200, "ok\n")
    assert get(exporter, "/metrics?name[]=x")[0] == 200
    assert get(exporter, "/")[0] == 404


@pytest.mark.parametrize("path", ["/metrics", "/status", "/healthz", "/nothing"])
def test_head_is_get_without_the_body(exporter: Exporter, path: str) -> None:
    def ask(method: str) -> tuple[int, str | None, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=10)
        connection.request(method, path)
        with connection.getresponse() as answer:
            about = answer.getheader("Content-Type"), answer.getheader("Content-Length")
            return answer.status, *about, answer.read()

    *about_get, body = ask("GET")
    *about_head, nothing = ask("HEAD")
    assert about_head == about_get
    assert about_get[0] == (404 if path == "/nothing" else 200)
    assert about_get[2] == str(len(body))
    assert nothing == b""
    assert ask("POST")[0] == 405


def test_openmetrics_is_spoken_to_those_who_ask_for_it(exporter: Exporter) -> None:
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    assert text.endswith("# EOF\n")
    samples = {
        s.name
        for family in openmetrics(text)  # type: ignore[no-untyped-call]
        for s in family.samples
    }
    assert {m.name for m in metrics.TRAINER_METRICS} <= samples


def test_gzip_is_sent_to_those_who_accept_it(exporter: Exporter) -> None:
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        text = gzip.decompress(answer.read()).decode()
    assert text == get(exporter, "/metrics")[1]


def test_unknown_paths_are_answered_with_the_known_ones(exporter: Exporter) -> None:
    assert get(exporter, "/metric") == (
        404,
        "not found; this port serves /metrics, /status and /healthz\n",
    )


def test_an_error_while_answering_is_logged_and_ends_no_thread(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[ModuleNumbers]:
        raise RuntimeError("no numbers")

    exporter.worst_modules = broken
    assert get(exporter, "/status")[0] == 500
    assert "no numbers" in caplog.text
    assert get(exporter, "/healthz")[0] == 200


def test_hostile_clients_disturb_neither_others_nor_the_log(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One says nothing until its time is up, one sends garbage, one leaves before the answer."""
    monkeypatch.setattr("kubelora_trainer.reporting.http_server._Handler.timeout", 0.2)
    silent = socket.create_connection(("127.0.0.1", exporter.port), timeout=10)
    assert get(exporter, "/healthz")[0] == 200
    garbage = socket.create_connection(("127.0.0.1", exporter.port), timeout=10)
    garbage.sendall(b"\xff\x00\r\n\r\n")
    leaving = socket.create_connection(("127.0.0.1", exporter.port), timeout=10)
    leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    leaving.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    leaving.close()
    assert silent.recv(1) == b""  # the server has hung up
    garbage.recv(1)
    assert get(exporter, "/healthz")[0] == 200
    silent.close()
    garbage.close()
    assert "Traceback" not in capfd.readouterr().err


def test_only_a_scrape_that_arrived_counts(exporter: Exporter) -> None:
    """HEAD, and a GET of something else, are no scrapes even with Prometheus' header."""
    for path, method in (("/metrics", "HEAD"), ("/status", "GET")):
        url = f"http://127.0.0.1:{exporter.port}{path}"
        request = urllib.request.Request(url, headers={PROMETHEUS_HEADER: "10"}, method=method)
        urllib.request.urlopen(request, timeout=10).close()
    scrape(exporter)
    assert exporter.scrapes_seen == 1


def test_a_taken_port_is_an_error_or_another_port(exporter: Exporter) -> None:
    registry = CollectorRegistry()
    with pytest.raises(OSError, match="in use"):
        Exporter(registry, REPORT, exporter.port, any_port=False, everywhere=False)
    second = Exporter(registry, REPORT, exporter.port, any_port=True, everywhere=False)
    assert second.port != exporter.port
    second.close()


def test_in_a_pod_both_families_of_addresses_are_served() -> None:
    served = Exporter(CollectorRegistry(), REPORT, 0, any_port=True, everywhere=True)
    assert get(served, "/healthz")[0] == 200
    served.close()


def test_a_run_that_nobody_scraped_waits_for_nobody(exporter: Exporter) -> None:
    get(exporter, "/metrics")  # a person with a browser is no Prometheus
    assert exporter.last_scrape_budget() == 0.0
    assert exporter.wait_for_scrape(lambda: False) is False


def test_the_wait_is_twice_the_interval_and_at_most_a_minute(
    exporter: Exporter, clock: Clock
) -> None:
    scrape(exporter)
    assert exporter.last_scrape_budget() == 60.0
    clock.now += 15
    scrape(exporter)
    assert exporter.last_scrape_budget() == 30.0
    clock.now += 45
    scrape(exporter)
    assert exporter.last_scrape_budget() == 60.0


def test_the_wait_ends_with_the_next_scrape(exporter: Exporter) -> None:
    scrape(exporter)
    seen: list[bool] = []
    polled = threading.Event()

    def stop() -> bool:
        polled.set()
        return False

    waiting = threading.Thread(
        target=lambda: seen.append(exporter.wait_for_scrape(stop)), daemon=True
    )
    waiting.start()
    assert polled.wait(10)
    scrape(exporter)
    waiting.join(10)
    assert seen == [True]


def test_after_sigterm_nobody_is_kept_waiting(exporter: Exporter) -> None:
    scrape(exporter)
    assert exporter.wait_for_scrape(lambda: True) is False


def test_the_wait_gives_up_in_time(exporter: Exporter, clock: Clock) -> None:
    scrape(exporter)

    def later() -> bool:
        clock.now += 61
        return False

    assert exporter.wait_for_scrape(later) is False

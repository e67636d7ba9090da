"""A gang of two pods that train one adapter, on a real cluster: found, done, deleted, killed.

The product as it is installed: the chart's operator with its own rights, the trainer's image.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .harness.probes import wait_until
from .harness.studio import Studio

LOST_CHILD = """
import os, signal
ranks = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read()
        parent = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        continue
    if parent == 1 and "spawn_main" in words:
        ranks.append(int(pid))
(rank,) = ranks
os.kill(rank, signal.SIGKILL)
"""
"""Run in a pod: kills its only rank, a process that the command has started."""


def trains(own_studio: Studio, job: str, attempt: int) -> bool:
    """Whether this attempt has been heard to have done more than its first steps."""
    status = own_studio.status(job)
    return (
        status.get("attempt") == attempt
        and own_studio.condition(job, "Running").get("reason") == "Training"
        and status.get("progress", {}).get("step", 0) > 3
    )


def job(name: str, steps: int) -> dict[str, object]:
    """Two pods of one CPU rank each, three micro-batches a window: shares of two and one."""
    return {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "pvc://model"},
            "dataset": {"uri": "pvc://data", "resolution": 64},
            "adapter": {"rank": 4},
            "training": {"steps": steps, "gradientAccumulation": 3, "device": "cpu"},
            "checkpoint": {"everySteps": 10},
            "output": {"uri": f"pvc://output/{name}"},
            "workers": {"nodes": 2, "gpusPerNode": 1},
        },
    }


@pytest.fixture(scope="module")
def short(own_studio: Studio) -> Studio:
    own_studio.kubectl.apply(job("short", 30))
    return own_studio


def test_two_pods_with_a_name_each_train_one_adapter(short: Studio) -> None:
    short.wait("short", "Complete", 900)
    status = short.status("short")
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0)
    assert status["progress"]["step"] == 30
    uris = [artifact["uri"] for artifact in status["artifacts"]]
    assert "pvc://output/short/adapter/pytorch_lora_weights.safetensors" in uris
    manifest = json.loads((short.output / "short" / "manifest.json").read_text())
    assert (manifest["state"], manifest["attempt"]) == ("Done", 1)


def test_the_pods_found_each_other_by_the_service(short: Studio) -> None:
    pods = short.pods("short", 1)
    index = "batch.kubernetes.io/job-completion-index"
    assert [p["metadata"]["annotations"][index] for p in pods] == ["0", "1"]
    services: list[Any] = list(short.kubectl.items("services", "-l", "kubelora.dev/job=short"))
    (service,) = services
    assert service["spec"]["clusterIP"] == "None"
    assert {p["spec"]["subdomain"] for p in pods} == {service["metadata"]["name"]}
    second = short.kubectl("logs", pods[1]["metadata"]["name"])
    assert "rank 1 of 2 trains with rank 0" in second
    assert "step=" not in second
    first = short.kubectl("logs", pods[0]["metadata"]["name"])
    (last_step,) = (line for line in first.splitlines() if "step=30/30" in line)
    record = json.loads(last_step)
    assert (record["level"], record["rank"], record["attempt"]) == ("info", 0, 1)


def test_deleting_the_job_leaves_nothing_behind(short: Studio) -> None:
    assert any(name.startswith("service/") for name in short.owned("short"))
    short.kubectl("delete", "ltj", "short", "--timeout=180s")
    assert wait_until(lambda: short.owned("short") == [], 360), short.owned("short")


@pytest.fixture(scope="module")
def long(own_studio: Studio) -> Studio:
    own_studio.kubectl.apply(job("long", 100_000))
    assert wait_until(lambda: trains(own_studio, "long", 1), 540), own_studio.describe("long")
    return own_studio


def test_a_deleted_pod_stops_the_gang_with_a_checkpoint_and_costs_no_restart(long: Studio) -> None:
    second = long.pods("long", 1)[1]["metadata"]["name"]
    long.kubectl("delete", "pod", second, "--wait=false")
    assert wait_until(lambda: trains(long, "long", 2), 720), long.describe("long")
    assert long.status("long").get("restarts", 0) == 0
    first = long.pods("long", 2)[0]["metadata"]["name"]

    def resumed() -> bool:
        return "resuming from" in long.kubectl.attempt("logs", first).stdout

    # The step in the status is that of the attempt before until the new one has told its own.
    assert wait_until(resumed, 720), long.describe("long")


def test_a_killed_rank_ends_the_gang_and_the_cause_is_told(long: Studio) -> None:
    assert wait_until(lambda: trains(long, "long", 2), 720), long.describe("long")
    second = long.pods("long", 2)[1]["metadata"]["name"]
    long.kubectl("exec", second, "--", "python3", "-c", LOST_CHILD)

    def told() -> str:
        return str(long.condition("long", "Restarting").get("message", ""))

    assert wait_until(lambda: "rank 1 of 2 was killed by SIGKILL" in told(), 360), long.describe(
        "long"
    )
    assert wait_until(lambda: trains(long, "long", 3), 720), long.describe("long")
    assert long.status("long")["restarts"] == 1

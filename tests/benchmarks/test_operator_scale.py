"""The operator's benchmark counts what it says; `tests/cluster` runs it."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.operator_scale import audit, documents, peer, simulated_nodes
from benchmarks.operator_scale.control_plane import with_flags
from benchmarks.operator_scale.measure import Result
from benchmarks.operator_scale.report import closing_line
from benchmarks.operator_scale.timeline import CREATED, Timeline
from kubelora_api import names
from kubelora_operator.attempt.manifests import attempt_in
from kubelora_operator.controller.pod_reports import parse_termination_message
from tests.cluster.harness.tools import TRAINING_OPERATOR

UID = "0b5e7a10-1111-4222-8333-944455556666"


def event(second: int, verb: str, resource: str, name: str = "", query: str = "") -> str:
    target = dict(zip(("resource", "subresource"), resource.split("/"), strict=False))
    return json.dumps(
        {
            "verb": verb,
            "requestURI": f"/apis/x/{resource}{query}",
            "userAgent": "kubelora-operator/1",
            "objectRef": {**target, "name": name},
            "responseStatus": {"code": 200},
            "requestReceivedTimestamp": f"2026-01-01T00:00:{second:02}.500000Z",
        }
    )


def test_requests_are_counted_for_their_own_job_until_it_runs(tmp_path: Path) -> None:
    """Watches stay open and Leases are about no job; a line that is being written is left out."""
    log = tmp_path / "audit.jsonl"
    lines = [
        event(1, "create", "jobs", "a-1-0b5e7-1"),
        event(2, "list", "pods", query=f"?labelSelector=kubelora.dev%2Fjob-uid%3D{UID}"),
        event(3, "update", "loratrainingjobs/status", "a-1"),
        event(4, "update", "loratrainingjobs/status", "a-2"),
        event(4, "create", "events", "a-1.18f3"),
        event(5, "watch", "pods"),
        event(5, "update", "leases", "kubelora-operator"),
        event(6, "list", "loratrainingjobs"),
    ]
    log.write_text("\n".join(lines) + "\n" + event(7, "get", "jobs", "a-1")[:40])
    requests = audit.read_requests(log)
    assert [r.operation for r in requests] == [
        "create jobs",
        "list pods",
        "update loratrainingjobs/status",
        "update loratrainingjobs/status",
        "create events",
        "list loratrainingjobs",
    ]
    noon = requests[0].received - 1
    counts = audit.count_until(requests, {UID: "a-2"}, {"a-1": noon + 3, "a-2": noon + 9})
    assert counts == Counter(
        {"create jobs": 1, "list pods": 1, "update loratrainingjobs/status": 2}
    )
    assert len(audit.between(requests, noon + 3, noon + 5)) == 3
    assert sum(r.is_write for r in requests) == 4


def test_a_simulated_trainer_ends_with_a_report_that_the_operator_reads() -> None:
    stages = {s["metadata"]["name"]: s["spec"] for s in _stages(2.5)}
    assert stages["complete"]["delay"] == {"durationMilliseconds": 2500}
    template = stages["complete"]["next"]["statusTemplate"]
    (line,) = [line for line in template.splitlines() if "message:" in line]
    text = json.JSONDecoder().raw_decode(line.partition("printf ")[2])[0] % UID
    final, _ = parse_termination_message(text, UID, 1)
    assert final is not None
    assert final.exit_code == 0
    assert names.LABEL_JOB_UID in line
    assert "complete" not in {s["metadata"]["name"] for s in _stages(None)}


def _stages(run_seconds: float | None) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(simulated_nodes.configuration(run_seconds)))


def test_the_bare_client_creates_what_the_operator_would_not_adopt() -> None:
    job = documents.bare_job("bare", "job")
    metadata = job["metadata"]
    assert metadata["name"] == "job"
    assert attempt_in("job", "job", UID) is None
    assert "ownerReferences" not in metadata
    assert names.LABEL_MANAGED_BY not in metadata["labels"]
    assert names.LABEL_MANAGED_BY not in job["spec"]["template"]["metadata"]["labels"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"][names.GPU_RESOURCE] == "1"


def test_first_moments_count_and_a_warm_up_is_forgotten() -> None:
    timeline = Timeline(lambda item: str(item["metadata"]["name"]))

    def see(name: str, *true: str) -> None:
        conditions = [{"type": kind, "status": "True"} for kind in true]
        metadata = {"name": name, "uid": f"uid-{name}"}
        timeline._record({"metadata": metadata, "status": {"conditions": conditions}})

    see("warm-up", "Complete")
    timeline.forget()
    see("warm-up", "Complete")
    see("a")
    first = timeline.of(CREATED)["a"]
    see("a", "Running")
    assert timeline.of(CREATED) == {"a": first}
    assert set(timeline.of("Running")) == {"a"}
    assert timeline.of("Complete") == {}
    assert asyncio.run(timeline.until("Running", 1, 1))
    assert not asyncio.run(timeline.until("Complete", 1, 0.01))


def test_flags_are_replaced_not_repeated() -> None:
    command = ("/bin/x", "--port=1", "--verbose", "--ports=2")
    assert with_flags(command, {"--port": "9", "--new": "n"}) == (
        *("/bin/x", "--verbose", "--ports=2"),
        *("--port=9", "--new=n"),
    )


def test_the_last_line_has_the_figures_per_job_and_the_ratio_to_the_floor() -> None:
    result = Result("operator", jobs=4, floor_complete=10.0, last_child=2.0, p99=1.5, complete=15.0)
    result.life = Counter({"create jobs": 4, "update loratrainingjobs/status": 12})
    result.peak_mib, result.restart = 99.6, 1.25
    assert closing_line(result) == (
        "bench-operator: n=4 last_child_s=2.00 p99_s=1.50 requests=4.00 rss_mib=100 "
        "complete_ratio=1.50 restart_s=1.25"
    )
    assert Result("operator", jobs=4).complete == pytest.approx(float("inf"))


def test_the_peers_pod_is_that_of_our_job() -> None:
    """It looks for a container of its own name; all else costs the API server the same."""
    master = peer._job("job")["spec"]["pytorchReplicaSpecs"]["Master"]
    ours = documents.bare_job("studio", "job")["spec"]["template"]["spec"]
    (container,) = ours["containers"]
    assert container["name"] == names.TRAINER_CONTAINER
    assert master["template"]["spec"] == ours | {"containers": [container | {"name": "pytorch"}]}
    assert set(TRAINING_OPERATOR.outputs) == {
        "training-operator.v1",
        "kubeflow.org_pytorchjobs.yaml",
    }

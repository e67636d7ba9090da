"""The whole path on a real cluster: helm install, kubectl apply, an adapter, and an alert.

One story, told in order: a healthy job and a lossy one run beside each other under one operator,
watched by a real Prometheus; then the operator is uninstalled while a job still runs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kubelora_trainer.cli.demo import create_demo
from tests.tiers.skips import not_applicable

from .harness import chart, monitoring, volumes
from .harness.images import Images
from .harness.jobs import Jobs
from .harness.kubectl import Helm, Kubectl
from .harness.monitoring import Monitoring
from .harness.places import Places
from .harness.probes import wait_until

ROOT = Path(__file__).parents[2]
MONITORED = {
    "monitoring": {
        "podMonitor": {"enabled": True, "interval": "2s"},
        "rules": {"enabled": True, "window": "40s", "for": "5s"},
    }
}
EXAMPLES = ROOT / "examples" / "quickstart"
SYSTEM = "kubelora-system"
RELEASE = "kubelora"
ALERT = "KubeloraUpdatesLost"


@dataclass(frozen=True)
class Scene(Jobs):
    """What the story plays in."""

    helm: Helm
    monitoring: Monitoring
    model: Path
    output: Path

    def pod(self, job: str) -> Any:
        """The one pod of a job."""
        (pod,) = self.pods(job)
        return pod


@pytest.fixture(scope="module")
def jobs_namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    name = f"studio-{secrets.token_hex(3)}"
    kubectl.create_namespace(name)
    yield kubectl.within(name)
    kubectl("delete", "namespace", name, "--timeout=600s", timeout=660)
    volumes.release_volumes(kubectl, name)


@pytest.fixture(scope="module")
def scene(
    places: Places,
    kubectl: Kubectl,
    helm: Helm,
    images: Images,
    is_local_cluster: bool,
    jobs_namespace: Kubectl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    """The chart installed, Prometheus watching, claims with the demo's model and photographs."""
    if not is_local_cluster:
        not_applicable("claims on folders of this machine need the harness's own cluster")
    folder = tmp_path_factory.mktemp("product")
    demo = create_demo(folder / "demo", "small")
    output = folder / "output"
    for claim, path in (("model", demo.model), ("data", demo.photos), ("output", output)):
        volumes.claim_directory(kubectl, jobs_namespace.namespace, f"quickstart-{claim}", path)
    monitoring.install_crds(places, kubectl)
    chart.install(helm, images, RELEASE, SYSTEM, MONITORED)
    with monitoring.monitor(places, kubectl, folder / "monitoring", "2s") as watched:
        yield Scene(jobs_namespace, helm, watched, demo.model, output)
        chart.uninstall(helm, kubectl, RELEASE, SYSTEM)


@pytest.fixture(scope="module")
def applied(scene: Scene) -> Scene:
    """Both jobs, applied as they stand in the repository; the lossy one starts a little later."""
    scene.kubectl("apply", "-f", str(EXAMPLES / "job.yaml"))
    return scene


def test_the_operator_is_ready_and_leads(scene: Scene) -> None:
    scene.monitoring.prometheus.wait_for("kubelora_operator_is_leader == 1", 180)


def test_a_job_is_accepted_and_runs_with_moving_progress(applied: Scene) -> None:
    applied.wait("quickstart", "Accepted", 90)
    applied.wait("quickstart", "Running", 360)
    seen: set[str] = set()

    def moved() -> bool:
        row = applied.kubectl("get", "ltj", "quickstart", "--no-headers").split()
        if row[1] == "Running" and len(row) > 2 and row[2].isdigit():
            seen.add(row[2])
        return len(seen) >= 3

    assert wait_until(moved, 360, pause=0.5), applied.describe("quickstart")


def test_prometheus_sees_gradient_norms_above_zero_for_every_group(applied: Scene) -> None:
    samples = applied.monitoring.prometheus.wait_for(
        'kubelora_grad_norm{name="quickstart"} > 0 and on(pod) kubelora_step > 3', 180
    )
    groups = {s.labels["group"] for s in samples}
    assert {g.rpartition(".")[2] for g in groups} == {"lora_A", "lora_B"}
    assert {s.labels["namespace"] for s in samples} == {applied.kubectl.namespace}


def test_the_pods_are_restricted_and_hold_no_token(applied: Scene) -> None:
    spec = applied.pod("quickstart")["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert mounts["/kubelora/claims/quickstart-model"] is True
    assert mounts["/kubelora/claims/quickstart-output"] is False


def test_it_completes_with_its_artifacts_in_the_status(applied: Scene) -> None:
    applied.wait("quickstart", "Complete", 720)
    status = applied.status("quickstart")
    assert status["state"] == "Complete"
    assert status["progress"]["percent"] == "100%"
    assert status["progress"]["step"] == status["progress"]["totalSteps"]
    assert status["health"]["verdict"] == "Healthy"
    assert status["completionTime"] >= status["startTime"]
    uris = [a["uri"] for a in status["artifacts"]]
    assert "pvc://quickstart-output/adapter/pytorch_lora_weights.safetensors" in uris


def test_nothing_of_ours_was_written_onto_the_users_object(applied: Scene) -> None:
    found: Any = applied.kubectl.get("ltj", "quickstart")
    metadata = found["metadata"]
    assert "finalizers" not in metadata
    assert list(metadata["annotations"]) == ["kubectl.kubernetes.io/last-applied-configuration"]


def test_its_history_reads_well_in_kubectl_describe(applied: Scene) -> None:
    described = applied.kubectl("describe", "ltj", "quickstart")
    for words in ("Events:", "loratrainingjob", "Complete"):
        assert words.lower() in described.lower()


def test_the_adapter_on_the_claim_loads_in_diffusers_and_changes_the_image(applied: Scene) -> None:
    import torch
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(applied.model)

    def draw() -> torch.Tensor:
        latents: torch.Tensor = pipeline(
            "a photo of a tabby cat",
            height=64,
            width=64,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).images
        return latents

    without = draw()
    assert torch.equal(draw(), without)
    pipeline.load_lora_weights(applied.output / "adapter")
    change = (draw() - without).norm() / without.norm()
    assert 1e-3 < change < 10


@pytest.fixture(scope="module")
def lossy(applied: Scene) -> Scene:
    applied.kubectl("apply", "-f", str(EXAMPLES / "lossy.yaml"))
    applied.wait("lossy", "Running", 360)
    return applied


def test_lossy_precision_makes_the_alert_arrive(lossy: Scene) -> None:
    alert = lossy.monitoring.receiver.wait_for(ALERT, 540, name="lossy")
    assert alert.labels["namespace"] == lossy.kubectl.namespace
    assert alert.labels["severity"] == "critical"
    assert "masterWeights" in alert.annotations["description"] + alert.annotations["summary"]


def test_the_job_itself_says_what_is_wrong(lossy: Scene) -> None:
    def said() -> bool:
        return lossy.condition("lossy", "NumericallyHealthy").get("status") == "False"

    assert wait_until(said, 180), lossy.describe("lossy")
    assert "fp32" in str(lossy.condition("lossy", "NumericallyHealthy")["message"])


def test_the_healthy_job_was_silent(lossy: Scene) -> None:
    assert [
        a.name
        for a in lossy.monitoring.receiver.alerts
        if a.labels.get("name") == "quickstart" and a.status == "firing"
    ] == []


def test_deleting_a_job_leaves_nothing_behind(lossy: Scene) -> None:
    assert lossy.owned("quickstart") != []
    lossy.kubectl("delete", "ltj", "quickstart", "--timeout=180s")
    assert wait_until(lambda: lossy.owned("quickstart") == [], 180), lossy.owned("quickstart")


def test_uninstalling_the_operator_does_not_disturb_a_running_pod(lossy: Scene) -> None:
    before = lossy.pod("lossy")
    step = metric(lossy, "kubelora_step")
    lossy.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "400s")
    assert wait_until(lambda: metric(lossy, "kubelora_step") > step + 5, 180)
    after = lossy.pod("lossy")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["phase"] == "Running"
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert lossy.status("lossy")["state"] == "Running"  # the resource outlives its operator


def metric(scene: Scene, name: str) -> float:
    samples = scene.monitoring.prometheus.query(f'{name}{{name="lossy"}}')
    return samples[0].value if samples else -1.0


def test_a_job_is_deleted_without_its_operator(lossy: Scene) -> None:
    lossy.kubectl("delete", "ltj", "lossy", "--timeout=180s")
    assert wait_until(lambda: lossy.owned("lossy") == [], 540)
    assert (lossy.output / "lossy" / "checkpoints").is_dir()  # SIGTERM saved what was done
    manifest = json.loads((lossy.output / "lossy" / "manifest.json").read_text())
    assert manifest["state"].lower() != "done"

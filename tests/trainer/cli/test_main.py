"""The command line, in process: real runs of the tiny model, exit codes, sentences."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from kubelora_api.documents import parse_job
from kubelora_api.report import FinalReport, RunReport
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main, unused_mounts
from tests.tiers.skips import not_applicable

JOB = """\
apiVersion: kubelora.dev/v1alpha1
kind: LoraTrainingJob
metadata: {name: tiny}
spec:
  model: {uri: "pvc://model"}
  dataset: {uri: "pvc://data", resolution: 64}
  adapter: {rank: 4}
  training: {steps: 3, gradientAccumulation: 2, learningRate: 1e-3, device: cpu}
  output: {uri: "pvc://output"}
"""

Train = Callable[..., Result]


@pytest.fixture
def train(demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run `kubelora train` on the tiny job with settings, in a fresh folder."""
    monkeypatch.setattr("kubelora_trainer.utils.signals.StopRequest.install", lambda self: None)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "out").mkdir()

    def run(
        *settings: str, mounts: dict[str, Path] | None = None, log_format: str = "plain"
    ) -> Result:
        folders = {"model": demo.model, "data": demo.photos, "output": tmp_path / "out"}
        arguments = ["train", str(tmp_path / "job.yaml"), "--log-format", log_format]
        for setting in settings:
            arguments += ["--set", setting]
        for claim, folder in (folders | (mounts or {})).items():
            arguments += ["--mount", f"{claim}={folder}"]
        return CliRunner().invoke(main, arguments, catch_exceptions=True)

    return run


def test_a_run_ends_with_everything_that_its_summary_names(train: Train, tmp_path: Path) -> None:
    done = train(
        "spec.validation.prompts=[a cat]",
        "spec.validation.inferenceSteps=1",
        "spec.validation.everySteps=2",
        "spec.checkpoint.everySteps=2",
    )
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert str(out / "adapter" / "pytorch_lora_weights.safetensors") in done.output
    weights = load_file(out / "adapter" / "pytorch_lora_weights.safetensors")
    assert all(bool(tensor.any()) for tensor in weights.values())
    assert sorted(p.name for p in (out / "samples").iterdir()) == [
        "step-000002-0.png",
        "step-000003-0.png",
    ]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert (out / "metrics.parquet").stat().st_size > 1000
    assert json.loads((out / "preflight.json").read_text())["used"] == 8
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["state"] == "Done"
    assert [a["uri"] for a in manifest["artifacts"]] == [
        "pvc://output/adapter/pytorch_lora_weights.safetensors",
        f"pvc://output/adapter/{manifest['job']['metadata']['name']}.safetensors",
        "pvc://output/metrics.parquet",
    ]
    assert "|B·A| = 0" in done.output
    assert "gradients fp32" in done.output

    again = train(
        "spec.validation.prompts=[a cat]",
        "spec.validation.inferenceSteps=1",
        "spec.validation.everySteps=2",
    )
    assert again.exit_code == 0
    assert "already done" in again.output
    assert "step=" not in again.output

    other = train("spec.training.seed=9")
    assert other.exit_code == 2
    assert "replaceExisting" in other.output


def test_every_line_of_a_pods_log_is_json(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("KUBELORA_ATTEMPT", "4")
    # A pod has the documented port to itself; this machine may not.
    monkeypatch.setattr("kubelora_trainer.training.lifecycle.METRICS_PORT", 0)
    done = train(log_format="json")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert {(line["rank"], line["attempt"]) for line in lines} == {(0, 4)}
    assert any(line["message"].startswith("step=3/3 loss=") for line in lines)
    assert lines[-1]["level"] == "info"

    wrong = train("spec.training.seed=9", log_format="json")
    assert wrong.exit_code == 2
    assert wrong.stderr.count("\n") == 1
    error = json.loads(wrong.stderr)
    assert (error["level"], error["attempt"]) == ("error", 4)
    assert "replaceExisting" in error["message"]


def test_default_precision_is_healthy_and_lossy_settings_lose_updates(train: Train) -> None:
    slow = ("spec.training.steps=9", "spec.training.learningRate=1e-5")
    healthy = train(*slow)
    assert healthy.exit_code == 0, healthy.output
    assert re.search(r"health +Healthy", healthy.output)
    lossy = (
        *slow,
        "spec.precision={accumulator: bf16, masterWeights: bf16, allowLossyPrecision: true}",
        "spec.output.replaceExisting=true",
    )
    warned = train(*lossy)
    assert warned.exit_code == 0, warned.output
    assert re.search(r"health +Critical", warned.output)
    assert re.search(r"UpdatesLost in \w+\.lora_A since step 8", warned.output)


def test_the_policy_fail_ends_the_run_after_a_checkpoint(train: Train, tmp_path: Path) -> None:
    ended = train(
        "spec.training.steps=12",
        "spec.training.learningRate=1e-5",
        "spec.precision={masterWeights: bf16, allowLossyPrecision: true}",
        "spec.health.policy=Fail",
    )
    assert ended.exit_code == 3, ended.output
    assert "UpdatesLost" in ended.output
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["state"] == "Failed"


LOSING_UPDATES = (
    "spec.training.learningRate=1e-5",
    "spec.precision={masterWeights: bf16, allowLossyPrecision: true}",
)


def test_the_policy_suspend_says_how_to_go_on_and_the_same_command_does(
    train: Train, tmp_path: Path
) -> None:
    given = (*LOSING_UPDATES, "spec.training.steps=12", "spec.health.policy=Suspend")
    ended = train(*given)
    assert ended.exit_code == 5, ended.output
    assert "To accept the finding and continue: kubelora" in ended.output
    manifest = tmp_path / "out" / "manifest.json"
    assert json.loads(manifest.read_text())["state"] == "Suspended"
    again = train(*given)
    assert again.exit_code == 0, again.output
    assert "resuming from" in again.output
    assert json.loads(manifest.read_text())["state"] == "Done"


def test_the_policy_rollback_records_what_it_left_out_and_fails_the_second_time(
    train: Train, tmp_path: Path
) -> None:
    ended = train(*LOSING_UPDATES, "spec.training.steps=12", "spec.health.policy=Rollback")
    assert ended.exit_code == 3, ended.output
    assert "rolled back from step 8 to the checkpoint of step 0 because of UpdatesLost" in (
        ended.output
    )
    assert "already went back to step 0" in ended.output
    rollback = json.loads((tmp_path / "out" / "manifest.json").read_text())["record"]["rollback"]
    # Found after the window of step 9, two micro-steps each.
    assert (rollback["back_to"], rollback["found_at"], rollback["skipped"]) == (0, 8, [0, 18])


def test_a_baseline_is_compared_before_the_first_step_and_kept_in_the_manifest(
    train: Train, tmp_path: Path
) -> None:
    assert train().exit_code == 0
    (tmp_path / "out").rename(tmp_path / "good")
    (tmp_path / "out").mkdir()
    done = train(
        "spec.health.baseline=pvc://good",
        "spec.training.learningRate=1e-4",
        mounts={"good": tmp_path / "good"},
    )
    assert done.exit_code == 0, done.output
    assert "training.learningRate: 0.0001 here, 0.001 there" in done.output
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())["record"]
    fields = [d["field"] for d in record["baseline"]["differences"]]
    assert fields == ["training.learningRate"]
    assert record["baseline"]["not_compared"] == "3 steps are too few"
    assert (record["total_steps"], len(record["dataset_sha256"])) == (3, 64)


def test_metrics_and_status_are_served_while_it_trains(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "termination-log"
    monkeypatch.setenv("KUBELORA_TERMINATION_LOG", str(report))
    seen: dict[str, str] = {}
    ended = threading.Event()
    port: list[int] = []

    from kubelora_trainer.training import lifecycle, run

    serve = lifecycle.serve_metrics

    def noted(*arguments: object) -> object:
        exporter = serve(*arguments)  # type: ignore[arg-type]
        port.append(exporter.port)
        return exporter

    monkeypatch.setattr(run, "serve_metrics", noted)

    def poll() -> None:
        while not ended.is_set():
            for path in ("metrics", "status", "healthz") if port else ():
                try:
                    url = f"http://127.0.0.1:{port[0]}/{path}"
                    with urllib.request.urlopen(url, timeout=5) as answer:
                        text = answer.read().decode()
                except OSError:
                    continue
                if path != "metrics" or 'kubelora_grad_norm{group="down.lora_B"}' in text:
                    seen[path] = text
            time.sleep(0.02)

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    done = train("spec.training.steps=8")
    ended.set()
    poller.join(10)
    assert done.exit_code == 0, done.output
    norm = re.search(r'kubelora_grad_norm\{group="down\.lora_B"\} (\S+)', seen["metrics"])
    assert norm is not None
    assert float(norm[1]) > 0
    status = RunReport.model_validate_json(seen["status"])
    assert status.total_steps == 8
    final = FinalReport.model_validate_json(report.read_bytes())
    assert (final.exit_code, final.step, final.total_steps) == (0, 8, 8)
    assert final.artifacts
    assert final.manifest_sha256


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("spec.model.uri=/nowhere/model",), "/nowhere/model does not exist"),
        (("spec.dataset.uri=/nowhere/photos",), "/nowhere/photos does not exist"),
        (("spec.dataset.uri=pvc://absent",), "--mount absent=DIR"),
        (("spec.adapter.rank=-1",), "spec.adapter.rank: must be at least 1"),
        (("spec.output.uri=/sys/kubelora",), "can't take output"),
    ],
)
def test_wrong_configuration_is_a_sentence_and_exit_code_2(
    train: Train, settings: tuple[str, ...], sentence: str
) -> None:
    ended = train(*settings)
    assert ended.exit_code == 2, ended.output
    assert sentence in ended.output
    assert "error: " in ended.output
    assert "Traceback" not in ended.output


def test_an_empty_dataset_and_a_model_that_is_not_sdxl_are_refused(
    train: Train, tmp_path: Path, demo: DemoPaths
) -> None:
    (tmp_path / "empty").mkdir()
    empty = train(mounts={"data": tmp_path / "empty"})
    assert empty.exit_code == 2, empty.output
    assert "contains no images" in empty.output
    other = tmp_path / "other"
    shutil.copytree(demo.model, other)
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(
        json.dumps(index | {"_class_name": "StableDiffusionPipeline"})
    )
    refused = train(mounts={"model": other})
    assert refused.exit_code == 2, refused.output
    assert "not a StableDiffusionXLPipeline" in refused.output


def test_no_gpu_is_refused_unless_a_cpu_is_meant(train: Train) -> None:
    import torch

    if torch.cuda.is_available():
        not_applicable("this machine has a GPU")
    ended = train("spec.training.device=auto")
    assert ended.exit_code == 2, ended.output
    assert "--set spec.training.device=cpu" in ended.output


def test_the_words_of_the_command_line() -> None:
    run = CliRunner().invoke
    assert "kubelora demo" in run(main, ["--help"]).output
    assert "--set spec.training.steps=10" in run(main, ["train", "--help"]).output
    assert re.fullmatch(r"kubelora, version \S+\n", run(main, ["--version"]).output)
    wrong = run(main, ["train", "job.yaml", "--mount", "photos"])
    assert wrong.exit_code == 2
    assert "expected CLAIM=DIR" in wrong.output


def test_a_misspelt_claim_is_answered_with_the_jobs_own(
    train: Train, tmp_path: Path, demo: DemoPaths
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    arguments = ["train", str(tmp_path / "job.yaml"), "--mount", f"model={demo.model}"]
    arguments += ["--mount", f"output={tmp_path}", "--mount", f"dta={demo.photos}"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert (
        f"error: --mount dta={demo.photos}: the job uses no claim 'dta'; did you mean 'data'? "
        "Its claims are data, model, output; still missing: --mount data=DIR"
    ) in refused.output


def test_a_mount_too_many_is_told_and_ends_nothing() -> None:
    job = parse_job(yaml.safe_load(JOB.replace("1e-3", "0.001")))
    folders = {name: Path("/x") for name in ("model", "data", "output", "spare")}
    assert list(unused_mounts(folders, job)) == [
        "--mount spare=/x: the job uses no claim 'spare', so nothing is read from it"
    ]


def test_help_and_validate_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    program = (
        "import sys\n"
        "from kubelora_trainer.cli.main import main\n"
        f"main(['validate', {str(tmp_path / 'job.yaml')!r}], standalone_mode=False)\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'diffusers', 'rich', 'numpy')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tiny: valid" in done.stdout

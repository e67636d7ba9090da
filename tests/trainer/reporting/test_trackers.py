"""Trackers get the run log's numbers, written by the real libraries and read back from their files.

A tracker that fails is told once and ends nothing.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from prometheus_client import CollectorRegistry

from kubelora_api.documents import parse_job
from kubelora_api.names import ExitCode
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.reporting.trackers import TrackerSet, build_trackers
from kubelora_trainer.storage.output_dir import OutputFolder, claim_output
from kubelora_trainer.telemetry.step_metrics import CategoryLoss, StepNumbers
from tests.trainer.checkpoint.test_checkpointer import file_size_limit
from tests.trainer.cli.test_main import JOB
from tests.trainer.integration.test_interruption import arguments, in_this_process

LOSSY = (
    "spec.training.learningRate=1e-5",
    "spec.precision={accumulator: bf16, masterWeights: bf16, allowLossyPrecision: true}",
)
"""Loses updates, which is a critical finding within 12 steps."""
ALL = "{trackers: [tensorboard, wandb, mlflow], project: studio}"


@pytest.fixture(scope="module")
def output(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of 3 steps with all trackers, sample images at its end."""
    folder = tmp_path_factory.mktemp("tracked")
    given = arguments(folder, demo)
    for setting in (
        "spec.training.steps=3",
        "spec.validation={prompts: [a cat], inferenceSteps: 2}",
        f"spec.tracking={ALL}",
    ):
        given += ["--set", setting]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        done = in_this_process(given)
    assert done.exit_code == 0, done.output
    assert "tracking:" not in done.output
    return folder / "out"


@pytest.fixture(scope="module")
def logged(output: Path) -> dict[str, list[float]]:
    """Each step's numbers as the run log has them."""
    rows: dict[int, Any] = {
        row["step"]: row for row in pq.read_table(output / "metrics.parquet").to_pylist()
    }
    names = {"loss": "loss", "grad_norm": "total_grad_norm", "learning_rate": "learning_rate"}
    return {ours: [rows[step][name] for step in (1, 2, 3)] for ours, name in names.items()}


def test_tensorboard_reads_every_step_and_the_samples(
    output: Path, logged: dict[str, list[float]]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard" / "studio"))
    events.Reload()
    for name, values in logged.items():
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-6)
    [image] = events.Images("samples/0")
    assert (image.step, image.width) == (3, 128)


def test_wandb_offline_holds_every_step(output: Path, logged: dict[str, list[float]]) -> None:
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    [file] = output.glob("wandb/offline-run-*/*.wandb")
    history: dict[str, list[float]] = {}
    for content in _records(file.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            history.setdefault(name, []).append(json.loads(item.value_json))
    for name, values in logged.items():
        assert history[name] == pytest.approx(values, rel=1e-6)
    assert any(name.startswith("samples/0/") for name in history)
    [image] = file.parent.glob("files/media/images/samples/*.png")
    assert "_3_" in image.name


def _records(file: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, behind a header of 7 bytes, in blocks of 32 KiB."""
    position, pending = 7, b""
    while position + 7 <= len(file):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", file, position)
        pending += file[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield pending
            pending = b""


def test_mlflow_reads_every_step_and_the_samples(
    output: Path, logged: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((output / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("studio")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    for name, values in logged.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [metric.step for metric in history] == [1, 2, 3]
        assert [metric.value for metric in history] == pytest.approx(values, rel=1e-6)
    [sample] = client.list_artifacts(run.info.run_id, "samples")
    assert sample.path == "samples/step-000003-0.png"


def test_a_tracker_that_can_not_begin_is_told_once_and_counted_and_the_run_is_done(
    demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow at an address where nobody listens."""
    registry = CollectorRegistry()
    monkeypatch.setattr("kubelora_trainer.training.run.CollectorRegistry", lambda: registry)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    given = arguments(tmp_path, demo)
    for setting in ("spec.training.steps=2", "spec.tracking={trackers: [mlflow, tensorboard]}"):
        given += ["--set", setting]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    assert done.output.count("tracking: mlflow failed and is now disabled") == 1
    assert list((tmp_path / "out" / "tensorboard").rglob("events.*"))
    assert registry.get_sample_value("kubelora_trackers_failed") == 1


@pytest.mark.parametrize(
    ("settings", "exit_code", "status"),
    [
        (["spec.training.steps=3"], 0, "FINISHED"),
        (["spec.training.steps=12", "spec.health.policy=Fail", *LOSSY], 3, "FAILED"),
        (["spec.training.steps=12", "spec.health.policy=Suspend", *LOSSY], 5, "KILLED"),
    ],
)
def test_each_tracker_knows_how_the_attempt_ended(
    demo: DemoPaths, tracked: Path, settings: list[str], exit_code: int, status: str
) -> None:
    given = arguments(tracked.parent, demo)
    for setting in [*settings, "spec.tracking={trackers: [wandb, mlflow]}"]:
        given += ["--set", setting]
    ended = in_this_process(given)
    assert ended.exit_code == exit_code, ended.output
    from mlflow import MlflowClient

    client = MlflowClient((tracked / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("kubelora")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == status
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    [file] = tracked.glob("wandb/offline-run-*/*.wandb")
    codes = []
    for content in _records(file.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(content)
        if record.HasField("exit"):
            codes.append(record.exit.exit_code)
    assert codes == [exit_code]


Losses = dict[int, float]


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and an environment in which all trackers write there."""
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path / "out"


def attempt(output: Path, resumed: int, steps: Sequence[int], shift: float) -> None:
    """One attempt's trackers: of each step its number plus ``shift`` is the loss."""
    document = yaml.safe_load(JOB.replace("1e-3", "0.001"))
    document["spec"]["tracking"] = {"trackers": ["tensorboard", "wandb", "mlflow"]}
    folder = claim_output(output, parse_job(document), None, pytest.fail)
    assert isinstance(folder, OutputFolder)
    tracking = build_trackers(folder, resumed, pytest.fail)
    for step in steps:
        tracking.log(StepNumbers(step, 1e-4, step + shift, 1, 2.0, {}, [], []))
    tracking.finish(ExitCode.DONE)


def in_tensorboard(output: Path) -> Losses:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard" / "kubelora"))
    events.Reload()
    scalars = events.Scalars("loss")
    assert len({scalar.step for scalar in scalars}) == len(scalars)
    return {scalar.step: scalar.value for scalar in scalars}


def in_mlflow(place: Path) -> list[Losses]:
    """The losses of each run."""
    from mlflow import MlflowClient

    client = MlflowClient(place.as_uri())
    experiment = client.get_experiment_by_name("kubelora")
    assert experiment is not None
    found = []
    for run in client.search_runs([experiment.experiment_id], order_by=["start_time"]):
        history = client.get_metric_history(run.info.run_id, "loss")
        assert len({metric.step for metric in history}) == len(history)
        found.append({metric.step: metric.value for metric in history})
    return found


def in_wandb(output: Path) -> list[tuple[str, Losses]]:
    """Id and losses of each part, in the order in which `wandb sync` sends them."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    parts = []
    for file in sorted(output.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime):
        name, losses = "", {}
        for content in _records(file.read_bytes()):
            record = protocol.Record()
            record.ParseFromString(content)
            name = record.run.run_id or name
            values = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "loss" in values:
                losses[int(json.loads(values["_step"]))] = json.loads(values["loss"])
        parts.append((name, losses))
    return parts


def test_a_resumed_run_goes_on_in_the_same_run_and_has_every_step_once(tracked: Path) -> None:
    """Killed after step 7, the newest checkpoint is of step 5."""
    attempt(tracked, 0, range(1, 8), 0.0)
    attempt(tracked, 5, range(6, 11), 0.5)
    again = {step: step + 0.5 for step in range(6, 11)}
    assert in_tensorboard(tracked) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, **again}
    kept = {6: 6, 7: 7, 8: 8.5, 9: 9.5, 10: 10.5}
    assert in_mlflow(tracked / "mlflow") == [{1: 1, 2: 2, 3: 3, 4: 4, 5: 5, **kept}]
    (first, before), (second, after) = in_wandb(tracked)
    assert first == second
    assert (before, after) == ({step: step for step in range(1, 8)}, again)


def test_after_a_rollback_no_step_stands_twice(tracked: Path) -> None:
    attempt(tracked, 0, [1, 2, 3, 4, 3, 4, 5], 0.0)
    every = {step: step for step in range(1, 6)}
    assert in_tensorboard(tracked) == every
    assert in_mlflow(tracked / "mlflow") == [every]
    assert [losses for _, losses in in_wandb(tracked)] == [every]


def test_the_same_job_trained_anew_is_another_run(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its output was cleared away; the trackers, elsewhere, still hold the first."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    attempt(tracked, 0, [1, 2], 0.0)
    [(first, _)] = in_wandb(tracked)
    shutil.rmtree(tracked)
    attempt(tracked, 0, [1, 2], 0.5)
    [(second, _)] = in_wandb(tracked)
    assert first != second
    assert in_mlflow(tmp_path / "elsewhere") == [{1: 1, 2: 2}, {1: 1.5, 2: 2.5}]


def test_a_full_disk_leaves_tensorboard_out_and_ends_nothing(tracked: Path) -> None:
    """The system refuses to let a file grow, as a full disk does."""
    document = yaml.safe_load(JOB.replace("1e-3", "0.001"))
    document["spec"]["tracking"] = {"trackers": ["tensorboard"]}
    folder = claim_output(tracked, parse_job(document), None, pytest.fail)
    assert isinstance(folder, OutputFolder)
    said: list[str] = []
    tracking = build_trackers(folder, 0, said.append)
    image = tracked / "noise.png"
    Image.effect_noise((256, 256), 100).save(image)
    with file_size_limit(300_000):
        for step in range(1, 41):
            tracking.log(StepNumbers(step, 1e-4, 1.0, 1, 2.0, {}, [], []))
            tracking.log_samples([image], step)
        tracking.finish(ExitCode.DONE)
    [sentence] = said
    assert sentence.startswith("tracking: tensorboard failed and is now disabled")
    assert "File too large" in sentence


class Broken:
    """Fails at the second step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError("no route to host\nmore")

    def log_images(self, paths: object, step: int) -> None:
        raise AssertionError("dropped by then")

    def finish(self, exit_code: ExitCode) -> None:
        raise AssertionError("dropped by then")


class Working(Broken):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, float]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.values.append(values)

    def log_images(self, paths: object, step: int) -> None:
        self.steps.append(step)

    def finish(self, exit_code: ExitCode) -> None:
        self.steps.append(-1)


def test_one_that_fails_on_the_way_is_dropped_and_the_others_go_on() -> None:
    said: list[str] = []
    broken, working = Broken(), Working()
    tracking = TrackerSet({"wandb": broken, "mlflow": working}, said.append)
    for step in (1, 2, 3):
        seen = {"cans": CategoryLoss(0.5, 1)} if step == 3 else {}
        numbers = StepNumbers(step, 1e-4, 0.7, 1, 2.0, {}, [], [], category_losses=seen)
        tracking.log(numbers)
    tracking.log_samples([Path("a.png")], 3)
    tracking.finish(ExitCode.DONE)
    assert broken.steps == [1, 2]
    assert working.steps == [3, -1]
    plain = {"loss": 0.7, "grad_norm": 2.0, "learning_rate": 1e-4}
    assert working.values == [plain, plain, {**plain, "loss/cans": 0.5}]
    assert said == [
        "tracking: wandb failed and is now disabled; continuing without it (no route to host)"
    ]


def test_the_environment_is_left_alone_where_it_says_where_mlflow_is(
    demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = arguments(tmp_path, demo)
    for setting in ("spec.training.steps=1", "spec.tracking={trackers: [mlflow]}"):
        given += ["--set", setting]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "elsewhere").is_dir()
    assert not (tmp_path / "out" / "mlflow").exists()
    assert os.environ["MLFLOW_TRACKING_URI"] == (tmp_path / "elsewhere").as_uri()

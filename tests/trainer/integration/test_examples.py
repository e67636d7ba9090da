"""Every wish of the examples trains: two steps on the tiny model, with all else as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubelora_trainer.cli.demo import DemoPaths
from tests.trainer.integration.test_interruption import in_this_process

WISHES = sorted((Path(__file__).parents[3] / "examples" / "wishes").glob("*.yaml"))
TINY: dict[str, str] = {
    "spec.model": "{uri: pvc://demo/model}",
    "spec.dataset.resolution": "64",
    "spec.training.device": "cpu",
    "spec.training.steps": "2",
    "spec.training.epochs": "null",
    "spec.workers": "{gpusPerNode: 1}",
    "spec.output.push": "null",
    "spec.validation.inferenceSteps": "2",
    "spec.podTemplate": "{}",
}
"""What a real run has of its own: model, size, length and machine."""


@pytest.fixture(scope="module")
def claims(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each claim, with the demo's photographs wherever an example reads some."""
    root = tmp_path_factory.mktemp("claims")
    shutil.copytree(demo.model, root / "demo" / "model")
    for claim in ("photos", "adapters", "scratch"):
        (root / claim).mkdir()
    for folder in ("style", "style-new", "my-dog", "dogs", "bottles"):
        shutil.copytree(demo.photos, root / "photos" / folder)
    return root


def train(wish: str, claims: Path, **settings: str) -> Path:
    """Run the example; its output folder."""
    [file] = [file for file in WISHES if file.stem == wish]
    place: str = yaml.safe_load(file.read_text())["spec"]["output"]["uri"]
    given = ["train", str(file)]
    for path, value in (TINY | settings).items():
        given += ["--set", f"{path}={value}"]
    for claim in ("demo", "photos", "adapters", "scratch"):
        given += ["--mount", f"{claim}={claims / claim}"]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    return claims / "adapters" / place.removeprefix("pvc://adapters/")


def manifest(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "manifest.json").read_text())
    assert found["state"] == "Done"
    return found


@pytest.mark.parametrize("wish", ["subject", "several-gpus", "small-gpu"])
def test_a_wish_trains(claims: Path, wish: str) -> None:
    output = train(wish, claims)
    assert manifest(output)["artifacts"]
    assert (output / "adapter" / "pytorch_lora_weights.safetensors").exists()


def test_a_style_trains_and_is_trained_on(claims: Path) -> None:
    manifest(train("style", claims))
    manifest(train("train-on", claims))


def test_a_run_that_watches_itself_is_held_against_the_last_one(claims: Path) -> None:
    first = train("watched", claims, **{"spec.health.baseline": "null"})
    first.rename(claims / "adapters" / "bottles-may")
    baseline = manifest(train("watched", claims))["record"]["baseline"]
    assert baseline["uri"] == "pvc://adapters/bottles-may"
    assert baseline["differences"] == []


@pytest.mark.parametrize("wish", ["push", "single-file"])
def test_a_wish_with_data_from_elsewhere_trains_on_a_folder_too(claims: Path, wish: str) -> None:
    """Buckets and the Hub have tests of their own."""
    settings = {"spec.dataset.uri": "pvc://photos/style", "spec.dataset.columns": "{}"}
    manifest(train(wish, claims, **settings, **{"spec.tracking.trackers": "[tensorboard]"}))

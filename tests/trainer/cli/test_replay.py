"""A recorded step computed again gives the bits that the run recorded, and bad input a sentence."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kubelora_api.names import OutputPath
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from kubelora_trainer.cli.replay import replay_lines
from kubelora_trainer.telemetry.gradient_dump import dumped_files
from kubelora_trainer.training.replay_run import FactorRow
from tests.trainer.integration.test_interruption import arguments, in_this_process


@pytest.fixture(scope="module")
def run(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    settings = ("checkpoint.everySteps=2", "training.steps=5", "training.gradientAccumulation=2")
    given = [*arguments(folder, demo), *(f"--set=spec.{setting}" for setting in settings)]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    return folder / "out"


def replay(run: Path, demo: DemoPaths, *given: str | Path, data: Path | None = None) -> Result:
    mounts = [f"--mount=model={demo.model}", f"--mount=data={data or demo.photos}"]
    words = [str(word) for word in (run, *given, *mounts)]
    return CliRunner().invoke(main, ["replay", *words])


@pytest.mark.parametrize("step", [1, 4])
def test_a_step_has_the_gradients_that_the_run_recorded(
    run: Path, demo: DemoPaths, tmp_path: Path, step: int
) -> None:
    before = sorted(str(file) for file in run.rglob("*"))
    done = replay(run, demo, "--step", str(step), "--micro-step", "1", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert "have the gradient that the run recorded" in done.output
    assert "gradients of 2 micro-steps" in done.output
    assert ("computed from its beginning" in done.output) is (step == 1)
    assert [f.name for f in dumped_files(tmp_path / OutputPath.GRADIENTS)] == [
        f"step-{step:06d}.micro-00{place}.safetensors" for place in (0, 1)
    ]
    assert sorted(str(file) for file in run.rglob("*")) == before


def test_what_can_not_be_replayed_is_explained(run: Path, demo: DemoPaths, tmp_path: Path) -> None:
    there = ("--output", tmp_path / "out")
    assert "has no step 9; it has 1 to 5" in replay(run, demo, "--step", "9", *there).output
    assert "no such folder" in replay(run / "absent", demo, "--step", "1", *there).output
    assert "not a run's output" in replay(demo.model, demo, "--step", "1", *there).output
    none = replay(run, demo, "--step", "4", "--micro-step", "7", *there)
    assert "step 4 has no micro-step 7; it has 0 to 1" in none.output
    fewer = tmp_path / "fewer"
    shutil.copytree(demo.photos, fewer)
    next(iter(fewer.glob("*.png")), next(iter(fewer.glob("*.jpg")), fewer)).unlink()
    changed = replay(run, demo, "--step", "4", *there, data=fewer)
    assert changed.exit_code == 2, changed.output
    other = tmp_path / "other"
    shutil.copytree(run, other)
    manifest = json.loads((other / OutputPath.MANIFEST).read_text())
    manifest["versions"]["torch"] = "1.0"
    (other / OutputPath.MANIFEST).write_text(json.dumps(manifest))
    assert "torch 1.0 then" in replay(other, demo, "--step", "4", *there).output


def test_another_gradient_is_the_hardwares_and_an_equal_one_is_not() -> None:
    equal = FactorRow("a.lora_A", 0.1 + 1e-9, 0.1)
    assert "look at the data and the code" in list(replay_lines([equal]))[-1]
    broken = FactorRow("a.lora_B", float("nan"), float("nan"))
    assert "look at the data and the code" in list(replay_lines([equal, broken]))[-1]
    other = FactorRow("a.lora_B", 0.2, 0.1)
    assert list(replay_lines([equal, other]))[-1].startswith("1 of 2 factors")
    assert "+1" in list(replay_lines([other]))[1]
    assert "nothing of this step" in list(replay_lines([FactorRow("a", 0.1, None)]))[-1]

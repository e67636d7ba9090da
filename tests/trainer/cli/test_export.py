"""A checkpoint's adapter is the one that a run of just that length would have ended with."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kubelora_api.names import OutputPath
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from tests.trainer.integration.test_interruption import arguments, in_this_process

KEEP = ("checkpoint.everySteps=2", "checkpoint.keep=9", "training.gradientAccumulation=1")
KINDS = {
    "plain": (),
    "averaged": ("training.ema={enabled: true}",),
    "text": ("adapter.textEncoders=[text_encoder, text_encoder_2]", "adapter.targets=all"),
}

ONE_KIND = pytest.mark.parametrize("runs", ["plain"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def runs(
    request: pytest.FixtureRequest, demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two runs of the same job, of four and of six steps."""
    folders = []
    for steps in (4, 6):
        folder = tmp_path_factory.mktemp(f"{request.param}{steps}")
        settings = [*KEEP, *KINDS[request.param], f"training.steps={steps}"]
        given = [*arguments(folder, demo), *(f"--set=spec.{setting}" for setting in settings)]
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        folders.append(folder / "out")
    return folders[0], folders[1]


def export(*given: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", *(str(text) for text in given)])


def test_a_checkpoint_gives_the_files_of_a_run_that_ended_there(
    runs: tuple[Path, Path], demo: DemoPaths, tmp_path: Path
) -> None:
    short, long = runs
    mounts = [f"--mount=model={demo.model}", f"--mount=data={demo.photos}"]
    done = export(f"{long}@4", "--output", tmp_path, *mounts)
    assert done.exit_code == 0, done.output
    for file in (short / OutputPath.ADAPTER).iterdir():
        assert (tmp_path / OutputPath.ADAPTER / file.name).read_bytes() == file.read_bytes()
        assert f"step 4: {tmp_path / OutputPath.ADAPTER / file.name}" in done.output
    newest = export(long, f"--model={demo.model}")
    assert newest.exit_code == 0, newest.output
    exported = long / OutputPath.EXPORTS / "step-000006" / OutputPath.ADAPTER
    for file in (long / OutputPath.ADAPTER).iterdir():
        assert (exported / file.name).read_bytes() == file.read_bytes()
    # The checkpoint's own directory names it as well.
    again = export(long / OutputPath.CHECKPOINTS / "step-000006", f"--model={demo.model}")
    assert again.exit_code == 0, again.output


@ONE_KIND
def test_advice_after_an_interruption_and_for_a_checkpoint_as_adapter_works(
    runs: tuple[Path, Path], demo: DemoPaths, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    shutil.rmtree(run / OutputPath.ADAPTER)
    (tmp_path / "next").mkdir()
    given = [
        *(*arguments(tmp_path / "next", demo), "--set=spec.training.gradientAccumulation=1"),
        "--set=spec.adapter.from=replaced",
    ]
    for place, advice in ((run, run), (run / "checkpoints/step-000004",) * 2):
        given[-1] = f"--set=spec.adapter.from={place}"
        refused = in_this_process(given)
        assert refused.exit_code == 2
        assert f"`kubelora export {advice}`" in refused.output


@ONE_KIND
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{run}@5", "holds no checkpoint of step 5; it has those of 2, 4, 6"),
        ("{run}@last", "expected RUN@STEP, such as {run}@500"),
        ("{run}x", "no such folder; did you mean '{run}'?"),
        ("{run}/adapter", "neither a run's output (it has no manifest.json)"),
        ("{run}/checkpoints/step-000003", "no such folder; did you mean"),
    ],
)
def test_what_names_no_checkpoint_is_explained(
    runs: tuple[Path, Path], source: str, sentence: str
) -> None:
    refused = export(source.format(run=runs[1]))
    assert refused.exit_code == 2
    assert sentence.format(run=runs[1]) in refused.output.replace("\n", " ")


@ONE_KIND
def test_a_damaged_checkpoint_is_never_exported(
    runs: tuple[Path, Path], demo: DemoPaths, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    for file in (run / "checkpoints/step-000004").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    refused = export(f"{run}@4", f"--model={demo.model}")
    assert refused.exit_code == 2
    assert "sha256 differs" in refused.output
    assert not (run / OutputPath.EXPORTS / "step-000004").exists()


@ONE_KIND
def test_another_model_is_refused(
    runs: tuple[Path, Path], full_demo: DemoPaths, tmp_path: Path
) -> None:
    refused = export(runs[1], f"--model={full_demo.model}", "--output", tmp_path / "x")
    assert refused.exit_code == 2
    assert "pass the run's own model with --model" in refused.output
    assert not (tmp_path / "x").exists()

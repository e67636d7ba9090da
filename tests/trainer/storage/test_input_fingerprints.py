"""A run goes on with the data and the model that it began with, or not at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.storage.input_fingerprints import check_same_inputs
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.training.hooks import RunHooks
from kubelora_trainer.utils.errors import OutputError
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.integration.test_interruption import arguments, in_this_process

STEPS = ("--set", "spec.training.steps=3")


def _stopped_at_step_2(given: list[str]) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        reached: list[int] = []
        patch.setattr(RunHooks, "draw_if_due", lambda self, to: reached.append(to.step))
        patch.setattr(StopRequest, "requested", property(lambda self: 2 in reached))
        return in_this_process(given)


def _caption(copy: DemoPaths) -> None:
    listing = copy.photos / "metadata.jsonl"
    listing.write_text(listing.read_text().replace("tabby cat", "striped cat"))


def _image_more(copy: DemoPaths) -> None:
    shutil.copy(copy.photos / "coins.png", copy.photos / "new.png")
    (copy.photos / "new.txt").write_text("more coins")


def _other_weights(copy: DemoPaths) -> None:
    file = copy.model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: 1.5 * value for name, value in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_caption, "the same number of images, but different bytes, captions, categories or order"),
        (_image_more, "8 usable images then, 9 now"),
        (_other_weights, "the base model in pvc://model changed since this run began"),
    ],
)
def test_an_interrupted_run_whose_inputs_changed_is_refused_and_goes_on_once_they_are_back(
    tmp_path: Path, demo: DemoPaths, edit: Callable[[DemoPaths], None], told: str
) -> None:
    copy = DemoPaths(tmp_path / "model", tmp_path / "photos")
    shutil.copytree(demo.model, copy.model)
    shutil.copytree(demo.photos, copy.photos)
    given = [*arguments(tmp_path, copy), *STEPS]
    assert _stopped_at_step_2(given).exit_code == 75
    checkpoints = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    edit(copy)
    refused = in_this_process(given)
    assert (refused.exit_code, told in refused.output) == (2, True), refused.output
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == checkpoints
    shutil.copytree(demo.model, copy.model, dirs_exist_ok=True)
    shutil.copy(demo.photos / "metadata.jsonl", copy.photos)
    (copy.photos / "new.png").unlink(missing_ok=True)
    (copy.photos / "new.txt").unlink(missing_ok=True)
    resumed = in_this_process(given)
    assert resumed.exit_code == 0, resumed.output
    assert "at step 2" in resumed.output


def test_without_a_checkpoint_a_run_begins_anew_with_what_is_there(
    tmp_path: Path, demo: DemoPaths
) -> None:
    copy = DemoPaths(demo.model, tmp_path / "photos")
    shutil.copytree(demo.photos, copy.photos)
    given = [*arguments(tmp_path, copy), *STEPS]
    assert _stopped_at_step_2(given).exit_code == 75
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    _image_more(copy)
    assert in_this_process(given).exit_code == 0
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())["record"]
    assert record["dataset_images"] == 9


def test_what_an_earlier_version_did_not_record_is_not_compared() -> None:
    now = RunRecord(dataset_sha256="a", dataset_images=3, model_sha256="b")
    check_same_inputs(RunRecord(), now, "data", "model")
    with pytest.raises(OutputError, match=r"data in data .* and the base model in model"):
        check_same_inputs(RunRecord(dataset_sha256="x", model_sha256="y"), now, "data", "model")

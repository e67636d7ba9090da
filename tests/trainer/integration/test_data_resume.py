"""A run resumes to the same bits in the middle of a window with every random choice of data on."""

import re
import shutil
from pathlib import Path

import pytest

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.integration.test_interruption import adapter, arguments, in_this_process

SETTINGS = (
    "spec.training.steps=6",
    "spec.training.batchSize=3",
    "spec.dataset.buckets={enabled: true, step: 8}",
    "spec.dataset.flip=0.5",
    "spec.dataset.captionDropout=0.3",
    'spec.dataset.captions={prefix: zwx, shuffleTags: true, separator: " "}',
)


@pytest.fixture
def photos(demo: DemoPaths, tmp_path: Path) -> DemoPaths:
    """The demo's photographs twice, so that the sizes have several micro-batches."""
    for copy in ("one", "two"):
        shutil.copytree(demo.photos, tmp_path / "photos" / copy)
    return DemoPaths(demo.model, tmp_path / "photos")


def test_a_run_stopped_while_its_data_is_looked_at_begins_anew(
    tmp_path: Path, demo: DemoPaths
) -> None:
    given = [*arguments(tmp_path, demo), "--set", "spec.training.steps=1"]
    with pytest.MonkeyPatch.context() as patch:
        left = iter(range(3))
        patch.setattr(StopRequest, "requested", property(lambda self: next(left, None) is None))
        stopped = in_this_process(given)
    assert stopped.exit_code == 75, stopped.output
    assert re.search("stopped while the data was checked, [1-7] of 8 images", stopped.output)
    assert in_this_process(given).exit_code == 0


LEARNING = {
    5: (),
    7: (
        "spec.adapter={textEncoders: [text_encoder, text_encoder_2], dropout: 0.1}",
        "spec.training.learningRates={'text_encoder.*': 0.0005}",
        "spec.training.gradientCheckpointing=true",
        "spec.training.ema={enabled: true}",
    ),
    8: (
        "spec.training.optimizer={name: prodigy, initialRate: 0.0001}",
        "spec.training.learningRate=1.0",
        "spec.training.ema={enabled: true}",
        "spec.adapter.dropout=0.1",
    ),
    12: (
        "spec.training.optimizer={name: adafactor, beta1: 0.9}",
        "spec.training.schedule={name: cosine_with_restarts, cycles: 2, warmupSteps: 2}",
        "spec.training.loraPlusRatio=4",
        "spec.adapter={targets: all, rank: 8}",
    ),
}


@pytest.mark.parametrize("asked", LEARNING)
def test_a_run_stopped_anywhere_resumes_to_the_same_bits(
    tmp_path: Path, photos: DemoPaths, asked: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    settings = [part for setting in (*SETTINGS, *LEARNING[asked]) for part in ("--set", setting)]
    done = in_this_process([*arguments(whole, photos), *settings])
    assert done.exit_code == 0, done.output
    assert "buckets: " in done.output

    given = [*arguments(parts, photos), *settings]
    with pytest.MonkeyPatch.context() as patch:
        left = iter(range(16 + asked))  # it is asked once for each of the 16 photographs first
        patch.setattr(StopRequest, "requested", property(lambda self: next(left, None) is None))
        patch.setattr(StopRequest, "name", "a test")
        stopped = in_this_process(given)
    assert stopped.exit_code == 75, stopped.output
    resumed = in_this_process(given)
    assert resumed.exit_code == 0, resumed.output
    assert "resuming from" in resumed.output
    assert adapter(parts) == adapter(whole)

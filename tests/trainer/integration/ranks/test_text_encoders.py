"""Text encoders with an adapter, trained by several ranks through `kubelora train`."""

from pathlib import Path

import pytest
import torch

from kubelora_trainer.cli.demo import DemoPaths
from tests.trainer.fixtures.torch_ranks import TWO, adapter, arguments, far, run

SETTINGS = (
    "spec.adapter.textEncoders=[text_encoder,text_encoder_2]",
    "spec.training.learningRates={'text_encoder.*': 0.0005}",
    "spec.dataset.captionDropout=0.3",
    'spec.dataset.captions={prefix: zwx, shuffleTags: true, separator: " "}',
)


@pytest.mark.parametrize(
    "beside",
    [(), ("spec.training.ema={enabled: true}", "spec.training.gradientCheckpointing=true")],
    ids=["plain", "averaged and recomputed"],
)
def test_two_ranks_train_the_text_encoders_that_one_trains(
    tmp_path: Path, demo: DemoPaths, forked: None, beside: tuple[str, ...]
) -> None:
    """fp32, windows of three micro-batches of two images: one rank does two, the other one."""
    given = [word for setting in (*SETTINGS, *beside) for word in ("--set", setting)]
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, ranks in ((one, ()), (two, TWO)):
        done = run([*arguments(folder, demo), *given, *ranks])
        assert done.exit_code == 0, done.output
    trained = adapter(two)
    for part in ("text_encoder.", "text_encoder_2.", "unet."):
        ups = [t for name, t in trained.items() if name.startswith(part) and "lora_B" in name]
        assert ups
        assert all(float(tensor.abs().max()) > 1e-5 for tensor in ups), "each layer has learned"
    assert far(adapter(one), trained) < 1e-6


def test_a_run_of_two_ranks_with_text_encoders_resumes_with_one_and_with_two(
    tmp_path: Path, demo: DemoPaths, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 2's checkpoint; two ranks go on to the bit, one to the last digits."""
    from kubelora_trainer.objective.sdxl_loss import SdxlObjective

    forward = SdxlObjective.__call__

    def dies(self: SdxlObjective, micro_step: int) -> object:
        if micro_step >= 7:
            raise RuntimeError("gone")
        return forward(self, micro_step)

    given = [word for setting in SETTINGS for word in ("--set", setting)]
    given += ["--set", "spec.checkpoint.everySteps=2"]
    whole = tmp_path / "whole"
    assert run([*arguments(whole, demo), *given, *TWO]).exit_code == 0
    for name, ranks in (("again two", TWO), ("then one", ())):
        cut = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(SdxlObjective, "__call__", dies)
            assert run([*arguments(cut, demo), *given, *TWO]).exit_code == 1
        resumed = run([*arguments(cut, demo), *given, *ranks])
        assert resumed.exit_code == 0, resumed.output
        if ranks:
            ours, theirs = adapter(cut), adapter(whole)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        else:
            assert far(adapter(cut), adapter(whole)) < 1e-6

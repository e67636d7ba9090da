"""A run with buckets of several sizes is resumed with other numbers of ranks: the same training."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from tests.trainer.fixtures.torch_ranks import adapter, arguments, far, run
from tests.trainer.integration.test_interruption import in_this_process

SETTINGS = (
    "training.batchSize=3",
    "dataset.buckets={enabled: true, step: 8}",
    "dataset.flip=0.5",
    "dataset.captionDropout=0.3",
    "checkpoint.everySteps=1",
)


@pytest.fixture(scope="module")
def photos(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """The demo's photographs twice, so that sizes have several micro-batches, some incomplete."""
    folder = tmp_path_factory.mktemp("photos")
    for copy in ("one", "two"):
        shutil.copytree(demo.photos, folder / copy)
    return DemoPaths(demo.model, folder)


@pytest.fixture(scope="module")
def whole(photos: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The adapter that one rank trains without a break."""
    folder = tmp_path_factory.mktemp("whole")
    done = in_this_process([*arguments(folder, photos), *settings()])
    assert done.exit_code == 0, done.output
    assert "buckets: " in done.output
    return adapter(folder)


def settings(*more: str) -> list[str]:
    return [word for setting in (*SETTINGS, *more) for word in ("--set", f"spec.{setting}")]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 2, 1)], ids=str)
def test_the_number_of_ranks_may_change_at_a_checkpoint_whatever_the_images_sizes(
    tmp_path: Path,
    photos: DemoPaths,
    whole: dict[str, torch.Tensor],
    forked: None,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sequence[int],
) -> None:
    """Each number of ranks but the last dies in the window after its own first step or steps."""
    forward = SdxlObjective.__call__
    for leg, size in enumerate(sizes):
        last = leg == len(sizes) - 1
        death = 12 if last else 3 * (leg + 1)

        def dies(self: SdxlObjective, micro_step: int, death: int = death) -> object:
            if micro_step >= death:
                raise RuntimeError("gone")
            return forward(self, micro_step)

        monkeypatch.setattr(SdxlObjective, "__call__", dies)
        given = [*arguments(tmp_path, photos), *settings(f"workers.gpusPerNode={size}")]
        ended = run(given) if size > 1 else in_this_process(given)
        assert ended.exit_code == (0 if last else 1), ended.output
        saved = max(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
        assert saved == ("step-000004" if last else f"step-00000{leg + 1}")
    assert far(adapter(tmp_path), whole) < 1e-6

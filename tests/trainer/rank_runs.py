"""`kubelora train` with several ranks, forked from this process, on the tiny model."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from kubelora_trainer.cli import main
from kubelora_trainer.demo import DemoPaths
from kubelora_trainer.launch import PEER_GRACE_SECONDS, RankEnd, Work, launch
from kubelora_trainer.seats import Layout, Seat
from kubelora_trainer.stop_request import RankStopRequest
from tests.trainer.gangs import DEADLINE_SECONDS, ended_by, showing_its_stack
from tests.trainer.test_cli import JOB

TWO = ("--set", "spec.workers.gpusPerNode=2")


def forking(
    stacks: Path, grace: float = PEER_GRACE_SECONDS
) -> Callable[[Work, Layout, Callable[[], bool]], tuple[RankEnd, ...]]:
    """A launcher whose ranks share what this process has imported and patched."""

    def fork(work: Work, layout: Layout, stop: Callable[[], bool]) -> tuple[RankEnd, ...]:
        with ended_by(DEADLINE_SECONDS, stacks):
            speaking = partial(_speaking, work, stacks)
            return launch(speaking, layout, stop, start_method="fork", grace=grace)

    return fork


def _speaking(work: Work, stacks: Path, seat: Seat, stop: RankStopRequest) -> None:
    """Rank's words go to the process's own streams, not to those of click's test runner."""
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    with showing_its_stack(stacks, seat.rank):
        work(seat, stop)


def arguments(folder: Path, demo: DemoPaths, steps: int = 4) -> list[str]:
    """A job of `steps` windows of three micro-batches of two images, all in fp32."""
    (folder / "out").mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(JOB)
    settings = (
        *(f"training.steps={steps}", "training.gradientAccumulation=3", "training.batchSize=2"),
        *("precision.compute=fp32", "output.dtype=fp32"),
    )
    return [
        *("train", str(folder / "job.yaml")),
        *(word for setting in settings for word in ("--set", f"spec.{setting}")),
        *("--mount", f"model={demo.model}", "--mount", f"data={demo.photos}"),
        *("--mount", f"output={folder / 'out'}"),
    ]


def run(given: list[str]) -> Result:
    return CliRunner().invoke(main, given)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "adapter" / "pytorch_lora_weights.safetensors")


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two adapters."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def manifest(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "out" / "manifest.json").read_text())
    return found

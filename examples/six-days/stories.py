"""The runs of the story: which settings each has, and what it left behind."""

import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from kubelora_trainer.cli.main import main

HERE = Path(__file__).parent
MAY = "May: rate 3e-4, all bf16"
JUNE = "June: rate 1e-4, all bf16"
SUMS = "fp32 accumulator alone"
WEIGHTS = "fp32 weights alone"
BOTH = "both fp32"
RESTORED = "both fp32, rate 3e-4"


@dataclass(frozen=True)
class Story:
    """One run. settings: fields of the job that differ, as ``--set`` takes them."""

    name: str
    folder: str
    settings: tuple[str, ...]


ACCUMULATOR = "spec.precision.accumulator=fp32"
MASTERS = "spec.precision.masterWeights=fp32"
BEFORE = "spec.training.learningRate=3.0e-4"

STORIES: tuple[Story, ...] = (
    Story(MAY, "may", (BEFORE,)),
    Story(JUNE, "june", ()),
    Story(SUMS, "fp32-accumulator", (ACCUMULATOR,)),
    Story(WEIGHTS, "fp32-weights", (MASTERS,)),
    Story(BOTH, "fp32-both", (ACCUMULATOR, MASTERS)),
    Story(RESTORED, "fp32-restored", (ACCUMULATOR, MASTERS, BEFORE)),
)


@dataclass(frozen=True)
class Told:
    """What a run left.

    loss: by step. groups: number by (field, group), by step; None where not measured.
    findings: name and the step since which it stands. update: B·A of each module.
    """

    loss: list[float]
    groups: dict[tuple[str, str], list[float | None]]
    findings: list[tuple[str, int]]
    update: dict[str, torch.Tensor]

    def mean(self, field: str, factor: str) -> list[float]:
        """Mean of a field over the groups of a factor, by step; NaN where none was measured."""
        series = [v for (f, group), v in self.groups.items() if f == field and factor in group]
        return [_mean([v for v in step if v is not None]) for step in zip(*series, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def run(story: Story, demo: Path, output: Path) -> Told:
    """Run the job as `kubelora train` does; its words go to ``<folder>.log``."""
    folder = output / story.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["train", str(HERE / "job.yaml")]
    for setting in story.settings:
        command += ["--set", setting]
    for claim, place in (
        ("demo-model", demo / "model"),
        ("demo-photos", demo / "photos"),
        ("six-days-output", folder),
    ):
        command += ["--mount", f"{claim}={place}"]
    log = output / f"{story.folder}.log"
    with log.open("w") as words, redirect_stdout(words), redirect_stderr(words):
        code = main(command, standalone_mode=False)  # in this process: imports are most of a start
    if code:
        raise SystemExit(f"{story.name}: kubelora train ended with {code}, see {log}")
    return read(folder)


def read(folder: Path) -> Told:
    """Read the result of the run in ``folder``."""
    factors = pq.read_table(folder / "metrics.parquet", columns=["step", "loss"]).to_pylist()
    losses = {row["step"]: row["loss"] for row in factors}
    groups: dict[tuple[str, str], list[float | None]] = {}
    for row in pq.read_table(folder / "groups.parquet").to_pylist():
        for field in row.keys() - {"step", "group"}:
            groups.setdefault((field, row["group"]), []).append(row[field])
    newest = sorted((folder / "checkpoints").glob("step-*/checkpoint.json"))[-1]
    found = json.loads(newest.read_text())["watch"]["found"]
    findings = sorted(((name, f["sinceStep"]) for name, f in found.items()), key=lambda f: f[1])
    weights = load_file(folder / "adapter" / "pytorch_lora_weights.safetensors")
    modules = {key.removesuffix(".lora_A.weight") for key in weights if ".lora_A." in key}
    update = {
        name: weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
        for name in sorted(modules)
    }
    return Told([losses[step] for step in sorted(losses)], groups, findings, update)

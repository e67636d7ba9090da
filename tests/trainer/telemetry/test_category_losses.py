"""Losses by category: exact sums, bounded names, through resumes, and in every place that tells."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.telemetry.category_losses import MAX_CATEGORIES, CategoryLosses, bounded_names
from kubelora_trainer.telemetry.step_metrics import CategoryLoss
from kubelora_trainer.training.step_reporter import significant
from tests.trainer.fixtures.jobs import job_spec, objective_on, open_base
from tests.trainer.integration.test_interruption import ENTRY, arguments, in_this_process

CPU = torch.device("cpu")


def _read(losses: CategoryLosses) -> dict[str, CategoryLoss]:
    taken = losses.take()
    return taken.read(taken.sums.flatten().tolist())


def test_each_category_has_the_mean_over_its_own_samples() -> None:
    losses = CategoryLosses(["cans", "bottles", "cans", "", "soft"], CPU)
    losses.add([0, 1], torch.tensor([1.0, 4.0]))
    losses.add([2, 3, 0], torch.tensor([2.0, 7.0, 6.0]))
    assert _read(losses) == {
        "bottles": CategoryLoss(4.0, 1),
        "cans": CategoryLoss(3.0, 3),
        "uncategorised": CategoryLoss(7.0, 1),
    }
    losses.add([4], torch.tensor([5.0]))
    assert _read(losses) == {"soft": CategoryLoss(5.0, 1)}


def test_the_largest_categories_keep_their_names_and_the_rest_are_pooled() -> None:
    """Twenty categories: c00 with one image to c19 with twenty."""
    categories = [f"c{n:02}" for n in range(20) for _ in range(n + 1)]
    names = bounded_names(categories)
    assert names == (*(f"c{n:02}" for n in range(5, 20)), "other")
    assert len(names) == MAX_CATEGORIES
    losses = CategoryLosses(categories, CPU)
    losses.add(list(range(len(categories))), torch.ones(len(categories)))
    read = _read(losses)
    assert read["other"] == CategoryLoss(1.0, 1 + 2 + 3 + 4 + 5)
    assert read["c19"] == CategoryLoss(1.0, 20)


def test_images_without_categories_have_no_losses_by_category() -> None:
    losses = CategoryLosses(["", ""], CPU)
    losses.add([0, 1], torch.ones(2))
    assert losses.names == ()
    assert _read(losses) == {}


def test_an_unfinished_window_is_carried_over_and_other_categories_begin_anew() -> None:
    first = CategoryLosses(["a", "b"], CPU)
    first.add([0, 1], torch.tensor([1.0, 2.0]))
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}, first.scalars()
    resumed = CategoryLosses(["a", "b"], CPU)
    resumed.load(*saved)
    resumed.add([0], torch.tensor([4.0]))
    assert _read(resumed) == {"a": CategoryLoss(2.5, 2), "b": CategoryLoss(2.0, 1)}
    changed = CategoryLosses(["a", "c", "d"], CPU)
    changed.load(*saved)
    assert _read(changed) == {}


def _with_categories(demo: DemoPaths, folder: Path) -> DemoPaths:
    shutil.copytree(demo.photos, folder)
    path = folder / "metadata.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for number, entry in enumerate(entries):
        entry["category"] = ("cans", "bottles", "soft")[number % 3]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return DemoPaths(demo.model, folder)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_a_run_logs_what_its_samples_lost_and_categories_add_up_to_the_loss(
    tmp_path: Path, demo: DemoPaths
) -> None:
    """Two runs of 4 steps of 3 micro-batches of 2: one whole, one stopped in a window's middle."""
    photos = _with_categories(demo, tmp_path / "photos")
    settings: dict[str, object] = {
        "steps": 4,
        "batchSize": 2,
        "gradientAccumulation": 3,
        "learningRate": 1e-3,
    }
    logs = []
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        given = arguments(tmp_path / name, photos)
        for key, value in settings.items():
            given += ["--set", f"spec.training.{key}={value}"]
        if name == "cut":
            _stop_after_the_first_step(given)
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        output = tmp_path / name / "out"
        logs.append(_rows(output / "categories.parquet"))
        loss = {row["step"]: row["loss"] for row in _rows(output / "metrics.parquet")}
        for step in range(1, 5):
            of_step = [row for row in logs[-1] if row["step"] == step]
            assert sum(row["samples"] for row in of_step) in (5, 6)
            weighted = sum(row["loss"] * row["samples"] for row in of_step)
            samples = sum(row["samples"] for row in of_step)
            assert weighted / samples == pytest.approx(loss[step], rel=1e-6)
        assert not (output / "categories.parts").exists()
    assert logs[0] == logs[1]

    # The first step's, with the base model alone: a fresh adapter changes nothing.
    job = job_spec(settings, {"flip": 0.0})
    objective = objective_on(open_base(demo.model, torch.bfloat16), photos, job)
    expected: dict[str, list[float]] = {}
    for micro_step in range(3):
        draws = objective.order.samples_of(micro_step)
        with torch.no_grad():
            losses = objective(micro_step).losses.tolist()
        for draw, value in zip(draws, losses, strict=True):
            category = objective._dataset.samples[draw.sample].category
            expected.setdefault(category, []).append(value)
    found = {row["category"]: row for row in logs[0] if row["step"] == 1}
    assert {name: row["samples"] for name, row in found.items()} == {
        name: len(values) for name, values in expected.items()
    }
    for name, values in expected.items():
        assert found[name]["loss"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    objective.close()


def _stop_after_the_first_step(given: list[str]) -> None:
    command = [sys.executable, "-u", "-c", ENTRY, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step=1/"):
                os.kill(process.pid, signal.SIGTERM)
                break
        process.communicate(timeout=300)
    assert process.returncode == 75


def test_what_is_told_to_people_has_four_digits() -> None:
    told = [significant(value) for value in (0.123456789, 12345.678, 1e-9, 0.0)]
    assert told == [0.1235, 12350.0, 1e-9, 0.0]

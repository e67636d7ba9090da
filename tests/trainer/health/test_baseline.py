"""A run held against an earlier one: two real tiny runs, and what is told of their differences."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kubelora_trainer.health.baseline import load_baseline
from kubelora_trainer.utils.errors import OutputError
from tests.trainer.fixtures.engine import Engine

# Wide enough that one draw is much like another, as in a real model.
STEPS: dict[str, Any] = {
    "width": 64,
    "rank": 8,
    "steps": 96,
    "gradientAccumulation": 4,
    "learningRate": 1e-3,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a finished run."""
    folder = tmp_path_factory.mktemp("good")
    engine = Engine(folder, **STEPS)
    engine.train()
    engine.run_log.finish()
    engine.folder.write_manifest("Done")
    return folder


def held_against(good: Path, path: Path, draws: int = 1, **training: Any) -> Engine:
    engine = Engine(path, baseline=good, draws=draws, **(STEPS | training))
    engine.train()
    return engine


def test_a_rate_cut_to_a_third_leaves_the_range_in_the_first_sixth(
    good: Path, tmp_path: Path
) -> None:
    engine = Engine(tmp_path, baseline=good, draws=1, **(STEPS | {"learningRate": 1e-3 / 3}))
    engine.train(micro_steps=17 * 4)  # the numbers of step 16 are read a step later
    finding = engine.reporter.watch.found["BaselineDeparture"]
    assert finding.severity == "critical"
    assert finding.group is not None
    assert finding.group.endswith("lora_A")
    assert finding.value == pytest.approx(1 / 3, rel=0.1)
    assert finding.since_step == 1
    assert "training.learningRate 0.000333333 (there 0.001)" in finding.message


@pytest.mark.parametrize("draws", range(1, 5))
def test_another_seed_stays_in_the_range(good: Path, tmp_path: Path, draws: int) -> None:
    engine = held_against(good, tmp_path, draws)
    assert engine.baseline is not None
    assert engine.baseline.envelope is not None
    assert engine.reporter.watch.found == {}
    assert engine.reporter.watch.detectors["passage"]["bin"] == engine.baseline.envelope.bins == 12


def test_a_run_cut_in_the_middle_of_a_bin_judges_as_the_whole_one(
    good: Path, tmp_path: Path
) -> None:
    given = STEPS | {"learningRate": 1e-3 / 3}
    whole = held_against(good, tmp_path / "whole", **given)
    cut = Engine(tmp_path / "cut", baseline=good, draws=1, **given)
    cut.train(micro_steps=83)
    again = Engine(tmp_path / "cut", baseline=good, draws=1, **given)
    again.train()
    assert again.reporter.watch == whole.reporter.watch


def test_a_run_under_way_serves_as_baseline_too(good: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "under way", **STEPS)
    engine.train(micro_steps=200)
    engine.folder.write_manifest("Interrupted")
    baseline = load_baseline(
        "pvc://a/b", tmp_path / "under way", engine.job.document(), {}, "draws 0", 96
    )
    assert baseline.envelope is not None
    assert [m is not None for m in baseline.envelope.middles["up.lora_A"]] == [True] * 6 + [
        False
    ] * 6


def test_settings_versions_and_data_that_differ_are_told(good: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path, **(STEPS | {"schedule": {"name": "cosine"}}))
    baseline = load_baseline(
        "pvc://a/good", good, engine.job.document(), {"torch": "9.9"}, "other", 96
    )
    differences = {d.field: (d.here, d.there) for d in baseline.record.differences}
    assert differences["training.schedule.name"] == ("cosine", "constant")
    assert differences["version of torch"][0] == "9.9"
    assert differences["data (sha256)"] == ("other", "draws 0")
    assert not any(field.startswith("output") for field in differences)
    assert "  training.schedule.name: cosine here, constant there" in baseline.report_lines()


def test_with_another_rank_batch_or_accumulation_norms_are_not_compared(
    good: Path, tmp_path: Path
) -> None:
    engine = Engine(tmp_path, **(STEPS | {"gradientAccumulation": 2}))
    baseline = load_baseline("pvc://a/good", good, engine.job.document(), {}, "draws 0", 96)
    assert baseline.envelope is None
    assert baseline.report_lines()[-1] == (
        "  gradient norms are not compared: training.gradientAccumulation differs, which "
        "changes gradient norms"
    )


@pytest.mark.parametrize(
    ("settings", "compared"),
    [
        ({}, True),
        ({"steps": 144}, True),
        ({"steps": 64}, True),
        ({"steps": 145}, False),
        ({"steps": 63}, False),
        ({"adapter": {"targets": "all"}}, False),
        ({"adapter": {"rankPattern": {"to_q": 4}}}, False),
        ({"adapter": {"alpha": 2.0}}, True),
    ],
)
def test_norms_are_compared_where_length_and_layers_are_alike(
    good: Path, settings: dict[str, Any], compared: bool
) -> None:
    job = json.loads((good / "manifest.json").read_text())["job"]
    steps = settings.get("steps", 96)
    job["spec"]["training"]["steps"] = steps
    job["spec"].setdefault("adapter", {}).update(settings.get("adapter", {}))
    baseline = load_baseline("pvc://a/good", good, job, {}, "draws 0", steps)
    assert (baseline.envelope is not None) == compared
    assert bool(baseline.record.not_compared) != compared


@pytest.mark.parametrize("damaged", ["manifest.json", "groups.parquet"])
def test_a_damaged_baseline_is_told_with_the_field_that_names_it(
    good: Path, tmp_path: Path, damaged: str
) -> None:
    place = shutil.copytree(good, tmp_path / "place")
    (place / damaged).write_bytes((place / damaged).read_bytes()[:100])
    with pytest.raises(OutputError, match=r"health\.baseline.*leave health\.baseline out"):
        load_baseline("x", place, {}, {}, "", 96)


@pytest.mark.parametrize("left", ["nothing", "no log"])
def test_what_is_no_run_is_refused_and_a_run_without_log_only_compared_by_settings(
    good: Path, tmp_path: Path, left: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    if left == "nothing":
        with pytest.raises(OutputError, match=r"health\.baseline x: no manifest\.json there"):
            load_baseline("x", place, {}, {}, "", 96)
        return
    shutil.copy(good / "manifest.json", place)
    told = load_baseline(
        "x", place, json.loads((good / "manifest.json").read_text())["job"], {}, "", 96
    )
    assert told.record.not_compared == "it has no groups.parquet"

"""A run on a constant schedule can be lengthened, and is then the longer run to the bit."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

from kubelora_api.job import LoraTrainingJob
from kubelora_api.training_spec import Schedule, ScheduleName
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.health.detector import RunStart
from kubelora_trainer.health.detectors.baseline_departure import BaselineDeparture
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.lr_schedule import rate_share
from kubelora_trainer.storage.output_dir import Manifest, OutputFolder, claim_output, read_manifest
from kubelora_trainer.storage.run_length import check_end_not_passed, depends_on_length
from kubelora_trainer.utils.errors import OutputError
from tests.trainer.fixtures.engine import Engine, job
from tests.trainer.integration.test_interruption import adapter, arguments, in_this_process


def claim(
    path: Path, of: LoraTrainingJob, said: list[str] | None = None
) -> OutputFolder | Manifest:
    heard: list[str] = [] if said is None else said
    return claim_output(path, of, None, heard.append)


def end(path: Path, of: LoraTrainingJob, *, pushed: str = "") -> OutputFolder:
    """A run that is done."""
    folder = claim(path, of)
    assert isinstance(folder, OutputFolder)
    folder.record = folder.record.model_copy(update={"pushed": pushed})
    folder.write_manifest("Done")
    return folder


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_only_a_schedule_whose_rates_do_not_follow_the_length_lets_it_change(
    name: ScheduleName,
) -> None:
    schedule = Schedule(name=name, warmup_steps=5)
    alike = all(
        rate_share(schedule, step, 10) == rate_share(schedule, step, total)
        for step in range(10)
        for total in (11, 20, 1000)
    )
    assert depends_on_length(schedule) is not alike


def test_ten_steps_lengthened_to_twenty_are_twenty_at_once_to_the_bit(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """The warm-up is longer than the first part, the average's decay warms up too."""

    def train(folder: Path, steps: int) -> str:
        if not folder.exists():
            folder.mkdir()
            arguments(folder, demo)
        given = [
            *("train", str(folder / "job.yaml"), "--set", f"spec.training.steps={steps}"),
            *("--set", "spec.training.schedule={name: constant, warmupSteps: 12}"),
            *("--set", "spec.training.ema={enabled: true}", "--set", "spec.output.dtype=fp32"),
            *("--mount", f"model={demo.model}", "--mount", f"data={demo.photos}"),
            *("--mount", f"output={folder / 'out'}"),
        ]
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        return done.output

    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train(whole, 20)
    train(longer, 10)
    output = train(longer, 20)
    assert "continues with another length, spec.training.steps: 10 -> 20" in output
    assert "at step 10" in output
    assert adapter(longer) == adapter(whole)
    for table in ("metrics.parquet", "groups.parquet"):
        tables = [pq.read_table(folder / "out" / table) for folder in (whole, longer)]
        assert tables[0].to_pylist() == tables[1].to_pylist(), table
    manifests = [json.loads((f / "out" / "manifest.json").read_text()) for f in (whole, longer)]
    assert [m["record"]["total_steps"] for m in manifests] == [20, 20]
    assert manifests[1]["state"] == "Done"
    assert "nothing to do" in train(longer, 20)


def test_a_finished_run_of_more_steps_is_open_again_and_to_be_pushed_again(tmp_path: Path) -> None:
    before = end(tmp_path, job(), pushed="s3://adapters/x")
    assert isinstance(claim(tmp_path, job()), Manifest)
    said: list[str] = []
    folder = claim(tmp_path, job(steps=9), said)
    assert isinstance(folder, OutputFolder)
    assert (folder.run_id, folder.attempt) == (before.run_id, 2)
    assert folder.record.pushed == ""
    assert said == [
        f"{tmp_path}: run {before.run_id} continues with another length, "
        "spec.training.steps: 6 -> 9"
    ]
    found = read_manifest(tmp_path)
    assert found is not None
    assert (found.state, found.job["spec"]["training"]["steps"]) == ("Running", 9)


def test_epochs_can_be_added_as_steps_can(tmp_path: Path) -> None:
    end(tmp_path, job(steps=None, epochs=2))
    assert isinstance(claim(tmp_path, job(steps=None, epochs=3)), OutputFolder)
    with pytest.raises(OutputError, match="other settings"):
        claim(tmp_path, job(steps=40))


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_schedule_that_falls_to_its_end_says_why_and_what_to_do(
    tmp_path: Path, name: str
) -> None:
    end(tmp_path, job(schedule={"name": name}))
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(OutputError) as refused:
        claim(tmp_path, job(schedule={"name": name}, steps=9))
    assert f"With the schedule {name} every step" in str(refused.value)
    assert "spec.adapter.from: out/adapter and another spec.output.uri" in str(refused.value)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_another_length_with_another_setting_is_another_run(tmp_path: Path) -> None:
    end(tmp_path, job())
    with pytest.raises(OutputError, match=r"training.seed: 0 -> 1; spec.training.steps: 6"):
        claim(tmp_path, job(steps=9, seed=1))


def test_a_run_may_end_earlier_as_long_as_it_has_not_passed_that_step(tmp_path: Path) -> None:
    claim(tmp_path, job(steps=20))
    assert isinstance(claim(tmp_path, job(steps=10)), OutputFolder)
    check_end_not_passed(10, 10)
    with pytest.raises(OutputError, match="11 steps of this run are done, so it can't end"):
        check_end_not_passed(11, 10)
    end(tmp_path, job(steps=10))
    with pytest.raises(OutputError, match="It is done, and can only be extended"):
        claim(tmp_path, job(steps=6))


def test_a_run_that_has_passed_its_new_end_is_refused_before_anything_moves(
    demo: DemoPaths, tmp_path: Path
) -> None:
    given = [*arguments(tmp_path, demo), "--set", "spec.health.policy=Warn"]
    first = in_this_process([*given, "--set", "spec.training.steps=4"])
    assert first.exit_code == 0, first.output
    saved = adapter(tmp_path)
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"Done"', '"Interrupted"'))
    refused = in_this_process([*given, "--set", "spec.training.steps=2"])
    assert refused.exit_code == 2, refused.output
    assert "4 steps of this run are done, so it can't end at 2" in refused.output
    again = in_this_process([*given, "--set", "spec.training.steps=4"])
    assert again.exit_code == 0, again.output
    assert adapter(tmp_path) == saved


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_anew(
    demo: DemoPaths, tmp_path: Path
) -> None:
    given = arguments(tmp_path, demo)
    first = in_this_process([*given, "--set", "spec.training.steps=2"])
    assert "restarts at its first step" not in first.output
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    longer = in_this_process([*given, "--set", "spec.training.steps=3"])
    assert longer.exit_code == 0, longer.output
    assert "no checkpoint of this run is left, so it restarts at its first step" in longer.output
    steps = pq.read_table(tmp_path / "out" / "metrics.parquet")["step"].to_pylist()
    assert sorted(set(steps)) == [1, 2, 3]
    assert steps.count(1) == steps.count(3)


@pytest.mark.parametrize("resumed", [4, 3])
def test_the_finished_log_of_a_run_that_goes_on_has_every_step_once(
    tmp_path: Path, resumed: int
) -> None:
    """resumed 3: the checkpoint of the last step was damaged."""
    whole = Engine(tmp_path / "whole", steps=6)
    whole.train()
    whole.run_log.finish()
    short = Engine(tmp_path / "short", steps=4)
    short.train(every=1)
    short.run_log.finish()
    for saved in short.saved:
        if saved.step > resumed:
            saved.path.rename(saved.path.with_name(".gone"))
    longer = Engine(tmp_path / "short", steps=6)
    assert longer.position.step == resumed
    longer.train()
    longer.run_log.finish()
    for table in ("metrics.parquet", "groups.parquet"):
        found = [pq.read_table(tmp_path / name / table).to_pylist() for name in ("whole", "short")]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("planned_before", "bins"), [(100, 3), (None, 3), (200, 0)], ids=["same", "unknown", "other"]
)
def test_progress_on_another_length_is_compared_with_the_baseline_again(
    tmp_path: Path, planned_before: int | None, bins: int
) -> None:
    engine = Engine(tmp_path)
    departure = BaselineDeparture(None, total_steps=100)
    departure.load({"passage": {"bin": 3, "beyond": {"down.lora_A": 1}}})
    resumed = RunStart("resumed", engine.buffers, engine.optimizer, planned_before=planned_before)
    departure.on_start(resumed, WatchState())
    assert departure.state()["passage"]["bin"] == bins
    assert len(departure.state()["passage"]["beyond"]) == (1 if bins else 0)

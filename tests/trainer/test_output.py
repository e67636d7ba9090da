"""Whose output folder it is, and who may write there."""

import json
from pathlib import Path

import pytest

from kubelora_api.job import LoraTrainingJob
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.output import Manifest, OutputFolder, claim_output, read_manifest, run_id_of
from tests.trainer.engine import job


def claim(path: Path, of: LoraTrainingJob, attempt: int | None = None) -> OutputFolder | Manifest:
    return claim_output(path, of, attempt, lambda sentence: None)


def changed(of: LoraTrainingJob, group: str, **fields: object) -> LoraTrainingJob:
    part = getattr(of.spec, group).model_copy(update=fields)
    return of.model_copy(update={"spec": of.spec.model_copy(update={group: part})})


def test_the_run_id_is_the_uid_in_a_cluster() -> None:
    in_cluster = job()
    in_cluster = in_cluster.model_copy(
        update={"metadata": in_cluster.metadata.model_copy(update={"uid": "0f-1e"})}
    )
    assert run_id_of(in_cluster) == "0f-1e"


def test_the_run_id_changes_with_what_decides_the_weights_alone() -> None:
    one = job()
    assert run_id_of(one) == run_id_of(job())
    assert run_id_of(one) != run_id_of(changed(one, "training", seed=1))
    assert run_id_of(one) != run_id_of(changed(one, "adapter", rank=3))
    for group, fields in (
        ("health", {"policy": "Fail"}),
        ("checkpoint", {"every_steps": 3}),
        ("output", {"replace_existing": True}),
        ("dataset", {"cache": "elsewhere"}),
    ):
        assert run_id_of(one) == run_id_of(changed(one, group, **fields)), group


def test_the_manifest_tells_job_versions_attempt_and_state(tmp_path: Path) -> None:
    claim(tmp_path / "out", job())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["state"] == "Running"
    assert manifest["attempt"] == 1
    assert manifest["job"]["spec"]["adapter"]["rank"] == 16  # a default, filled in
    assert set(manifest["versions"]) >= {"torch", "diffusers", "peft", "transformers", "kubelora"}


def test_attempts_count_on_locally_and_follow_the_operator_in_a_pod(tmp_path: Path) -> None:
    assert [getattr(claim(tmp_path, job()), "attempt", None) for _ in range(3)] == [1, 2, 3]
    assert getattr(claim(tmp_path, job(), attempt=7), "attempt", None) == 7


def test_a_finished_run_is_told_as_done(tmp_path: Path) -> None:
    folder = claim(tmp_path, job())
    assert isinstance(folder, OutputFolder)
    folder.write_manifest("Done")
    assert isinstance(claim(tmp_path, job()), Manifest)


def test_another_runs_output_is_refused(tmp_path: Path) -> None:
    claim(tmp_path, job())
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ConfigurationError, match=r"holds run \w+'s output .*replaceExisting"):
        claim(tmp_path, changed(job(), "training", seed=1))
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_replacing_clears_the_other_runs_files_and_nothing_else(tmp_path: Path) -> None:
    claim(tmp_path, job())
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "holiday.jpg").write_text("mine")
    other = changed(changed(job(), "training", seed=1), "output", replace_existing=True)
    claim(tmp_path, other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["holiday.jpg", "manifest.json"]
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.run_id == run_id_of(other)


def test_replacing_does_not_clear_ones_own_checkpoints(tmp_path: Path) -> None:
    same = changed(job(), "output", replace_existing=True)
    claim(tmp_path, same)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    claim(tmp_path, same)
    assert (tmp_path / "checkpoints" / "step-000001").exists()


def test_output_without_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigurationError, match="an unknown run's output"):
        claim(tmp_path, job())


def test_a_foreign_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not a manifest of this program"):
        claim(tmp_path, job())


def test_a_place_that_cannot_be_made_is_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="can't write to /sys/kubelora"):
        claim(Path("/sys/kubelora"), job())

"""Whose output folder it is, and who may write there."""

import json
import re
from pathlib import Path

import pytest

from kubelora_api.documents import parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_trainer.storage.output_dir import (
    Manifest,
    OutputFolder,
    claim_output,
    read_manifest,
    run_id_of,
)
from kubelora_trainer.utils.errors import OutputError
from tests.trainer.fixtures.engine import job


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


def test_the_manifest_holds_nothing_of_the_pod_template_and_no_annotation(tmp_path: Path) -> None:
    secret = "hunter2"
    document = job().document()
    document["spec"]["podTemplate"] = {
        "env": [{"name": "HF_TOKEN", "value": secret}],
        "annotations": {"example.com/key": secret},
    }
    document["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied": secret}
    claim(tmp_path / "out", parse_job(document, local=True))
    written = [p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert written
    assert not any(secret in text for text in written)


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
    with pytest.raises(OutputError, match=r"contains run \w+'s output .*replaceExisting"):
        claim(tmp_path, changed(job(), "training", seed=1))
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_what_changed_is_told_field_by_field(tmp_path: Path) -> None:
    claim(tmp_path, job())
    other = changed(changed(job(), "training", seed=1), "adapter", rank=8, alpha=4.0)
    with pytest.raises(OutputError) as refused:
        claim(tmp_path, other)
    assert (
        "other settings: spec.adapter.alpha: not set -> 4.0; spec.adapter.rank: 16 -> 8; "
        "spec.training.seed: 0 -> 1. To continue it, restore them (spec.health, checkpoint, "
        "tracking, workers, podTemplate, queueName, suspend, restartPolicy, "
        "activeDeadlineSeconds, pendingDeadlineSeconds, ttlSecondsAfterFinished, "
        "dataset.captions.maxMissing, dataset.cache, "
        "output.dtype, output.push and output.replaceExisting may change)."
    ) in str(refused.value)


def in_a_cluster(of: LoraTrainingJob, uid: str = "0f-1e") -> LoraTrainingJob:
    return of.model_copy(update={"metadata": of.metadata.model_copy(update={"uid": uid})})


def test_a_job_of_the_same_uid_with_other_settings_is_refused_too(tmp_path: Path) -> None:
    claim(tmp_path, in_a_cluster(job()), attempt=1)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(
        OutputError,
        match=r"run 0f-1e was started with other settings \(spec\.training\.steps: 6 -> 9\)",
    ):
        claim(tmp_path, in_a_cluster(changed(job(), "training", steps=9)), attempt=2)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_what_decides_no_weight_may_change_between_attempts(tmp_path: Path) -> None:
    for wrap in (lambda of: of, in_a_cluster):
        place = tmp_path / wrap.__name__
        claim(place, wrap(job()))
        again = changed(changed(job(), "checkpoint", every_steps=7), "output", dtype="fp32")
        assert isinstance(claim(place, wrap(again)), OutputFolder)


def test_many_changes_are_cut_short(tmp_path: Path) -> None:
    claim(tmp_path, job())
    fields = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay", "initial_rate"), 0.5)
    optimizer = job().spec.training.optimizer.model_copy(update=fields)
    other = changed(
        job(), "training", optimizer=optimizer, seed=1, steps=9, batch_size=2, max_grad_norm=2.0
    )
    other = changed(other, "adapter", rank=8, alpha=4.0, dropout=0.5)
    with pytest.raises(OutputError, match=r"; and 2 more\. To continue"):
        claim(tmp_path, other)


def recorded_by_an_earlier_version(folder: Path) -> None:
    """The manifest of a version that knew neither averages nor seeds, with another torch."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["job"]["spec"]["training"]["ema"]
    del manifest["job"]["spec"]["training"]["seed"]
    manifest |= {"run_id": "earlier", "versions": manifest["versions"] | {"torch": "2.0"}}
    file.write_text(json.dumps(manifest))


def test_a_field_that_is_new_since_the_run_began_is_no_change(tmp_path: Path) -> None:
    claim(tmp_path, job())
    recorded_by_an_earlier_version(tmp_path)
    sentences: list[str] = []
    folder = claim_output(tmp_path, job(), None, sentences.append)
    assert isinstance(folder, OutputFolder)
    assert (folder.run_id, folder.attempt) == ("earlier", 2)
    assert len(sentences) == 1
    assert re.search(r'started with other versions \(torch: "2\.0" -> "\d', sentences[0])
    recorded_by_an_earlier_version(tmp_path)
    with pytest.raises(OutputError, match=r"spec\.training\.seed: 0 -> 1\. To continue"):
        claim(tmp_path, changed(job(), "training", seed=1))


@pytest.mark.parametrize("recorded", [{"spec": [1]}, {"spec": {"model": 3}, "metadata": 4}, {}])
def test_a_manifest_whose_job_is_none_differs_in_everything(
    tmp_path: Path, recorded: dict[str, object]
) -> None:
    claim(tmp_path, job())
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"job": recorded}))
    with pytest.raises(OutputError, match="was started with other settings"):
        claim(tmp_path, job())


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
    """Also where replacing is allowed: they may be the user's own."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "mine.png").write_text("mine")
    for replace in (False, True):
        with pytest.raises(OutputError, match=r"contains samples, but no manifest\.json to"):
            claim(tmp_path, changed(job(), "output", replace_existing=replace))
    assert (tmp_path / "samples" / "mine.png").read_text() == "mine"


def test_a_foreign_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match="not a manifest of this program"):
        claim(tmp_path, job())


def test_a_place_that_cannot_be_made_is_a_sentence() -> None:
    with pytest.raises(OutputError, match="can't write to /sys/kubelora"):
        claim(Path("/sys/kubelora"), job())


@pytest.mark.parametrize("left", ["", "checkpoints/step-000002/manifest.json", "gradients/a.npz"])
def test_a_first_attempt_that_failed_before_a_checkpoint_does_not_bar_the_next(
    tmp_path: Path, left: str
) -> None:
    first = claim(tmp_path, job())
    assert isinstance(first, OutputFolder)
    (tmp_path / "preflight.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    if left:
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_text("kept")
    advised = changed(job(), "training", learning_rate=1e-5)
    with pytest.raises(OutputError, match="other settings"):  # it may be running
        claim(tmp_path, advised)
    first.write_manifest("Failed", "metadata.csv was not read")
    said: list[str] = []
    if left:
        with pytest.raises(OutputError, match="other settings"):
            claim_output(tmp_path, advised, None, said.append)
        return
    again = claim_output(tmp_path, advised, None, said.append)
    assert isinstance(again, OutputFolder)
    assert again.attempt == 1
    assert not (tmp_path / "preflight.json").exists()
    assert "because that run ended before its first checkpoint" in said[0]

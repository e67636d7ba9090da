"""Job files mean on a laptop what they mean to kubectl, and mistakes are told by file and line."""

import json
from pathlib import Path

import pytest
import yaml

from kubelora_trainer.cli.job_file import apply_settings, load_job, load_job_documents
from kubelora_trainer.cli.validate import validate_files
from kubelora_trainer.utils.errors import ConfigurationError

JOB = """\
apiVersion: kubelora.dev/v1alpha1
kind: LoraTrainingJob
metadata:
  name: bottles
spec:
  model: {uri: pvc://models/sdxl}
  dataset: {uri: pvc://photos}
  adapter:
    rank: 64
  training:
    steps: 20
    learningRate: 1e-4
  output: {uri: pvc://out}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def edited(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_number_in_scientific_notation_is_a_number(job: Path) -> None:
    assert load_job(str(job)).spec.training.learning_rate == 0.0001


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2", -2),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 15),
        ("1_000", 1000),
        ("2026-11-30", "2026-11-30"),
        ("1:30", "1:30"),
        ("true", True),
        ("null", None),
        ("'7'", "7"),
        ("1.2.3", "1.2.3"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_values_are_read_as_kubectl_reads_them(text: str, value: object) -> None:
    found = apply_settings({}, [f"x={text}"])["x"]
    assert found == value
    assert type(found) is type(value)


def test_a_mistake_is_told_with_file_and_line(job: Path) -> None:
    path = edited(job, "rank: 64", "rank: -1")
    with pytest.raises(ConfigurationError) as refused:
        load_job(path)
    assert str(refused.value) == f"{path}:9: spec.adapter.rank: must be at least 1, found -1"


def test_an_absent_field_is_placed_at_its_parent(job: Path) -> None:
    path = edited(job, "  output: {uri: pvc://out}\n", "  output: {}\n")
    with pytest.raises(ConfigurationError) as refused:
        load_job(path)
    assert str(refused.value) == f"{path}:13: spec.output.uri: required, but not set"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "    rank: 64\n",
            "    rank: 64\n    rank: 8\n",
            ":10: not valid YAML: the key 'rank' appears twice",
        ),
        ("  name: bottles", "  name: [bottles", "not valid YAML"),
        ("kind: LoraTrainingJob", "kind: Pod\n", "found apiVersion|expected apiVersion"),
        ("apiVersion: kubelora.dev/v1alpha1", "apiVersion: kubelora.dev/v2", "v1alpha1"),
        ("rank: 64", "rank: 0x_", ":9: not valid YAML: not a valid int: '0x_'"),
        ("rank: 64", f"rank: 0x{'f' * 5000}", ":9: not valid YAML: not a valid int: '0xff"),
        ("rank: 64", "rank: !!float x", ":9: not valid YAML: not a valid float: 'x'"),
        ("rank: 64", "rank: !!bool maybe", ":9: not valid YAML: not a valid bool: 'maybe'"),
        (
            "rank: 64",
            "rank: !!timestamp 2020-99-99",
            ":9: not valid YAML: not a valid timestamp: '2020",
        ),
        ("name: bottles", 'name: "\\ud83d"', ":4: not valid YAML: half a character"),
        ("rank: 64", "rank: " + "[" * 3000, ": nested too deeply for a job file"),
    ],
)
def test_a_broken_file_is_a_sentence(job: Path, old: str, new: str, sentence: str) -> None:
    path = edited(job, old, new)
    with pytest.raises(ConfigurationError, match=sentence.replace("[", r"\[")) as refused:
        load_job(path)
    assert str(refused.value).startswith(path)


def test_a_missing_file_and_one_that_is_not_text_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: no such file"):
        load_job_documents(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigurationError, match="is a directory"):
        load_job_documents(str(tmp_path))
    (tmp_path / "job.yaml").write_bytes(b"kind: \x92")
    with pytest.raises(ConfigurationError, match="not UTF-8 at byte 6"):
        load_job_documents(str(tmp_path / "job.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigurationError, match="no LoraTrainingJob in this file"):
        load_job_documents(str(tmp_path / "empty.yaml"))


def test_an_emoji_is_read_from_yaml_and_from_both_spellings_of_json(job: Path) -> None:
    """JSON may write it as two escapes, which is how a pod gets its job."""
    document = yaml.safe_load(JOB.replace("1e-4", "0.0001"))
    document["spec"]["validation"] = {"prompts": ["a 😀 bottle"]}
    for text in (
        json.dumps(document),
        json.dumps(document, ensure_ascii=False),
        yaml.safe_dump(document),
        yaml.safe_dump(document, allow_unicode=True),
    ):
        job.write_text(text)
        assert load_job(str(job)).spec.validation.prompts == ["a 😀 bottle"]
    assert apply_settings({}, [r'a="\ud83d\ude00"']) == {"a": "😀"}


def test_json_indented_by_tabs_is_read_and_keeps_its_lines(job: Path) -> None:
    document = yaml.safe_load(JOB.replace("1e-4", "0.0001"))
    job.write_text(json.dumps(document, indent="\t"))
    assert load_job(str(job)).metadata.name == "bottles"
    line = next(n for n, text in enumerate(job.read_text().split("\n"), 1) if '"rank"' in text)
    path = edited(job, '"rank": 64', '"rank": 0')
    with pytest.raises(ConfigurationError, match=rf"job\.yaml:{line}: spec\.adapter\.rank"):
        load_job(path)


def test_empty_documents_are_left_out(job: Path) -> None:
    """A template that rendered nothing leaves them."""
    job.write_text(f"---\n---\n{JOB}---\n---\n# the end\n")
    assert load_job(str(job)).metadata.name == "bottles"


def test_other_objects_in_the_file_are_left_alone(job: Path) -> None:
    job.write_text(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: photos}\n---\n" + JOB
    )
    assert load_job(str(job)).metadata.name == "bottles"


def test_settings_change_a_copy(job: Path) -> None:
    settings = ["spec.training.steps=3", "spec.precision.compute=fp32", "spec.adapter.alpha=8"]
    spec = load_job(str(job), settings).spec
    assert (spec.training.steps, spec.precision.compute, spec.adapter.alpha) == (3, "fp32", 8)
    assert load_job(str(job)).spec.training.steps == 20


@pytest.mark.parametrize(
    "setting",
    ["spec.training.steps", "=3", "spec..steps=1", "spec.adapter.rank.deep=1", "spec.x[0]=1"],
)
def test_a_setting_that_sets_nothing_is_refused(job: Path, setting: str) -> None:
    with pytest.raises(ConfigurationError, match="--set"):
        load_job(str(job), [setting])


def test_a_wrong_setting_names_the_field(job: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.training\.steps: must be at least 1"):
        load_job(str(job), ["spec.training.steps=0"])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("spec.training.steps=0", "spec.training.steps: must be at least 1, found 0"),
        ("spec.adapter={rank: 0}", "spec.adapter.rank: must be at least 1, found 0"),
        ("spec.tracking.trackers=[7]", "spec.tracking.trackers[0]: must be "),
    ],
)
def test_what_a_setting_makes_wrong_is_told_with_the_setting_and_no_line_of_the_file(
    job: Path, setting: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_job(str(job), [setting])
    assert str(refused.value).startswith(f"--set {setting}: {problem}")


def test_what_the_file_makes_wrong_keeps_its_line_beside_a_setting(job: Path) -> None:
    path = edited(job, "rank: 64", "rank: -1")
    with pytest.raises(ConfigurationError) as refused:
        load_job(path, ["spec.training.steps=3", "spec.adapter.rankPattern={}"])
    assert str(refused.value).startswith(f"{path}:9: spec.adapter.rank: must be at least 1")


def test_a_setting_of_a_field_that_there_is_not_names_the_one_that_was_meant(job: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_job(str(job), ["training.steps=5"])
    assert str(refused.value) == (
        "--set training.steps=5: training is not a field; did you mean 'spec.training.steps'?"
    )


def test_a_file_that_is_not_there_is_answered_with_the_one_beside_it(job: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"jbo\.yaml: no such .*mean '{job}'\?"):
        load_job_documents(str(job.with_name("jbo.yaml")))


def test_validation_tells_of_every_file(job: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(JOB.replace("rank: 64", "rank: 0"))
    assert validate_files([str(job)], local=False, against=None) == [f"{job}: bottles: valid"]
    with pytest.raises(ConfigurationError) as refused:
        validate_files([str(job), str(wrong), str(tmp_path / "none")], local=False, against=None)
    assert len(str(refused.value).splitlines()) == 2


def test_what_is_wrong_with_the_running_resource_is_told_in_its_own_file(
    job: Path, tmp_path: Path
) -> None:
    running = tmp_path / "running.yaml"
    running.write_text(JOB.replace("    rank: 64\n", "    # none\n    rank: 0\n"))
    with pytest.raises(ConfigurationError, match=r"^\S+running\.yaml:10: spec\.adapter\.rank"):
        validate_files([str(job)], local=False, against=str(running))


def test_several_jobs_are_named_also_those_without_a_name(job: Path) -> None:
    job.write_text(JOB + "---\n" + JOB.replace("metadata:\n  name: bottles", "metadata: []"))
    with pytest.raises(ConfigurationError, match=r"holds 2 jobs \(bottles, no name\)"):
        load_job(str(job))


def test_a_change_of_a_started_job_is_judged_against_the_running_one(
    job: Path, tmp_path: Path
) -> None:
    running = tmp_path / "running.yaml"
    running.write_text(JOB + "status: {attempt: 1}\n")
    assert validate_files([str(job)], local=False, against=str(running))
    path = edited(job, "rank: 64", "rank: 8")
    with pytest.raises(ConfigurationError, match=r"job\.yaml:8: spec\.adapter: cannot change"):
        validate_files([path], local=False, against=str(running))
    running.write_text(JOB)
    assert validate_files([path], local=False, against=str(running))

"""`kubelora explain`, from the command line to the sentence."""

import pytest
from click.testing import CliRunner

from kubelora_api.field_docs import field_docs
from kubelora_trainer.cli.main import main


def explained(*given: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["explain", *given])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "path", ["spec.training.batchSize", "training.batchSize", "ltj.spec.training.batchSize"]
)
def test_a_field_is_found_as_set_and_kubectl_write_it(path: str) -> None:
    code, text = explained(path)
    assert code == 0
    assert text.startswith("FIELD: spec.training.batchSize <integer>\n")
    assert "Limit: at least 1." in text
    assert "Limit: at most 1024." in text
    assert "Default: 1." in text
    assert "fixed once the job has started" in text


def test_a_group_lists_its_fields_and_their_meaning() -> None:
    code, text = explained("spec.dataset.extraSources")
    assert code == 0
    assert "FIELD: spec.dataset.extraSources[] <[]Object>" in text
    assert "  uri <string> -required-\n" in text
    assert "lossWeight <number>" in text


def test_all_fields_are_listed_on_request() -> None:
    code, text = explained("--recursive")
    assert code == 0
    names = [field.name for field in field_docs().walk()][1:]
    listed = [line.split(" <")[0].strip() for line in text.split("FIELDS:\n")[1].splitlines()]
    assert listed == names


def test_what_may_change_after_the_start_is_said() -> None:
    assert "It may change in a job that has started." in explained("restartPolicy.maxRestarts")[1]
    assert "It may change before a run resumes." in explained("spec.checkpoint.everySteps")[1]


def test_the_status_is_described_too() -> None:
    code, text = explained("status.activeSeconds")
    assert code == 0
    assert "FIELD: status.activeSeconds <integer>" in text


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("spec.trainin.steps", "spec.training.steps"),
        ("spec.adapter.rnk", "spec.adapter.rank"),
        ("learningRate", "spec.training.learningRate"),
    ],
)
def test_a_wrong_path_is_answered_by_the_right_one_which_works(path: str, advice: str) -> None:
    code, text = explained(path)
    assert code == 2
    assert f"'{advice}'" in text
    assert "?." not in text
    assert explained(advice)[0] == 0


@pytest.mark.parametrize("path", ["metadata.name", "", "[]", "spec.adapter.rank.more"])
def test_a_path_that_leads_nowhere_is_a_sentence(path: str) -> None:
    code, text = explained(path)
    assert code == 2, text
    assert text.startswith("error: ")
    assert "kubelora explain spec --recursive" in text


@pytest.mark.parametrize("root", ["spec", "status"])
def test_every_field_has_a_description(root: str) -> None:
    """kubectl explain, the docs and this command show it."""
    assert not [field.path for field in field_docs(root).walk() if not field.description]

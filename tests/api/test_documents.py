"""`kubelora validate` and the models behind it, judged by documents written by hand."""

import json
from pathlib import Path

import pytest
import yaml

from kubelora_api.crd import custom_resource_definition
from kubelora_api.documents import InvalidDocumentError, check_change, parse_job
from tests.api.contract_documents import (
    CHANGES,
    RIGHT,
    WRONG,
    Change,
    Document,
    Wrong,
    base,
    changed,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_a_wrong_document_is_refused_with_a_message_that_names_the_field(wrong: Wrong) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job(wrong.document())
    assert any(
        p.path.startswith(wrong.field) or wrong.field in p.path for p in refused.value.problems
    )
    assert all(p.message for p in refused.value.problems)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_document_passes(name: str) -> None:
    assert parse_job(RIGHT[name]).metadata.name == RIGHT[name]["metadata"]["name"]


def test_a_parsed_document_parses_again_to_the_same_job() -> None:
    for document in RIGHT.values():
        job = parse_job(document)
        assert parse_job(json.loads(json.dumps(job.document()))) == job


def test_a_path_of_this_machine_is_right_for_a_local_run_alone() -> None:
    document = base()
    document["spec"]["model"]["uri"] = "file:///models/sdxl"
    document["spec"]["dataset"]["uri"] = "photos"
    document["spec"]["output"]["uri"] = "../runs/one"
    assert parse_job(document, local=True).spec.dataset.uri == "photos"
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job(document)
    assert {p.path for p in refused.value.problems} == {
        "spec.model.uri",
        "spec.dataset.uri",
        "spec.output.uri",
    }


def test_every_problem_is_told_at_once() -> None:
    document = base()
    document["spec"]["adapter"]["rank"] = 0
    document["spec"]["training"]["steps"] = "many"
    document["spec"]["dataset"]["resolutoin"] = 512
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job(document)
    assert [str(p) for p in refused.value.problems] == [
        "spec.dataset.resolutoin: unknown field; did you mean 'resolution'?",
        "spec.adapter.rank: must be at least 1, found 0",
        'spec.training.steps: must be an integer, found "many"',
    ]


def started(document: Document) -> Document:
    return {**document, "status": {"attempt": 1}}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.name)
def test_a_started_jobs_weights_are_decided(change: Change) -> None:
    old, new = parse_job(started(base())), parse_job(change.edit(base()))
    assert [p.path for p in check_change(new, old)] == ([change.field] if change.field else [])


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.name)
def test_a_job_that_has_not_started_may_still_change(change: Change) -> None:
    assert check_change(parse_job(change.edit(base())), parse_job(base())) == []


def test_the_crd_in_the_repository_is_the_one_the_models_make() -> None:
    kept = yaml.safe_load((ROOT / "crds/kubelora.dev_loratrainingjobs.yaml").read_text())
    assert kept == json.loads(json.dumps(custom_resource_definition()))


def test_no_message_repeats_a_value_of_the_environment() -> None:
    secret = "hunter2"
    for wrong in ([{"name": "T", "value": [secret]}], {"T": secret}, [secret]):
        with pytest.raises(InvalidDocumentError) as refused:
            parse_job(changed("spec/podTemplate", {"env": wrong}))
        assert secret not in str(refused.value)
        assert "spec.podTemplate.env" in str(refused.value)

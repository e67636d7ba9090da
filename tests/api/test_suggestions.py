"""A misspelt name is answered with the one that was meant, in one way everywhere."""

import pytest

from kubelora_api.claims import claims_of
from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.field_paths import field_paths, wrong_path
from kubelora_api.schema import JsonObject
from kubelora_api.suggestions import nearest, suggestion
from tests.api.contract_documents import base, changed


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rnak", "rank"),
        ("learning_rate", "learningRate"),
        ("LEARNING-RATE", "learningRate"),
        ("resolutoin", "resolution"),
        ("zebra", None),
    ],
)
def test_case_and_word_breaks_do_not_hide_what_was_meant(name: str, meant: str | None) -> None:
    assert nearest(name, ["rank", "learningRate", "resolution"]) == meant


def test_where_nothing_is_like_it_the_names_that_there_are_are_told() -> None:
    assert suggestion("rnak", ["rank", "alpha"]) == "; did you mean 'rank'?"
    assert suggestion("zebra", ["rank", "alpha"]) == "; known here: rank, alpha"
    many = suggestion("zebra", [f"m{n}" for n in range(30)])
    assert many.endswith(", m23 and 6 more")
    assert suggestion("zebra", []) == ""


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("training.steps", "training is not a field; did you mean 'spec.training.steps'?"),
        ("steps", "steps is not a field; did you mean 'spec.training.steps'?"),
        ("spec.optimizer.name", "did you mean 'spec.training.optimizer.name'?"),
        ("spec.trainin.stesp", "spec.trainin is not a field; did you mean 'spec.training.steps'?"),
        ("adapter.rnk", "adapter is not a field; did you mean 'spec.adapter.rank'?"),
        ("apiVersoin", "did you mean 'apiVersion'?"),
        ("uri", "'spec.model.uri' or 'spec.dataset.uri' or 'spec.dataset.extraSources.uri'?"),
        ("spec.dataset.extraSources[0].ury", "did you mean 'spec.dataset.extraSources.uri'?"),
        ("xyzzy", "xyzzy is not a field; known here: apiVersion, kind, metadata, spec, status"),
    ],
)
def test_a_wrong_path_is_answered_with_a_whole_one(path: str, sentence: str) -> None:
    assert (wrong_path(path) or "").endswith(sentence)


@pytest.mark.parametrize(
    "path",
    [
        "spec.adapter.rankPattern.mid_block",
        "spec.dataset.extraSources[0].uri",
        "spec.podTemplate.nodeSelector.zone",
        "metadata.labels.team",
        "metadata.name",
    ],
)
def test_what_lies_in_maps_lists_and_metadata_is_a_path(path: str) -> None:
    assert wrong_path(path) is None


def test_every_field_has_its_path_and_none_is_wrong() -> None:
    paths = list(field_paths())
    assert "spec.training.schedule.warmupSteps" in paths
    assert [path for path in paths if wrong_path(path)] == []


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            "spec/training/optimizer",
            {"name": "adam8bit"},
            "found \"adam8bit\"; did you mean 'adamw8bit'?",
        ),
        ("spec/tracking", {"trackers": ["tensorbord"]}, "did you mean 'tensorboard'?"),
        ("spec/training/rank", 8, "unknown field; it belongs at 'spec.adapter.rank'"),
        ("spec/training/zz", 1, "unknown field; known here: steps, epochs, batchSize, "),
    ],
)
def test_a_wrong_name_in_a_document_is_answered_with_the_right_one(
    path: str, value: object, sentence: str
) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job(changed(path, value))
    assert sentence in str(refused.value)


def test_the_claims_of_a_job_are_those_of_all_its_places() -> None:
    document: JsonObject = base()
    document["spec"]["model"] = {"uri": "pvc://models/sdxl", "vae": "pvc://vaes/fixed"}
    document["spec"]["dataset"] |= {
        "uri": "s3://photos/x",
        "cache": "pvc://cache/c",
        "extraSources": [{"uri": "pvc://more/x"}],
    }
    document["spec"]["output"]["uri"] = "pvc://models/out"
    assert claims_of(parse_job(document).spec) == {
        "cache": False,
        "models": False,
        "more": True,
        "vaes": True,
    }

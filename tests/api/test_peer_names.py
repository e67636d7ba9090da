"""One spelling of each field; names from other trainers are answered with the field here."""

from typing import Any

import pytest

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.field_paths import field_paths, wrong_path
from kubelora_api.peer_names import COUNTERPARTS, WITHOUT_COUNTERPART
from tests.api.contract_documents import changed


def _problem(path: str, value: object) -> str:
    document: dict[str, Any] = changed(path, value)
    with pytest.raises(InvalidDocumentError) as caught:
        parse_job(document)
    (problem,) = caught.value.problems
    return str(problem)


def test_every_counterpart_is_a_field() -> None:
    fields = {*field_paths(), "metadata.name"}
    missing = {
        name: path
        for name, path in COUNTERPARTS.items()
        if path != "metadata.name" and f"spec.{path}" not in fields
    }
    assert missing == {}
    assert not COUNTERPARTS.keys() & WITHOUT_COUNTERPART


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        ("training/learning_rate", 1e-4, "learningRate"),
        ("training/min_snr_gamma", 5, "minSnrGamma"),
        ("dataset/caption_dropout", 0.1, "captionDropout"),
        ("adapter/rs_lora", True, "rsLora"),
    ],
)
def test_the_spelling_of_python_is_refused_as_the_api_server_does(
    path: str, value: object, meant: str
) -> None:
    said = _problem(f"spec/{path}", value)
    assert said == f"spec.{path.replace('/', '.')}: unknown field; did you mean {meant!r}?"
    assert f"did you mean {meant!r}?" in str(wrong_path(f"spec.{path.replace('/', '.')}"))


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("adapter/network_dim", "that is spec.adapter.rank here"),
        ("training/networkDim", "that is spec.adapter.rank here"),
        ("training/max_train_steps", "that is spec.training.steps here"),
        ("training/mixed_precision", "that is spec.precision.compute here"),
        ("dataset/keep_tokens", "that is spec.dataset.captions.keepTags here"),
        ("training/unet_lr", "that is spec.training.learningRates here"),
        ("training/ip_noise_gamma", "a job has no field for that"),
        ("adapter/algo", "a job has no field for that"),
    ],
)
def test_a_name_from_elsewhere_gets_the_field_here_and_no_other_technique(
    path: str, answer: str
) -> None:
    said = _problem(f"spec/{path}", 1)
    assert said.endswith(f"unknown field; {answer}")
    assert str(wrong_path(f"spec.{path.replace('/', '.')}")).endswith(f"; {answer}")


@pytest.mark.parametrize(
    ("path", "value", "written"),
    [
        ("spec/training/schedule", "cosine", "{name: cosine}"),
        ("spec/training/optimizer", "lion", "{name: lion}"),
        ("spec/dataset/buckets", True, "{enabled: true}"),
        ("spec/adapter", 16, "{rank: 16}"),
        ("spec/output", "pvc://out/a", "{uri: pvc://out/a}"),
    ],
)
def test_a_scalar_for_a_mapping_is_answered_with_how_to_write_it(
    path: str, value: object, written: str
) -> None:
    assert _problem(path, value).endswith(f"; write {written}")

"""What a run keeps for its lifetime: derived from the contract, and what it was before that."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field

from kubelora_api.dataset_spec import Dataset
from kubelora_api.decides import Decides
from kubelora_api.documents import parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_trainer.storage.run_settings import deciding_settings, settings_digest

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))


def _by_hand(job: LoraTrainingJob) -> JsonObject:
    """The rule of the runs that exist, as it was written before fields declared anything."""
    spec = job.spec.document()
    groups = ("model", "dataset", "adapter", "training", "precision", "validation")
    kept: JsonObject = {group: dict(spec[group]) for group in groups}
    kept["dataset"].pop("cache", None)
    # Younger than these runs: it decides whether a run starts, and nothing of what it computes.
    kept["dataset"]["captions"].pop("maxMissing", None)
    kept["output"] = {"uri": spec["output"]["uri"]}
    return {"metadata": {"name": job.metadata.name}, "spec": kept}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_run_that_exists_keeps_the_settings_it_is_known_by(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    job = parse_job(document, local=True)
    assert deciding_settings(job) == _by_hand(job)


FULL: dict[str, Any] = {
    "model": {"uri": "model", "vae": "vae", "variant": "fp16"},
    "dataset": {
        "uri": "photos",
        "cache": "cache",
        "captions": {"prefix": "sks"},
        "extraSources": [{"uri": "more", "repeats": 2}, {"uri": "most", "caption": "a jug"}],
    },
    "adapter": {"rank": 8, "rankPattern": {"mid_block.*": 4}, "textEncoders": ["text_encoder"]},
    "training": {"steps": 4, "learningRates": {".*": 1e-3}},
    "health": {"policy": "Fail", "dumpGradients": {"budget": "1Mi"}},
    "validation": {"prompts": ["a bottle"]},
    "checkpoint": {"keep": 5},
    "output": {"uri": "out", "dtype": "fp32", "replaceExisting": True},
    "tracking": {"trackers": ["tensorboard"]},
    "workers": {"gpusPerNode": 0},
    "podTemplate": {"env": [{"name": "A", "value": "1"}]},
}


def _job(spec: dict[str, Any], kind: type[LoraTrainingJob] = LoraTrainingJob) -> LoraTrainingJob:
    return kind.model_validate(
        {
            "apiVersion": "kubelora.dev/v1alpha1",
            "kind": "LoraTrainingJob",
            "metadata": {"name": "bottles"},
            "spec": spec,
        },
        context={"local": True},
    )


def test_so_does_one_that_sets_a_field_of_every_group() -> None:
    job = _job(FULL)
    assert deciding_settings(job) == _by_hand(job)


class _Toned(Dataset):
    tone: Annotated[Literal["colour", "gray"], Decides("pixels")] = "colour"
    sharpness: Annotated[float, Decides("weights")] = 0.0
    note: Annotated[str, Decides("nothing")] = ""


class _TonedSpec(JobSpec):
    dataset: _Toned


class _TonedJob(LoraTrainingJob):
    spec: Annotated[_TonedSpec, Field()]


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [("tone", "gray", False), ("sharpness", 0.5, False), ("note", "bright", True)],
)
def test_a_new_field_makes_another_run_where_it_decides_anything(
    field: str, value: object, same: bool
) -> None:
    before = settings_digest(_job(FULL, _TonedJob))
    spec = {**FULL, "dataset": {**FULL["dataset"], field: value}}
    assert (settings_digest(_job(spec, _TonedJob)) == before) is same

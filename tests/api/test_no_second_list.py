"""Lists that stand next to the contract: each is compared with what it must name.

What can be derived is derived. The tables here connect a name of the contract with code, so that
they are written by hand; a name without its row, or a row without its name, fails.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, get_args

import pytest

from kubelora_api import findings_of_steps, metrics, names, thresholds
from kubelora_api.claims import claims_of, inputs_of
from kubelora_api.dataset_spec import Dataset, Source
from kubelora_api.decides import Decides, declarations
from kubelora_api.pod import SetByOperator
from kubelora_api.schema import unwrap
from kubelora_api.spec import JobSpec, Model, Output, Tracking
from kubelora_api.training_spec import OptimizerName, Precision
from kubelora_api.types import ComputeType, FloatType, InputPlace, TextEncoder
from kubelora_operator.decision.run_progress import lossy_precision_message
from kubelora_trainer.data.buckets import Size
from kubelora_trainer.data.cropping import SizeConditions
from kubelora_trainer.data.dataset import ImageDataset, View
from kubelora_trainer.data.preflight import Sample
from kubelora_trainer.data.sources import SourceFolder, resolve_extra_sources
from kubelora_trainer.export.writers import EXPORT_DTYPES
from kubelora_trainer.health.detectors.quantities import QUANTITIES
from kubelora_trainer.optim.build import BUILDERS
from kubelora_trainer.optim.precision import DTYPES
from kubelora_trainer.reporting.trackers import _KINDS, PACKAGES
from kubelora_trainer.telemetry.step_metrics import (
    GROUP_FIELDS,
    STEP_FIELDS,
    GroupNumbers,
    StepNumbers,
)
from kubelora_trainer.training.setup import TEXT_PARTS
from tests.api.contract_documents import RIGHT
from tests.trainer.fixtures.jobs import job_spec

ROOT = Path(__file__).parents[2]


def _constants(module: object, *kinds: type) -> list[object]:
    return [value for value in vars(module).values() if isinstance(value, kinds)]


def test_every_metric_is_exported_by_the_trainer_or_the_operator() -> None:
    exported = [*metrics.TRAINER_METRICS, *metrics.OPERATOR_METRICS]
    assert len(exported) == len(set(exported))
    assert set(exported) == set(_constants(metrics, metrics.Metric))


def test_every_measurement_of_a_group_and_of_a_step_has_its_metric() -> None:
    """By hand: what is a metric's own input, of single factors, or shown under another name."""
    assert {f.name for f in fields(GroupNumbers)} - set(GROUP_FIELDS.values()) == {"update_rms"}
    assert {f.name for f in fields(StepNumbers)} - set(STEP_FIELDS.values()) == {
        "samples",
        "grad_norm",
        "groups",
        "factor_norms",
        "factor_absmax",
        "factor_balance",
        "factor_update_scale",
        "step_size",
        "category_losses",
        "broken_ranks",
        "extra",
    }
    of_groups = {m.name for m in metrics.TRAINER_METRICS if "group" in m.labels}
    assert set(GROUP_FIELDS) == of_groups
    assert {m.name for m in metrics.TRAINER_METRICS} >= set(STEP_FIELDS)


def test_every_finding_is_in_the_table_of_findings() -> None:
    rows = (thresholds.Threshold, thresholds.Event)
    found = [*_constants(thresholds, *rows), *_constants(findings_of_steps, *rows)]
    assert {id(f) for f in found} == {id(f) for f in thresholds.FINDINGS}
    assert set(QUANTITIES) <= {t.finding for t in thresholds.THRESHOLDS}


def _choices(model: type, field: str) -> set[str]:
    return set(get_args(unwrap(model.model_fields[field].annotation)[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choices", "table"),
    [
        (set(get_args(OptimizerName)), BUILDERS),
        (set(get_args(ComputeType)), DTYPES),
        (_choices(Output, "dtype"), EXPORT_DTYPES),
        (set(get_args(TextEncoder)), dict.fromkeys(TEXT_PARTS)),
        (
            set(get_args(get_args(unwrap(Tracking.model_fields["trackers"].annotation)[0])[0])),
            _KINDS,
        ),
        (set(_KINDS), PACKAGES),
    ],
    ids=["optimizers", "compute types", "export types", "text encoders", "trackers", "packages"],
)
def test_every_choice_of_the_contract_has_its_row(
    choices: set[str], table: Mapping[str, object]
) -> None:
    assert choices
    assert set(table) == choices


def test_every_lossy_type_is_named_in_the_operators_message() -> None:
    kinds = {name: get_args(info.annotation) for name, info in Precision.model_fields.items()}
    lossy = [name for name, choices in kinds.items() if choices == get_args(FloatType)]
    assert lossy == ["accumulator", "master_weights"]
    for name in lossy:
        precision = Precision.model_validate({name: "bf16", "allow_lossy_precision": True})
        message = lossy_precision_message(job_spec().model_copy(update={"precision": precision}))
        assert message is not None
        assert f"precision.{Precision.model_fields[name].alias} is bf16" in message


def test_variables_of_the_operator_are_refused_from_users() -> None:
    ours = {value for name, value in vars(names).items() if name.startswith("ENV_")}
    assert len(ours) > 3
    assert {v for v in ours if not v.startswith(names.RESERVED_ENV_PREFIX)} == set(SetByOperator)


def test_the_readme_names_every_exit_code() -> None:
    text = (ROOT / "README.md").read_text()
    for code in names.ExitCode:
        assert re.search(rf"^\| {int(code)}(,[^|]*)? \|", text, re.MULTILINE), code.name


class _Lent(Model):
    depth: Annotated[InputPlace | None, Decides("weights")] = None


class _LentSpec(JobSpec):
    model: _Lent


def test_every_place_that_a_job_reads_is_found_by_its_type() -> None:
    places = {
        "model": {"uri": "pvc://a/x", "vae": "pvc://b", "config": "pvc://c", "depth": "pvc://d"},
        "dataset": {"uri": "pvc://e", "cache": "pvc://f", "extraSources": [{"uri": "pvc://g"}]},
        "adapter": {"from": "pvc://h"},
        "health": {"baseline": "pvc://i"},
        "output": {"uri": "pvc://j", "push": "s3://bucket/k"},
        "training": {"steps": 1},
    }
    spec = _LentSpec.model_validate(places)
    assert dict(inputs_of(spec)) == {
        "model.uri": "pvc://a/x",
        "model.vae": "pvc://b",
        "model.config": "pvc://c",
        "model.depth": "pvc://d",
        "dataset.uri": "pvc://e",
        "dataset.extraSources[0].uri": "pvc://g",
        "adapter.from": "pvc://h",
        "health.baseline": "pvc://i",
    }
    assert claims_of(spec) == {**dict.fromkeys("abcdeghi", True), "f": False, "j": False}


def _paths(value: object, above: str = "") -> Iterator[str]:
    """Paths of a document's fields, without list indices."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield f"{above}{name}"
            yield from _paths(below, f"{above}{name}.")
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, above)


def test_every_field_of_the_dataset_is_documented_and_in_a_valid_document() -> None:
    fields_of_it = {f"dataset.{path}" for path, _ in declarations(Dataset)}
    assert len(fields_of_it) > 20
    written = {path for document in RIGHT.values() for path in _paths(document["spec"])}
    assert not fields_of_it - written
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("data.md", "trainer.md"))
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", pages, re.DOTALL))
    names_in_code = set(re.findall(r"\w+", code))
    assert not {path for path in fields_of_it if path.split(".")[-1] not in names_in_code}


SAMPLE = Sample(
    path=Path("a.png"),
    file="a.png",
    caption="a jug",
    width=64,
    height=64,
    size=Size(64, 64),
    category="jugs",
    sha256="0" * 64,
    repeats=1,
    loss_weight=1.0,
    use_prefix=True,
)
OTHER = {
    "caption": "a cup",
    "category": "cups",
    "sha256": "1" * 64,
    "repeats": 2,
    "loss_weight": 0.5,
    "use_prefix": False,
}


def test_the_datasets_digest_covers_all_that_is_trained_on() -> None:
    """Left out: where a file is, and what follows from its bytes and the job's settings."""
    assert {f.name for f in fields(Sample)} - set(OTHER) == {
        "path",
        "file",
        "width",
        "height",
        "size",
        "mask_file",  # its bytes are in sha256
    }
    settings = job_spec().dataset

    def digest(sample: Sample) -> str:
        return ImageDataset((sample,), settings, None).digest()  # type: ignore[arg-type]

    for name, value in OTHER.items():
        assert digest(replace(SAMPLE, **{name: value})) != digest(SAMPLE), name  # type: ignore[arg-type]


def test_every_setting_of_an_extra_source_reaches_its_folder(tmp_path: Path) -> None:
    given = {
        "uri": os.fspath(tmp_path),
        "repeats": 3,
        "lossWeight": 0.5,
        "category": "jugs",
        "caption": "a jug",
        "usePrefix": False,
    }
    source = Source.model_validate(given)
    assert set(given) == {info.alias for info in Source.model_fields.values()}
    spec = job_spec(dataset={"extraSources": [given]})
    (folder,) = resolve_extra_sources(spec.dataset, {})
    for name in Source.model_fields.keys() - {"uri"}:
        assert getattr(folder, name) == getattr(source, name), name
        assert getattr(folder, name) != getattr(SourceFolder(tmp_path), name), name


def test_every_field_of_a_view_is_in_the_latents_key() -> None:
    """By hand: the sample is there by its bytes, and the cut by its pixels, in ``sizes``."""
    view = View(0, 0.5, 0.5, False, SizeConditions((64, 64), (0, 0), (64, 64)))
    assert {f.name for f in fields(View)} - set(view.shown()) == {"sample", "across", "down"}

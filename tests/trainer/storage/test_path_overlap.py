"""What a run reads and what it writes lie apart, or the run is refused before it touches either."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.storage.path_overlap import check_paths_disjoint
from kubelora_trainer.utils.errors import OutputError
from tests.trainer.fixtures.jobs import job_spec
from tests.trainer.integration.test_interruption import arguments, in_this_process


def _apart(folder: Path, place: str, /, **groups: Mapping[str, object]) -> None:
    document = job_spec().document()
    document["output"]["uri"] = f"pvc://studio/{place}"
    for group, fields in groups.items():
        document[group].update(fields)
    spec = type(job_spec()).model_validate(document)
    check_paths_disjoint(spec, {"studio": folder}, folder / place)


def test_an_output_inside_the_data_is_refused_whatever_way_the_places_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "photos" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for data in ("pvc://studio/photos", str(tmp_path / "photos"), str(tmp_path / "link")):
        with pytest.raises(OutputError, match=r"photos/out is inside spec\.dataset\.uri "):
            _apart(tmp_path, "photos/out", dataset={"uri": data})
    with pytest.raises(OutputError, match=r"is inside spec\.dataset\.extraSources\[0\]\.uri"):
        _apart(tmp_path, "photos/out", dataset={"extraSources": [{"uri": "pvc://studio/photos"}]})
    with pytest.raises(OutputError, match="is inside"):
        _apart(tmp_path, "photos", dataset={"uri": "pvc://studio/photos"})


def test_neighbours_and_data_inside_the_output_are_apart(tmp_path: Path) -> None:
    _apart(tmp_path, "photos-out", dataset={"uri": "pvc://studio/photos"})
    _apart(tmp_path, "run", dataset={"uri": "pvc://studio/run/demo/photos"})
    _apart(tmp_path, "run", dataset={"uri": "hf://studio/run"}, model={"uri": "s3://studio/run"})


@pytest.mark.parametrize(
    ("group", "field", "inside"),
    [
        ("adapter", "from", "adapter/pytorch_lora_weights.safetensors"),
        ("model", "uri", "checkpoints/model"),
        ("model", "vae", "samples"),
        ("dataset", "uri", "samples"),
        ("health", "baseline", "adapter/earlier"),
    ],
)
def test_an_input_that_replacing_would_clear_away_is_refused(
    tmp_path: Path, group: str, field: str, inside: str
) -> None:
    given = {group: {field: f"pvc://studio/run/{inside}"}}
    with pytest.raises(OutputError, match=rf"^spec\.{group}\.{field} .*delete before"):
        _apart(tmp_path, "run", output={"replaceExisting": True}, **given)
    _apart(tmp_path, "run", **given)  # nothing is cleared away


def test_a_run_is_not_its_own_baseline(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is this run's own output"):
        _apart(tmp_path, "run", health={"baseline": "pvc://studio/run/"})


def test_the_adapter_that_a_run_was_to_start_from_survives_the_refusal(
    tmp_path: Path, demo: DemoPaths
) -> None:
    kept = tmp_path / "out" / "adapter" / "pytorch_lora_weights.safetensors"
    given = arguments(tmp_path, demo)
    kept.parent.mkdir()
    kept.write_text("mine")
    job = yaml.safe_load(Path(given[1]).read_text())
    uri = f"{job['spec']['output']['uri']}/{kept.relative_to(tmp_path / 'out')}"
    ended = in_this_process(
        [*given, "--set", f"spec.adapter.from={uri}", "--set", "spec.output.replaceExisting=true"]
    )
    assert (ended.exit_code, kept.read_text()) == (2, "mine"), ended.output
    assert "spec.adapter.from" in ended.output

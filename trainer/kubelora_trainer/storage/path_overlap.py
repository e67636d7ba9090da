"""Check that the inputs of a run do not overlap what it writes or deletes.

A dataset that contains the output would be trained on its own sample images after an interruption,
and an input inside what ``output.replaceExisting`` deletes would be gone before it is read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kubelora_api.claims import inputs_of
from kubelora_api.spec import JobSpec
from kubelora_trainer.storage.output_dir import output_names
from kubelora_trainer.storage.uris import local_path
from kubelora_trainer.utils.errors import OutputError


def check_paths_disjoint(spec: JobSpec, mounts: Mapping[str, Path], output: Path) -> None:
    """Check that no input overlaps the output directory.

    Only local paths and claims can; links are followed.

    Args:
        spec: The job's spec.
        mounts: Local directory of each claim.
        output: The output directory.

    Raises:
        OutputError: An input overlaps the output.
    """
    out = _real(output)
    for field, uri in inputs_of(spec):
        local = local_path(uri, mounts)
        if local is None:
            continue
        place = _real(local)
        if field.startswith("dataset") and out.is_relative_to(place):
            raise OutputError(
                f"spec.output.uri {spec.output.uri} is inside spec.{field} {uri}: what the run "
                "writes there, including sample images, would be read as data; choose an "
                "output.uri outside it"
            )
        if field == "health.baseline" and out == place:
            raise OutputError(
                f"spec.health.baseline {uri} is this run's own output: use an earlier run's"
            )
        if spec.output.replace_existing and _top(place, out) in output_names():
            raise OutputError(
                f"spec.{field} {uri} is inside {output / _top(place, out)}, which "
                "spec.output.replaceExisting would delete before it is read: move it, or "
                "choose another spec.output.uri"
            )


def _top(place: Path, out: Path) -> str:
    """Return the entry of ``out`` that contains ``place``; empty for none."""
    inside = place.is_relative_to(out) and place != out
    return place.relative_to(out).parts[0] if inside else ""


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))

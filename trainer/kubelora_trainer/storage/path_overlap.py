"""Whether what a run reads lies apart from what it writes and clears away.

A dataset that holds the output would be trained on its own sample images after an interruption; an
input among what ``output.replaceExisting`` clears away would be gone before it is read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kubelora_api.claims import inputs_of
from kubelora_api.spec import JobSpec
from kubelora_trainer.storage.output_dir import own_names
from kubelora_trainer.storage.uris import local_path
from kubelora_trainer.utils.errors import OutputError


def assert_apart(spec: JobSpec, mounts: Mapping[str, Path], output: Path) -> None:
    """Raise OutputError where an input and the output folder get into each other's way.

    Only places of this machine and claims can; links are followed.
    """
    out = _real(output)
    for field, uri in inputs_of(spec):
        local = local_path(uri, mounts)
        if local is None:
            continue
        place = _real(local)
        if field.startswith("dataset") and out.is_relative_to(place):
            raise OutputError(
                f"spec.output.uri {spec.output.uri} lies in spec.{field} {uri}: what the run "
                "writes there, sample images too, would be taken for data; choose an output.uri "
                "outside of it"
            )
        if field == "health.baseline" and out == place:
            raise OutputError(
                f"spec.health.baseline {uri} is this run's own output: name an earlier run's"
            )
        if spec.output.replace_existing and _top(place, out) in own_names():
            raise OutputError(
                f"spec.{field} {uri} lies in {output / _top(place, out)}, which "
                "spec.output.replaceExisting would clear away before it is read: move it, or "
                "choose another spec.output.uri"
            )


def _top(place: Path, out: Path) -> str:
    """The entry of ``out`` that ``place`` is or lies in; empty for none."""
    inside = place.is_relative_to(out) and place != out
    return place.relative_to(out).parts[0] if inside else ""


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))

"""Settings that a run keeps for its lifetime, and how two configurations differ in them.

A run resumes with the settings it began with, or it would not be the run it claims to be. Which
fields may change between attempts is declared at each of them (`kubelora_api.decides`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kubelora_api.decides import select, where_all
from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec

SHOWN_CHANGES = 10
"""Number of changes that a message lists; more would bury the advice."""


def fields_that_may_change() -> str:
    """Return a clause that names every field with which a run resumes after a change."""
    fields = where_all(JobSpec, lambda decides: decides.resume == "yes")
    return f"spec.{', '.join(fields[:-1])} and {fields[-1]} may change"


def deciding_settings(job: LoraTrainingJob) -> JsonObject:
    """Return the job's name, its output, and all fields that affect the result, with defaults."""
    document = {"metadata": {"name": job.metadata.name}, "spec": job.spec.document()}
    return _deciding(document, type(job.spec))


def recorded_settings(document: JsonObject) -> JsonObject:
    """Return `deciding_settings` of a job that an earlier version may have recorded.

    Defaults are applied again, so that a field added since then does not count as a change.
    """
    try:
        return deciding_settings(parse_job(document, local=True))
    except InvalidDocumentError:
        try:
            return _deciding(document, JobSpec)
        except (AttributeError, TypeError, ValueError):  # not a job at all: all of it differs
            return {}


def settings_digest(job: LoraTrainingJob) -> str:
    """Hash everything that affects the result to 16 hexadecimal digits."""
    canonical = json.dumps(deciding_settings(job), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def differing_leaves(
    old: object, new: object, path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield path, old and new value (``ABSENT`` for none) where two JSON documents differ.

    Args:
        old: The old document.
        new: The new document.
        path: Path of both in the complete document.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            below = f"{path}.{key}" if path else str(key)
            yield from differing_leaves(old.get(key, ABSENT), new.get(key, ABSENT), below)
    elif old != new:
        yield path, old, new


def changes(old: object, new: object) -> Iterator[str]:
    """Yield ``path: old -> new`` for each leaf in which two JSON documents differ."""
    for path, before, after in differing_leaves(old, new):
        yield f"{path}: {_text(before)} -> {_text(after)}"


def join_changes(found: list[str]) -> str:
    """Join the first ten changes in one line."""
    more = f"; and {len(found) - SHOWN_CHANGES} more" if len(found) > SHOWN_CHANGES else ""
    return "; ".join(found[:SHOWN_CHANGES]) + more


class _Absent:
    """Marker for a field that is not set."""


ABSENT: Final = _Absent()


def _text(value: object) -> str:
    return "not set" if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _deciding(document: Mapping[str, Any], spec: type[JobSpec]) -> JsonObject:
    kept = select(document.get("spec", {}), spec, lambda decides: decides.resume != "yes")
    return {"metadata": {"name": document.get("metadata", {}).get("name")}, "spec": kept}

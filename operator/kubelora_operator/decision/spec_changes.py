"""Changes of a started job's spec that only its next attempt can take up. Pure.

An attempt's Job carries a digest of each such part of the spec that it was made from.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kubelora_api.decides import where_all
from kubelora_api.spec import JobSpec

FIELDS: Final = tuple(where_all(JobSpec, lambda found: found.live and not found.at_once))
"""Parts of a spec that may change in a started job, but that no running pod reads again."""
_DIGITS: Final = 12
"""Of a digest: enough to see a change. A secret in the part can't be recovered from so few."""


def digests_of(spec: JobSpec) -> dict[str, str]:
    """Return a digest of each part by its path below ``spec``."""
    # Without defaults: one that a newer operator adds is no change by the user.
    document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {path: _digest(_value_at(document, path)) for path in FIELDS}


def changed_since(spec: JobSpec, begun: Mapping[str, str]) -> list[str]:
    """Return the parts that differ from those that an attempt began with.

    Args:
        spec: The spec as it is now.
        begun: The attempt's digests; a part that it does not have is not compared.
    """
    now = digests_of(spec)
    return [path for path in FIELDS if path in begun and begun[path] != now[path]]


def _value_at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGITS]

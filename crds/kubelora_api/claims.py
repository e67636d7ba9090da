"""URIs of a job by what it does with them, and the claims that follow: mounted by the operator, or
given with ``--mount``.

Every field of the type ``InputPlace`` or ``OutputPlace`` is found by its type.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from kubelora_api.schema import metadata_of
from kubelora_api.spec import JobSpec
from kubelora_api.types import Location, Use
from kubelora_api.uri import parse_place


def _uris_of(group: BaseModel, use: Use, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and value of each field that is set and whose type is a URI for ``use``."""
    for name, info in type(group).model_fields.items():
        path, value = above + (info.alias or name), getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _uris_of(value, use, f"{path}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _uris_of(item, use, f"{path}[{index}].")
        elif value and Location(use) in metadata_of(info):
            yield path, value


def inputs_of(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every URI that the job reads, with its field below ``spec``."""
    yield from _uris_of(spec, "read")


def claims_of(spec: JobSpec) -> dict[str, bool]:
    """Return the claims by name, and whether the job only reads them."""
    claims: dict[str, bool] = {}
    uses: tuple[Use, ...] = ("read", "written")  # a claim that is written too is not read-only
    for use in uses:
        for _, uri in _uris_of(spec, use):
            if (place := parse_place(uri)).scheme == "pvc":
                claims[place.root] = use == "read"
    return dict(sorted(claims.items()))

"""The base class of every API type, and validation rules that exist in CEL and in Python.

A rule is written once, next to its field: its CEL expression goes into the CRD, its predicate runs
in `kubelora validate`, and its message is the same in both. Types are strict because the API server
does not convert "64" to 64 either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

JsonObject = dict[str, Any]
"""A Kubernetes object whose schema is left to the API server."""


@dataclass(frozen=True)
class Rule:
    """A validation rule.

    cel: Expression over ``self``; true if the value is valid.
    message: Sentence for the person who must act.
    check: The same predicate in Python, over the value with its defaults set.
    at: camelCase name of the field below ``self`` that the message is about, or empty.
    local: Predicate used instead of ``check`` for a job that runs on this machine.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    at: str = ""
    local: Callable[[Any], bool] | None = None


@dataclass(frozen=True, eq=False)
class Kube:
    """Additional keys of a field's structural schema, such as ``x-kubernetes-*``."""

    extras: Mapping[str, object] = field(default_factory=dict)


class ApiModel(BaseModel):
    """An object of the API: camelCase in documents, no unknown fields, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()

    def document(self) -> JsonObject:
        """Return a JSON object with camelCase keys, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


LIST_ATOMIC = Kube({"x-kubernetes-list-type": "atomic"})
MAP_ATOMIC = Kube({"x-kubernetes-map-type": "atomic"})


def list_map(*keys: str) -> Kube:
    """Declare a list whose items are identified by ``keys``, for server-side apply to merge."""
    return Kube({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)})


def unwrap(
    annotation: object, metadata: tuple[object, ...] = ()
) -> tuple[object, tuple[object, ...]]:
    """Return the bare type and all metadata of ``Annotated[…] | None`` and the like."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0], metadata + tuple(annotation.__metadata__))  # type: ignore[attr-defined]
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if type(None) in get_args(annotation) and len(arguments) == 1:
        return unwrap(arguments[0], metadata)
    return annotation, metadata


def flatten(metadata: tuple[object, ...]) -> tuple[object, ...]:
    """Replace each ``Field(...)`` inside ``Annotated`` with the metadata that it holds."""
    flat: list[object] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return tuple(flat)


_METADATA: Final[dict[int, tuple[FieldInfo, tuple[object, ...]]]] = {}
"""Metadata by the field's id: it is asked for with every job, and a field can't be hashed. The
field is kept with it, so that no other can get its id."""


def metadata_of(info: FieldInfo) -> tuple[object, ...]:
    """Return the constraints, rules and extras of a field from anywhere in its annotation."""
    known = _METADATA.get(id(info))
    if known is None:
        known = (info, flatten(tuple(info.metadata) + unwrap(info.annotation)[1]))
        _METADATA[id(info)] = known
    return known[1]


def model_below(annotation: object) -> type[BaseModel] | None:
    """Return the model of a field's value or list items; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := model_below(argument):
            return found
    return None

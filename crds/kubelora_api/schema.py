"""The base of every API type, and rules that are judged alike by CEL and by Python.

A rule stands once, next to the field it guards: its CEL text goes into the CRD, its predicate runs
in `kubelora validate`, its message is the same in both. Types are strict, for the API server does
not turn "64" into 64 either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

JsonObject = dict[str, Any]
"""A Kubernetes object whose own schema the API server knows better than we do."""


@dataclass(frozen=True)
class Rule:
    """One validation rule.

    cel: expression over ``self``; true where the value is right.
    message: a sentence for the person who must act.
    check: the same predicate in Python, over the value with its defaults filled in.
    at: camelCase name of the field below ``self`` that the message is about, or empty.
    local: predicate used instead of ``check`` for files that run on this machine.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    at: str = ""
    local: Callable[[Any], bool] | None = None


@dataclass(frozen=True, eq=False)
class Kube:
    """Structural-schema extras of a field, as ``x-kubernetes-*`` and plain keys."""

    extras: Mapping[str, object] = field(default_factory=dict)


class ApiModel(BaseModel):
    """A group of fields of the API: camelCase outside, unknown fields refused, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()

    def document(self) -> JsonObject:
        """As a JSON object with camelCase keys; what was not set and has no default is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


LIST_ATOMIC = Kube({"x-kubernetes-list-type": "atomic"})
MAP_ATOMIC = Kube({"x-kubernetes-map-type": "atomic"})


def list_map(*keys: str) -> Kube:
    """A list whose items are told apart by ``keys``, so that server-side apply can merge it."""
    return Kube({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)})


def unwrap(
    annotation: object, metadata: tuple[object, ...] = ()
) -> tuple[object, tuple[object, ...]]:
    """The bare type and all metadata of ``Annotated[…] | None`` and the like."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0], metadata + tuple(annotation.__metadata__))  # type: ignore[attr-defined]
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if type(None) in get_args(annotation) and len(arguments) == 1:
        return unwrap(arguments[0], metadata)
    return annotation, metadata


def flatten(metadata: tuple[object, ...]) -> tuple[object, ...]:
    """Metadata with what a ``Field(...)`` inside ``Annotated`` carries laid out flat."""
    flat: list[object] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return tuple(flat)


def metadata_of(info: FieldInfo) -> tuple[object, ...]:
    """Constraints, rules and extras of a field, wherever in its annotation they stand."""
    return flatten(tuple(info.metadata) + unwrap(info.annotation)[1])

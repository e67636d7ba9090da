"""Types used by several groups of a spec: URIs, patterns, ranks."""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints, TypeAdapter
from pydantic_core import SchemaError

from kubelora_api.schema import Rule
from kubelora_api.uri import (
    CLUSTER_SCHEMES,
    REPOSITORY,
    forms_of,
    has_parent_step,
    is_local,
    pattern_of,
)

Use = Literal["read", "written", "uploaded"]


@dataclass(frozen=True)
class Location:
    """What a job does with what a URI names; claims and mounts follow from it."""

    use: Use


FloatType = Literal["bf16", "fp32"]
TextEncoder = Literal["text_encoder", "text_encoder_2"]
ComputeType = Literal["bf16", "fp16", "fp32"]


def _place_rule(schemes: tuple[str, ...], *, local: bool = True) -> Rule:
    """Build the rule for a URI. ``local``: whether `kubelora train` also accepts local paths."""
    pattern = pattern_of(schemes)

    def on_cluster(uri: str) -> bool:
        return bool(re.search(pattern, uri)) and not has_parent_step(uri)

    return Rule(
        cel=f"self.matches({_cel_string(pattern)}) && !self.matches({_cel_string(_PARENT_STEP)})",
        message=f"not a supported URI: use {forms_of(schemes)}, without '..'",
        check=on_cluster,
        local=lambda uri: (local and is_local(uri)) or on_cluster(uri),
    )


_PARENT_STEP = r"/\.\.(/|$)"


def _cel_string(text: str) -> str:
    return "r'" + text + "'"


def _compiles(pattern: str) -> bool:
    """Return whether ``pattern`` is a regular expression for both Python and RE2.

    The Rust engine in pydantic has RE2's syntax (no look-around, no back-references).
    """
    try:
        re.compile(pattern)
        TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])
    except (re.error, SchemaError):
        return False
    return True


def _every_one_compiles(what: str) -> Rule:
    """Build the rule for the items of a list or the keys of a map."""
    return Rule(
        cel="self.all(p, ''.matches(p) || !''.matches(p))",
        message=f"every {what} must be a regular expression (RE2 syntax) over module names",
        check=lambda patterns: all(_compiles(p) for p in patterns),
    )


PatternKeys = _every_one_compiles("key")
PatternItems = _every_one_compiles("item")
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
_Uri = Annotated[str, Field(min_length=1, max_length=1024)]
InputPlace = Annotated[_Uri, _place_rule(CLUSTER_SCHEMES), Location("read")]
OutputPlace = Annotated[_Uri, _place_rule(("pvc",)), Location("written")]
PushPlace = Annotated[_Uri, _place_rule(("s3", REPOSITORY), local=False), Location("uploaded")]
Prompt = Annotated[str, Field(max_length=2048)]
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
QueueName = Annotated[
    # Kueue reads it from a label, so it is both a DNS name and at most 63 characters long.
    str, Field(min_length=1, max_length=63, pattern=rf"^{_LABEL}(\.{_LABEL})*$")
]
Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0, le=65536)]

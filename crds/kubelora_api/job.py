"""The LoraTrainingJob resource: metadata, spec, status, and what may change after the start."""

from collections.abc import Callable
from dataclasses import dataclass
from re import fullmatch
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from kubelora_api import names
from kubelora_api.decides import where_all
from kubelora_api.schema import ApiModel, JsonObject, Rule
from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus


class Metadata(BaseModel):
    """The fields of a Kubernetes object's metadata that we read; others are allowed."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)

    name: str
    namespace: str | None = None
    uid: str | None = None
    generation: int = 0
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """A validation rule for a change from ``oldSelf`` to ``self``."""

    cel: str
    message: str
    path: str
    check: Callable[[Any, Any], bool]


def _name_is_legal(job: "LoraTrainingJob") -> bool:
    name = job.metadata.name
    return len(name) <= names.NAME_MAX_LENGTH and bool(fullmatch(names.NAME_PATTERN, name))


def _value_at(spec: JobSpec, path: str) -> object:
    """Return the value of a field or group, None where it or a group above it is not set."""
    value: object = spec.document()
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unchanged_cel(path: str) -> str:
    """Compare a field in both specs; one below a group may be absent, and the group too."""
    if "." not in path:
        return f"self.spec.{path} == oldSelf.spec.{path}"
    parts = path.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    new, old = (
        "(" + " && ".join(f"has({side}.spec.{prefix})" for prefix in prefixes) + ")"
        for side in ("self", "oldSelf")
    )
    return f"({new} == {old} && (!{new} || self.spec.{path} == oldSelf.spec.{path}))"


def _fixed_after_start(path: str) -> Transition:
    def unchanged(new: "LoraTrainingJob", old: "LoraTrainingJob") -> bool:
        return bool(
            old.status.attempt < 1 or _value_at(new.spec, path) == _value_at(old.spec, path)
        )

    return Transition(
        cel="!has(oldSelf.status) || !has(oldSelf.status.attempt) || oldSelf.status.attempt < 1 "
        f"|| {_unchanged_cel(path)}",
        message=f"spec.{path}: cannot change once the job has started; create a new job instead",
        path=f"spec.{path}",
        check=unchanged,
    )


def transitions_of(spec: type[JobSpec]) -> tuple[Transition, ...]:
    """Return a rule for each group, or else field, that may not change in a started job."""
    fixed = where_all(spec, lambda decides: not decides.live)
    return tuple(_fixed_after_start(path) for path in fixed)


TRANSITIONS: tuple[Transition, ...] = transitions_of(JobSpec)


class LoraTrainingJob(ApiModel):
    """A LoraTrainingJob fine-tunes SDXL with a LoRA adapter and watches every gradient."""

    api_version: Literal["kubelora.dev/v1alpha1"]
    kind: Literal["LoraTrainingJob"]
    metadata: Annotated[Metadata, Field(strict=False)]
    spec: JobSpec
    status: Annotated[JobStatus, Field(strict=False)] = Field(default_factory=JobStatus)

    def recorded_document(self) -> JsonObject:
        """Return the document without what may hold a secret, for files that others read.

        No run depends on the pod template, and its environment, annotations and labels are the
        user's. kubectl keeps a copy of the document in an annotation.
        """
        document = self.document()
        document["spec"].pop("podTemplate", None)
        document["metadata"].pop("annotations", None)
        document["metadata"].pop("managedFields", None)
        return document

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {names.NAME_MAX_LENGTH} && "
            f"self.metadata.name.matches('{names.NAME_PATTERN}')",
            message=f"metadata.name: must have at most {names.NAME_MAX_LENGTH} characters, consist "
            "of lowercase letters, digits and '-', start with a letter and not end with '-'",
            check=_name_is_legal,
        ),
    )

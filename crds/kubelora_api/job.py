"""The LoraTrainingJob resource: metadata, spec, status, and what may change after the start."""

from collections.abc import Callable
from dataclasses import dataclass
from re import fullmatch
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from kubelora_api import names
from kubelora_api.schema import ApiModel, Rule
from kubelora_api.spec import IMMUTABLE_GROUPS, JobSpec
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


def _fixed_after_start(group: str) -> Transition:
    def unchanged(new: "LoraTrainingJob", old: "LoraTrainingJob") -> bool:
        return bool(old.status.attempt < 1 or getattr(new.spec, group) == getattr(old.spec, group))

    return Transition(
        cel="!has(oldSelf.status) || !has(oldSelf.status.attempt) || oldSelf.status.attempt < 1 "
        f"|| self.spec.{group} == oldSelf.spec.{group}",
        message=f"spec.{group}: cannot change once the job has started; create a new job instead",
        path=f"spec.{group}",
        check=unchanged,
    )


TRANSITIONS: tuple[Transition, ...] = tuple(_fixed_after_start(g) for g in IMMUTABLE_GROUPS)


class LoraTrainingJob(ApiModel):
    """A LoraTrainingJob fine-tunes SDXL with a LoRA adapter and watches every gradient."""

    api_version: Literal["kubelora.dev/v1alpha1"]
    kind: Literal["LoraTrainingJob"]
    metadata: Annotated[Metadata, Field(strict=False)]
    spec: JobSpec
    status: Annotated[JobStatus, Field(strict=False)] = Field(default_factory=JobStatus)

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {names.NAME_MAX_LENGTH} && "
            f"self.metadata.name.matches('{names.NAME_PATTERN}')",
            message=f"metadata.name: must have at most {names.NAME_MAX_LENGTH} characters, consist "
            "of lowercase letters, digits and '-', start with a letter and not end with '-'",
            check=_name_is_legal,
        ),
    )

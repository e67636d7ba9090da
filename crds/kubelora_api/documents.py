"""Conversion of a parsed YAML document to a typed job, or to messages about every violation.

Applies the same validation as the API server, before anything is sent: types, bounds, rules, and
the changes that are allowed once a job has started. The caller reads files.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kubelora_api import names
from kubelora_api.field_paths import field_names, unknown_in
from kubelora_api.job import TRANSITIONS, LoraTrainingJob
from kubelora_api.schema import ApiModel, JsonObject, Rule, metadata_of
from kubelora_api.suggestions import did_you_mean


@dataclass(frozen=True)
class Problem:
    """A violation: the field's path from the document's root, and a message."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidDocumentError(ValueError):
    """The document is not a valid LoraTrainingJob."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems


def parse_job(document: object, *, local: bool = False) -> LoraTrainingJob:
    """Parse a document into a typed job with its defaults set.

    Args:
        document: The document.
        local: Whether to allow local paths where the cluster allows only URIs.

    Raises:
        InvalidDocumentError: With every violation found.
    """
    if not isinstance(document, dict):
        raise InvalidDocumentError(
            [Problem("", "the document must be a mapping of fields to values")]
        )
    _refuse_other_kinds(document)
    try:
        # Only the names that the API server knows: it prunes or refuses learning_rate.
        job = LoraTrainingJob.model_validate(_without_nulls(document), by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidDocumentError(_problems_of(error)) from None
    problems = list(_broken_rules(job, "", local))
    if problems:
        raise InvalidDocumentError(problems)
    return job


def check_change(new: LoraTrainingJob, old: LoraTrainingJob) -> list[Problem]:
    """List what the API server would reject in the change from ``old`` (with status) to ``new``."""
    return [
        Problem(t.path, t.message.removeprefix(f"{t.path}: "))
        for t in TRANSITIONS
        if not t.check(new, old)
    ]


def _refuse_other_kinds(document: JsonObject) -> None:
    found = (document.get("apiVersion"), document.get("kind"))
    if found != (names.API_VERSION, names.KIND):
        raise InvalidDocumentError(
            [
                Problem(
                    "kind" if found[0] == names.API_VERSION else "apiVersion",
                    f"expected apiVersion {names.API_VERSION} and kind {names.KIND}, "
                    f"found {found[0]!r} and {found[1]!r}",
                )
            ]
        )


def _without_nulls(value: Any) -> Any:
    """Remove nulls, as the API server does before it sets defaults."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _broken_rules(value: object, path: str, local: bool) -> Iterator[Problem]:
    """Yield the violated rules of ``value`` and of everything below it."""
    if isinstance(value, ApiModel):
        for rule in type(value).RULES:
            yield from _judge(rule, value, _join(path, rule.at), local)
        for name, info in type(value).model_fields.items():
            child, child_path = getattr(value, name), _join(path, info.alias or name)
            for rule in (m for m in metadata_of(info) if isinstance(m, Rule)):
                if child is not None:
                    yield from _judge(rule, child, child_path, local)
            yield from _broken_rules(child, child_path, local)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(item, f"{path}[{index}]", local)


def _judge(rule: Rule, value: object, path: str, local: bool) -> Iterator[Problem]:
    predicate = rule.local if local and rule.local else rule.check
    if not predicate(value):
        # A rule of the root object has the path in its message.
        head, _, rest = rule.message.partition(": ")
        if not path and rest and " " not in head:
            path, message = head, rest
        else:
            message = rule.message
        found = f", found {json.dumps(value)}" if isinstance(value, str) else ""
        yield Problem(path, message + found)


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def _problems_of(error: ValidationError) -> list[Problem]:
    unique: dict[Problem, None] = {}
    for detail in error.errors(include_url=False):
        unique[Problem(_path_of(detail["loc"]), _sentence_of(detail))] = None
    return list(unique)


def _path_of(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("int", "str", "[key]"):  # branches of a union, not fields
            path = _join(path, part)
    return path


def _sentence_of(detail: ErrorDetails) -> str:
    found = json.dumps(detail.get("input"), default=str)
    found = found if len(found) <= 80 else found[:77] + "..."
    if "env" in detail["loc"]:
        found = "another value"  # it may be a secret, and this text gets into a status or a log
    context = cast(dict[str, object], detail.get("ctx", {}))
    match detail["type"]:
        case "missing":
            return "required, but not set"
        case "extra_forbidden":
            return "unknown field" + _suggestion(detail["loc"])
        case "literal_error" | "enum":
            expected = str(context.get("expected"))
            near = did_you_mean(str(detail.get("input")), re.findall(r"'([^']*)'", expected))
            return f"must be {expected}, found {found}{near}"
        case "greater_than":
            return f"must be greater than {context['gt']:g}, found {found}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}, found {found}"
        case "less_than":
            return f"must be less than {context['lt']:g}, found {found}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}, found {found}"
        case "multiple_of":
            return f"must be a multiple of {context['multiple_of']}, found {found}"
        case "int_type" | "int_from_float":
            return f"must be an integer, found {found}"
        case "float_type":
            return f"must be a number, found {found}"
        case "string_type":
            return f"must be a string, found {found}"
        case "bool_type":
            return f"must be true or false, found {found}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a mapping of fields, found {found}{_as_mapping(detail)}"
        case "list_type":
            return f"must be a list, found {found}"
        case _:
            return f"{detail['msg'][0].lower()}{detail['msg'][1:]}, found {found}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """Suggest the field of the same group that was meant, or list its fields."""
    model = _model_at(location[:-1])
    return unknown_in(model, str(location[-1])) if model else ""


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the group at a location; None where no model describes it."""
    model: type[BaseModel] | None = LoraTrainingJob
    for part in location:
        if model is not None and not isinstance(part, int):
            model = field_names(model).get(part)
    return model


def _as_mapping(detail: ErrorDetails) -> str:
    """Show how to write a scalar where a mapping is expected: in the first field that takes it."""
    value, model = detail.get("input"), _model_at(detail["loc"])
    if model is None or "env" in detail["loc"] or not isinstance(value, str | int | float):
        return ""
    for name in field_names(model):
        try:
            model.model_validate({name: value}, by_alias=True, by_name=False)
        except ValidationError as error:
            if any(one["loc"][:1] == (name,) for one in error.errors(include_url=False)):
                continue
        return f"; write {{{name}: {value if isinstance(value, str) else json.dumps(value)}}}"
    return ""

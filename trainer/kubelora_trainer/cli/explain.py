"""`kubelora explain`: what a field of a job means, as `kubectl explain` prints it, offline."""

import textwrap

from kubelora_api.field_docs import FieldDoc, field_docs
from kubelora_api.field_paths import wrong_path
from kubelora_trainer.utils.errors import ConfigurationError

_WIDTH = 100
"""Columns of a description; most terminals and every log viewer have as many."""


def explanation(path: str, *, recursive: bool = False) -> str:
    """Describe a field, and the fields below it if it is a group.

    Args:
        path: The field's path, such as ``spec.training`` or ``training.learningRate``.
        recursive: Show the names and types of all fields below it, without descriptions.

    Raises:
        ConfigurationError: There is no such field.
    """
    field = _find(path)
    lines = [f"FIELD: {field.path} <{field.type}>", "", *_indented(field.description)]
    lines += [f"  - {line}" for line in _notes(field)]
    if field.below:
        lines += ["", "FIELDS:", *_fields(field, recursive)]
    return "\n".join(lines)


def _find(path: str) -> FieldDoc:
    bare = path.replace("[]", "").removeprefix("ltj.").removeprefix("loratrainingjob.").strip(".")
    roots = {name: field_docs(name) for name in ("spec", "status")}
    for candidate in (bare, f"spec.{bare}"):
        root = roots.get(candidate.split(".")[0])
        for field in root.walk() if root else ():
            if field.path.replace("[]", "") == candidate:
                return field
    problem = wrong_path(bare) or f"{path!r} is no field of spec or status"
    end = "" if problem.endswith("?") else "."
    raise ConfigurationError(
        f"{problem}{end} `kubelora explain spec --recursive` lists all fields."
    )


def _notes(field: FieldDoc) -> list[str]:
    notes = ["Required."] if field.required else []
    if field.default is not None and not isinstance(field.default, dict):
        notes.append(f"Default: {field.default}.")
    notes += [f"Limit: {limit}." for limit in field.limits]
    if field.path.startswith("spec.") and not field.below:
        notes.append(f"It {field.change or 'is fixed once the job has started'}.")
    return notes


def _fields(group: FieldDoc, recursive: bool, depth: int = 1) -> list[str]:
    lines = []
    for field in group.below:
        required = " -required-" if field.required else ""
        lines.append(f"{'  ' * depth}{field.name} <{field.type}>{required}")
        if recursive:
            lines += _fields(field, recursive, depth + 1)
        else:
            lines += [*_indented(field.description, 4), ""]
    return lines


def _indented(text: str, columns: int = 2) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * columns, subsequent_indent=" " * columns
    )

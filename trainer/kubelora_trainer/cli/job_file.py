"""Job files: from a path to a typed job, with file and line of every problem.

YAML is read as kubectl reads it, so that a file means the same on a laptop and on a cluster:
``1e-4`` is a number, a date is text, and a duplicate key is an error.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kubelora_api import names
from kubelora_api.documents import InvalidDocumentError, Problem, parse_job
from kubelora_api.field_paths import wrong_path
from kubelora_api.job import LoraTrainingJob
from kubelora_trainer.utils.errors import ConfigurationError
from kubelora_trainer.utils.paths import did_you_mean_path

_MAX_BYTES = 3 * 1024 * 1024
"""The API server's own limit."""
_MAX_DIGITS = 400
"""Beyond a float's 309; Python refuses to convert more than 4300, and no field needs as many."""
_SHOWN = 40
"""Number of characters of a value that a message shows."""
_PATH = re.compile(r"[\w-]+(\[\d+\])*(\.[\w-]+(\[\d+\])*)*")


class _KubernetesLoader(yaml.SafeLoader):
    """A SafeLoader with Go's number syntax, no dates, no duplicate keys, and JSON's escapes."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Report a constructor's failure with the line of the value."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, TypeError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"not a valid {kind}: {str(node.value)[:_SHOWN]!r}",
                problem_mark=node.start_mark,
            ) from None

    def construct_scalar(self, node: yaml.Node) -> Any:
        """Join surrogate pairs, by which JSON escapes characters beyond 16 bits, such as emoji."""
        value = super().construct_scalar(node)  # type: ignore[arg-type]
        if not isinstance(value, str) or value.isascii():
            return value
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise yaml.MarkedYAMLError(
                problem="half a character (one escape of a pair)", problem_mark=node.start_mark
            ) from None


_KubernetesLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if not tag.endswith(("float", "timestamp", "int"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_KubernetesLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|(0|[1-9][0-9_]*))$"),
    list("-+0123456789"),
)
_KubernetesLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    sign, digits = (-1 if text.startswith("-") else 1), text.lstrip("+-")
    if len(digits) > _MAX_DIGITS:
        raise ValueError("too many digits")
    if re.fullmatch(r"0o?[0-7]+", digits):
        return sign * int(digits.replace("o", ""), 8)
    return sign * int(digits, 0)


_KubernetesLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(frozen=True)
class JobDocument:
    """One document of a job file.

    Attributes:
        path: Path of the file.
        document: Content.
        lines: Line (from 1) of each field, by its path from the document's root.
    """

    path: str
    document: dict[str, Any]
    lines: Mapping[str, int]

    @property
    def name(self) -> str:
        """The job's name, as written."""
        metadata = self.document.get("metadata")
        return str(metadata.get("name")) if isinstance(metadata, dict) else "no name"

    def located(self, problem: Problem) -> str:
        """Format ``file:line: field: problem``; an absent field gets its parent's line."""
        field = problem.path
        while field and field not in self.lines:
            field = re.sub(r"(\.[^.\[]+|\[\d+\]|^[^.\[]+)$", "", field)
        return f"{self.path}:{self.lines.get(field, self.lines.get('', 1))}: {problem}"

    def refuse(
        self, problems: Iterable[Problem], settings: Iterable[str] = ()
    ) -> ConfigurationError:
        """Build an error with every problem on its own line, and the --set that caused it."""
        given = {setting.partition("=")[0]: setting for setting in settings}
        return ConfigurationError(
            "\n".join(
                f"--set {given[set_at]}: {problem}"
                if (set_at := _setting_above(problem.path, given))
                else self.located(problem)
                for problem in problems
            )
        )


def _setting_above(field: str, given: Iterable[str]) -> str | None:
    """Return the --set path that is the field or one of its parents."""
    return next((p for p in given if f"{field}.".startswith((f"{p}.", f"{p}["))), None)


def load_job_documents(path: str) -> list[JobDocument]:
    """Load every LoraTrainingJob in the file at ``path`` (``-``: standard input).

    Objects of other kinds, which a file for kubectl may hold too, are skipped. Raises
    ConfigurationError if the file cannot be read, is not YAML, or holds no such job.
    """
    text = _read(path)
    found: list[JobDocument] = []
    try:
        for node in yaml.compose_all(text, Loader=_KubernetesLoader):
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                found.append(_document(path, node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigurationError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: nested too deeply for a job file") from None
    jobs = [d for d in found if _is_ours(d.document)]
    if not jobs:
        kinds = ", ".join(str(d.document.get("kind")) for d in found) or "nothing"
        raise ConfigurationError(
            f"{path}: no {names.KIND} in this file (found: {kinds}); start it with "
            f"'apiVersion: {names.API_VERSION}' and 'kind: {names.KIND}'"
        )
    return jobs


def load_job(path: str, settings: Iterable[str] = (), *, local: bool = True) -> LoraTrainingJob:
    """Load the only job of a file.

    Args:
        path: The file, or ``-`` for standard input.
        settings: Overrides, such as ``spec.training.steps=10``.
        local: Accept local paths where the cluster accepts only URIs.

    Raises:
        ConfigurationError: Lists every problem with file and line.
    """
    documents = load_job_documents(path)
    if len(documents) > 1:
        jobs = ", ".join(d.name for d in documents)
        raise ConfigurationError(
            f"{path}: holds {len(documents)} jobs ({jobs}); train one at a time"
        )
    source = documents[0]
    settings = list(settings)
    check_paths(settings)
    document = apply_settings(source.document, settings)
    try:
        return parse_job(document, local=local)
    except InvalidDocumentError as invalid:
        raise source.refuse(invalid.problems, settings) from None


def check_paths(settings: Iterable[str]) -> None:
    """Check that every override names an existing field. Raises ConfigurationError."""
    for setting in settings:
        path, equals, _ = setting.partition("=")
        wrong = wrong_path(path) if equals and _PATH.fullmatch(path) else None
        if wrong:
            raise ConfigurationError(f"--set {setting}: {wrong}")


def apply_settings(document: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``document`` with each ``path=value`` set; values are parsed as YAML.

    Paths start at the document's root; list items are ``[0]``. Missing parents are created. Raises
    ConfigurationError if a setting has another form or descends into a scalar.
    """
    changed = deepcopy(document)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not _PATH.fullmatch(path):
            raise ConfigurationError(
                f"--set {setting}: expected path=value, such as spec.training.steps=10"
            )
        try:
            value = yaml.load(text, Loader=_KubernetesLoader)
        except (yaml.YAMLError, RecursionError):
            raise ConfigurationError(f"--set {setting}: the value is not YAML: {text!r}") from None
        _set(changed, re.findall(r"[\w-]+|\[\d+\]", path), value, setting)
    return changed


def _set(target: Any, parts: list[str], value: Any, setting: str) -> None:
    for index, part in enumerate(parts):
        key: str | int = int(part[1:-1]) if part.startswith("[") else part
        fits = isinstance(target, list) if isinstance(key, int) else isinstance(target, dict)
        if not fits or (isinstance(key, int) and key >= len(target)):
            where = ".".join(parts[:index]) or "the document"
            raise ConfigurationError(f"--set {setting}: {where} has no {part} to set")
        if index == len(parts) - 1:
            target[key] = value
        else:
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}
            target = target[key]


def _read(path: str) -> str:
    try:
        raw = sys.stdin.buffer.read(_MAX_BYTES + 1) if path == "-" else _read_file(Path(path))
        if len(raw) > _MAX_BYTES:
            raise ConfigurationError(f"{path}: larger than 3 MiB, so not a job file")
        return _without_tabs(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: no such file or directory{did_you_mean_path(Path(path))}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _without_tabs(text: str) -> str:
    """Replace tab indentation, which JSON allows and YAML does not."""
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return text
    return re.sub(r"^[ \t]+", lambda indent: " " * len(indent[0]), text, flags=re.MULTILINE)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def _is_ours(document: Mapping[str, Any]) -> bool:
    group = str(document.get("apiVersion")).partition("/")[0]
    return group == names.GROUP or document.get("kind") == names.KIND


def _document(path: str, node: yaml.Node) -> JobDocument:
    lines: dict[str, int] = {"": node.start_mark.line + 1}
    _collect_lines(node, "", lines, frozenset())
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(
            f"{path}:{lines['']}: expected a mapping of fields to values at the top of the document"
        )
    loader = _KubernetesLoader("")
    try:
        document = loader.construct_document(node)
    finally:
        loader.dispose()
    return JobDocument(path, document, lines)


def _collect_lines(
    node: yaml.Node, path: str, lines: dict[str, int], parents: frozenset[int]
) -> None:
    """Record the line of every field; reject duplicate keys and aliases to a parent."""
    if id(node) in parents:
        raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
    parents = parents | {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} appears twice", problem_mark=key.start_mark
                )
            seen.add(name)
            below = f"{path}.{name}" if path else name
            lines[below] = key.start_mark.line + 1
            _collect_lines(value, below, lines, parents)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[f"{path}[{index}]"] = value.start_mark.line + 1
            _collect_lines(value, f"{path}[{index}]", lines, parents)

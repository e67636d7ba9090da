"""Descriptions of a job's fields, from the CRD's schema: for `kubelora explain` and a docs page."""

from collections.abc import Iterator
from dataclasses import dataclass

from kubelora_api.crd import custom_resource_definition
from kubelora_api.decides import Decides, declarations
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec

AFTER_START = "may change in a job that has started"
NEXT_ATTEMPT = f"{AFTER_START}, and takes effect with the next attempt"
AFTER_STOP = "may change before a run resumes"


@dataclass(frozen=True)
class FieldDoc:
    """A field of a job.

    path: As ``--set`` and `kubectl explain` write it, with ``[]`` after a list.
    type: As `kubectl explain` writes it, such as ``[]string`` or ``map[string]number``.
    limits: One sentence part per limit: bounds, lengths, values, rules.
    default: None if there is none in the schema.
    change: When the field may change; empty for a group and for a field that never may.
    below: The fields of a group, in order.
    """

    path: str
    type: str
    description: str
    limits: tuple[str, ...]
    required: bool
    default: object
    change: str
    below: tuple["FieldDoc", ...]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit(".", 1)[-1].removesuffix("[]")

    def walk(self) -> Iterator["FieldDoc"]:
        """Yield this field and all below it."""
        yield self
        for one in self.below:
            yield from one.walk()


def field_docs(root: str = "spec") -> FieldDoc:
    """Describe a job's ``spec`` or ``status`` with all fields below it."""
    versions = custom_resource_definition()["spec"]["versions"]
    schema = versions[0]["schema"]["openAPIV3Schema"]
    changes = dict(declarations(JobSpec, "spec.")) if root == "spec" else {}
    required = root in schema.get("required", [])
    return _describe(root, schema["properties"][root], required, changes)


def _describe(
    path: str, schema: JsonObject, required: bool, changes: dict[str, Decides | None]
) -> FieldDoc:
    inner = schema["items"] if schema.get("type") == "array" else schema
    here = f"{path}[]" if inner is not schema and "properties" in inner else path
    needed = inner.get("required", [])
    return FieldDoc(
        path=here,
        type=_type(schema),
        description=schema.get("description") or inner.get("description", ""),
        limits=tuple(_limits(schema)),
        required=required,
        default=schema.get("default"),
        change=_change(changes.get(path.replace("[]", ""))),
        below=tuple(
            _describe(f"{here}.{name}", below, name in needed, changes)
            for name, below in inner.get("properties", {}).items()
        ),
    )


def _change(decides: Decides | None) -> str:
    if decides is None:
        return ""
    if decides.live:
        return AFTER_START if decides.at_once else NEXT_ATTEMPT
    return "" if decides.resume == "no" else AFTER_STOP


def _type(schema: JsonObject) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = str(schema.get("type", "object"))
    if kind == "array":
        return f"[]{_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map[string]{_type(schema['additionalProperties'])}"
    return "Object" if kind == "object" else kind


def _limits(schema: JsonObject) -> Iterator[str]:
    if "enum" in schema:
        yield f"one of {', '.join(map(str, schema['enum']))}"
    yield from _bounds(schema)
    if "multipleOf" in schema:
        yield f"a multiple of {schema['multipleOf']}"
    for size, of in (("Length", "characters"), ("Items", "items"), ("Properties", "entries")):
        least, most = schema.get(f"min{size}"), schema.get(f"max{size}")
        if most is not None:
            yield f"{least} to {most} {of}" if least else f"at most {most} {of}"
        elif least is not None:
            yield f"at least {least} {of}"
    if "pattern" in schema:
        yield f"matches {schema['pattern']}"
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            yield str(rule["message"])
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict) and "properties" not in inner:
            yield from (f"each: {limit}" for limit in _limits(inner))


def _bounds(schema: JsonObject) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        yield f"above {least}" if schema.get("exclusiveMinimum") else f"at least {least}"
    if most is not None:
        yield f"below {most}" if schema.get("exclusiveMaximum") else f"at most {most}"

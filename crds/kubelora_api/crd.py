"""The CustomResourceDefinition, as a structural schema built from the typed models.

Walks the models field by field rather than rewriting pydantic's JSON schema: structural schemas
have no ``$ref``, no ``anyOf`` with null and no numeric ``exclusiveMinimum``, and defaults, rules
and list types must be at the field that they apply to. ``python -m kubelora_api.crd`` prints the
CRD as JSON.
"""

import json
from inspect import cleandoc, getdoc
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kubelora_api import names
from kubelora_api.job import TRANSITIONS, LoraTrainingJob
from kubelora_api.pod import Quantity
from kubelora_api.schema import ApiModel, JsonObject, Kube, Rule, flatten, metadata_of, unwrap
from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus

Schema = dict[str, Any]
_SCALARS: dict[object, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number", "format": "double"},
}
COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("State", "string", ".status.state", "State of the job."),
    ("Step", "integer", ".status.progress.step", "Optimizer steps done."),
    ("Progress", "string", ".status.progress.percent", "Percentage of the steps done."),
    ("Loss", "number", ".status.progress.loss", "Mean loss of the last optimizer step."),
    ("Health", "string", ".status.health.verdict", "Numerical health."),
    ("Goodput", "string", ".status.progress.goodput", "Share of the running time that was useful."),
    ("ETA", "string", ".status.progress.eta", "Time left."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
)

_WIDE = frozenset({"Goodput"})
"""Columns that only `kubectl get -o wide` prints, because a terminal has no room for more."""


def custom_resource_definition() -> Schema:
    """Build the CRD as a JSON object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["all", "kubelora"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": description}
                        | ({"priority": 1} if name in _WIDE else {})
                        for name, kind, path, description in COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def _root() -> Schema:
    rules = [_validation(r) for r in LoraTrainingJob.RULES]
    rules += [{"rule": t.cel, "message": t.message} for t in TRANSITIONS]
    return {
        "type": "object",
        "description": _description(LoraTrainingJob),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _model(JobSpec),
            "status": _model(JobStatus),
        },
        "x-kubernetes-validations": rules,
    }


def _model(model: type[BaseModel]) -> Schema:
    schema: Schema = {"type": "object", "description": _description(model), "properties": {}}
    for name, info in model.model_fields.items():
        schema["properties"][info.alias or name] = _field(info)
    required = [i.alias or n for n, i in model.model_fields.items() if i.is_required()]
    if required:
        schema["required"] = required
    if issubclass(model, ApiModel) and model.RULES:
        schema["x-kubernetes-validations"] = [_validation(r) for r in model.RULES]
    return schema


def _field(info: FieldInfo) -> Schema:
    schema = _type(info.annotation, metadata_of(info))
    if info.description:
        schema["description"] = info.description
    default = _default(info)
    if default is not None:
        schema["default"] = default
    return schema


def _default(info: FieldInfo) -> object:
    """Return the default set by the server: scalars and groups; empty collections stay absent."""
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, JobStatus) or value is None or value is PydanticUndefined:
        return None
    if isinstance(value, ApiModel):
        return _without_empty(value.document()) or None
    return value if not isinstance(value, dict | list) else None


def _without_empty(document: JsonObject) -> JsonObject:
    cleaned = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in document.items()}
    return {k: v for k, v in cleaned.items() if v not in ({}, [])}


def _type(annotation: object, metadata: tuple[object, ...] = ()) -> Schema:
    bare, inner = unwrap(annotation)
    schema = _bare_type(bare)
    _constrain(schema, tuple(dict.fromkeys(metadata + flatten(inner))))
    return schema


def _bare_type(bare: object) -> Schema:
    if bare in _SCALARS:
        return dict(_SCALARS[bare])
    if bare == JsonObject:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if bare == Quantity:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
        }
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return _model(bare)
    origin, arguments = get_origin(bare), get_args(bare)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if origin in (Union, UnionType):
        raise TypeError(f"a union has no structural schema: {bare}")
    raise TypeError(f"no structural schema for {bare}")


def _constrain(schema: Schema, metadata: tuple[object, ...]) -> None:
    """Add bounds, extras and rules; the name of a size limit depends on the type."""
    size = {"array": "Items", "object": "Properties"}.get(schema.get("type", ""), "Length")
    for item in metadata:
        match item:
            case limits.Ge():
                schema["minimum"] = item.ge
            case limits.Gt():
                schema.update(minimum=item.gt, exclusiveMinimum=True)
            case limits.Le():
                schema["maximum"] = item.le
            case limits.Lt():
                schema.update(maximum=item.lt, exclusiveMaximum=True)
            case limits.MultipleOf():
                schema["multipleOf"] = item.multiple_of
            case limits.MinLen():
                schema[f"min{size}"] = item.min_length
            case limits.MaxLen():
                schema[f"max{size}"] = item.max_length
            case Kube():
                schema.update(item.extras)
            case Rule():
                schema.setdefault("x-kubernetes-validations", []).append(_validation(item))
            case _ if pattern := getattr(item, "pattern", None):
                schema["pattern"] = pattern


def _validation(rule: Rule) -> Schema:
    validation: Schema = {"rule": rule.cel, "message": rule.message}
    if rule.at:
        validation["fieldPath"] = f".{rule.at}"
    return validation


def _description(model: type[BaseModel]) -> str:
    return " ".join(cleandoc(getdoc(model) or "").split())


if __name__ == "__main__":
    print(json.dumps(custom_resource_definition(), indent=2))

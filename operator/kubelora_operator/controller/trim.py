"""Reduction of API objects to the fields that a look reads. Pure.

What is left of a Job or pod is a tenth of it. An event that changes nothing else, such as a change
of managed fields, of a probe's time or of another container's state, causes no look.
"""

from enum import StrEnum
from typing import Any, Final

from kubelora_api import names
from kubelora_api.schema import JsonObject


class Kind(StrEnum):
    """A watched kind, by its plural name."""

    JOB = names.PLURAL
    CHILD = "jobs"
    POD = "pods"


def trim(kind: Kind, document: JsonObject) -> JsonObject:
    """Return the document without what nobody reads, and without its resourceVersion.

    Args:
        kind: Kind of the object.
        document: The object.
    """
    if kind is Kind.JOB:
        metadata = _without(document["metadata"], ("managedFields", "resourceVersion"))
        return (
            {"apiVersion": names.API_VERSION, "kind": names.KIND}
            | document
            | {"metadata": metadata}
        )
    if kind is Kind.CHILD:
        return _trim_child(document)
    return _trim_pod(document)


def job_of(kind: Kind, document: JsonObject) -> str | None:
    """Return the name of the LoraTrainingJob that an object belongs to, None if it has none.

    Labels can be edited by anyone, so owner references alone count. A pod names only its Job, whose
    name begins with that of the LoraTrainingJob.

    Args:
        kind: Kind of the object.
        document: The object.
    """
    metadata = document["metadata"]
    if kind is Kind.JOB:
        return str(metadata["name"])
    owner = controller_of(document, names.KIND if kind is Kind.CHILD else "Job")
    if owner is None:
        return None
    name = str(owner.get("name", ""))
    return name if kind is Kind.CHILD else family_of(name).rpartition("-")[0] or None


def controller_of(document: JsonObject, kind: str) -> JsonObject | None:
    """Return the owner reference of this kind; None if there is none."""
    owners = document["metadata"].get("ownerReferences") or []
    return next((o for o in owners if o.get("kind") == kind), None)


def family_of(child: str) -> str:
    """Return the part of a child's name that all attempts of its job share."""
    return child.rpartition("-")[0]


def _trim_child(document: JsonObject) -> JsonObject:
    metadata, status = document["metadata"], document.get("status") or {}
    queue = (metadata.get("labels") or {}).get(names.LABEL_QUEUE_NAME)
    begun = (metadata.get("annotations") or {}).get(names.ANNOTATION_BEGUN_WITH)
    return {
        "metadata": _only(metadata, ("name", "namespace", "uid", "deletionTimestamp"))
        | _owners(metadata)
        | ({"labels": {names.LABEL_QUEUE_NAME: queue}} if queue is not None else {})
        | ({"annotations": {names.ANNOTATION_BEGUN_WITH: begun}} if begun else {}),
        "spec": _only(document.get("spec") or {}, ("suspend",)),
        "status": _only(status, ("startTime",)) | _conditions(status, _CHILD_CONDITIONS),
    }


def _trim_pod(document: JsonObject) -> JsonObject:
    metadata, status = document["metadata"], document.get("status") or {}
    index = (metadata.get("annotations") or {}).get(names.ANNOTATION_COMPLETION_INDEX)
    containers = [
        _only(c, ("name", "ready", "state"))
        for c in status.get("containerStatuses") or []
        if c.get("name") == names.TRAINER_CONTAINER
    ]
    return {
        "metadata": _only(
            metadata, ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp")
        )
        | _owners(metadata)
        | ({"annotations": {names.ANNOTATION_COMPLETION_INDEX: index}} if index else {}),
        "spec": _only(document.get("spec") or {}, ("nodeName",)),
        "status": _only(status, ("phase", "podIP", "reason", "message"))
        | _conditions(status, _POD_CONDITIONS)
        | ({"containerStatuses": containers} if containers else {}),
    }


_CHILD_CONDITIONS: Final = frozenset({"Complete", "Failed"})
_POD_CONDITIONS: Final = frozenset({"PodScheduled", "DisruptionTarget"})
_CONDITION_FIELDS: Final = ("type", "status", "reason", "message", "lastTransitionTime")


def _conditions(status: JsonObject, kinds: frozenset[str]) -> JsonObject:
    kept = [
        _only(c, _CONDITION_FIELDS)
        for c in status.get("conditions") or []
        if c.get("type") in kinds
    ]
    return {"conditions": kept} if kept else {}


def _owners(metadata: JsonObject) -> JsonObject:
    owners = metadata.get("ownerReferences") or []
    kept = [_only(o, ("kind", "name", "uid", "controller")) for o in owners]
    return {"ownerReferences": kept} if kept else {}


def _only(part: dict[str, Any], keys: tuple[str, ...]) -> JsonObject:
    return {k: part[k] for k in keys if k in part}


def _without(part: dict[str, Any], keys: tuple[str, ...]) -> JsonObject:
    return {k: v for k, v in part.items() if k not in keys}

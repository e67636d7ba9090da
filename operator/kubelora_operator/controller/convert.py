"""Conversion of API objects to the fields that the rules need. Pure.

Labels can be edited by anyone, so ownership is decided by the owner's uid and the attempt by the
object's name, neither of which can change.
"""

import json
import re
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import DISRUPTION, attempt_in
from kubelora_operator.controller.pod_reports import parse_termination_message
from kubelora_operator.decision.conditions import parse_time
from kubelora_operator.decision.snapshot import Child, Explanation, NodeState, TrainerPod

_CLAIM_MISSING: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_IMAGE_PULL_REASONS: Final = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}
)
_RELEVANT_WARNINGS: Final = frozenset(
    {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
)
_WARNING_AGE: Final = timedelta(minutes=4)
"""The kubelet repeats a warning about every two minutes while its cause persists."""
_CONTAINER_CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})


def child_from(document: JsonObject, job: str, uid: str) -> Child | None:
    """Convert a batch/v1 Job to a child; None if it does not belong to the job.

    Args:
        document: The batch/v1 Job.
        job: Name of the LoraTrainingJob.
        uid: Its uid.
    """
    metadata, spec, status = (_part(document, k) for k in ("metadata", "spec", "status"))
    attempt = attempt_in(str(metadata.get("name", "")), job, uid)
    if attempt is None or not owned_by(document, uid):
        return None
    conditions = {
        c.get("type"): c for c in status.get("conditions") or [] if c.get("status") == "True"
    }
    failed, complete = conditions.get("Failed"), conditions.get("Complete")
    state: Literal["active", "complete", "failed"] = "active"
    if complete or failed:
        state = "complete" if complete else "failed"
    ended = complete or failed or {}
    return Child(
        name=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        attempt=attempt,
        state=state,
        deleting="deletionTimestamp" in metadata,
        suspended=spec.get("suspend") is True,
        queue=(metadata.get("labels") or {}).get(names.LABEL_QUEUE_NAME),
        failure=Explanation(str(failed.get("reason", "")), str(failed.get("message", "")))
        if failed
        else None,
        started=_time(status.get("startTime")),
        finished=_time(ended.get("lastTransitionTime")),
        begun_with=_begun_with(metadata),
    )


def _begun_with(metadata: JsonObject) -> tuple[tuple[str, str], ...]:
    """Read the digests of a Job; none if an earlier operator made it, or someone edited them."""
    text = (metadata.get("annotations") or {}).get(names.ANNOTATION_BEGUN_WITH) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        return ()
    return tuple((k, str(v)) for k, v in found.items()) if isinstance(found, dict) else ()


def pod_from(document: JsonObject, job: str, uid: str, owners: frozenset[str]) -> TrainerPod | None:
    """Convert a pod of one of the job's children; None if it does not belong to the job.

    A pod whose owner has the name but not the uid of a known Job is believed nothing but that it
    lives: it is a forgery, or left by a Job that was deleted before its uid was recorded.

    Args:
        document: The pod.
        job: Name of the LoraTrainingJob.
        uid: Its uid.
        owners: uids of the job's children.
    """
    metadata, status = _part(document, "metadata"), _part(document, "status")
    owner = next((o for o in _owners(document) if o.get("kind") == "Job"), None)
    attempt = attempt_in(str(owner.get("name", "")), job, uid) if owner else None
    if attempt is None:
        return None
    container: JsonObject = next(
        (
            c
            for c in status.get("containerStatuses") or []
            if c.get("name") == names.TRAINER_CONTAINER
        ),
        {},
    )
    state = container.get("state") or {}
    ended, running = state.get("terminated") or {}, state.get("running") or {}
    final, message = parse_termination_message(str(ended.get("message") or ""), uid, attempt)
    pod = TrainerPod(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        attempt=attempt,
        index=_index(metadata),
        phase=str(status.get("phase") or "Pending"),
        address=status.get("podIP"),
        deleting="deletionTimestamp" in metadata,
        delete_by=_time(metadata.get("deletionTimestamp")),
        node_name=_part(document, "spec").get("nodeName"),
        disrupted=_condition_with(status, DISRUPTION, "True") is not None,
        running=bool(running),
        ready=bool(container.get("ready")),
        scheduled=_time(
            (_condition_with(status, "PodScheduled", "True") or {}).get("lastTransitionTime")
        ),
        since=_time(running.get("startedAt") or ended.get("startedAt")),
        ended=_time(ended.get("finishedAt")),
        waiting=_waiting_explanation(status, state.get("waiting") or {}),
        exit_code=ended.get("exitCode"),
        out_of_memory=ended.get("reason") == "OOMKilled",
        verdict=Explanation(str(status["reason"]), str(status.get("message") or ""))
        if status.get("reason")
        else None,
        final=final,
        termination_message=message,
    )
    if owner and owner.get("uid") in owners:
        return pod
    return _stranger(pod) if pod.live else None


def _stranger(pod: TrainerPod) -> TrainerPod:
    """Return what is believed of a live pod whose Job is unknown: that it lives."""
    message = (
        f"pod {pod.name} belongs to a Job that does not exist any more; Kubernetes deletes it, and "
        "the job continues after that"
    )
    return TrainerPod(
        pod.name,
        pod.uid,
        pod.attempt,
        phase=pod.phase,
        deleting=pod.deleting,
        delete_by=pod.delete_by,
        node_name=pod.node_name,
        waiting=Explanation("UnknownOwner", message),
    )


def node_state_from(name: str, document: JsonObject | None) -> NodeState:
    """Convert a node, or None if it is gone, to what is to be known about a pod that does not end.

    Args:
        name: Name of the node.
        document: The node.
    """
    if document is None:
        return NodeState(True, f"its node {name} is gone")
    conditions = _part(document, "status").get("conditions") or []
    ready: JsonObject = next((c for c in conditions if c.get("type") == "Ready"), {})
    if ready.get("status") == "True":
        return NodeState(False, f"its node {name} is ready")
    since = ready.get("lastTransitionTime")
    return NodeState(True, f"its node {name} is not ready" + (f" since {since}" if since else ""))


def warning_from(events: list[JsonObject], now: datetime) -> str | None:
    """Return the newest warning's message; old ones are ignored because they may be resolved."""
    relevant = [
        (when, str(e.get("message") or ""))
        for e in events
        if e.get("reason") in _RELEVANT_WARNINGS
        and (when := _event_time(e))
        and now - when < _WARNING_AGE
    ]
    return max(relevant)[1] or None if relevant else None


def owned_by(document: JsonObject, uid: str) -> bool:
    """Return whether the object's controller has this uid."""
    return any(o.get("uid") == uid and o.get("controller") for o in _owners(document))


def _waiting_explanation(status: JsonObject, waiting: JsonObject) -> Explanation | None:
    """Explain why the pod's container is not running and what to do, as far as the status shows."""
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _IMAGE_PULL_REASONS:
        return Explanation(
            "ImagePullFailed",
            f"the image can't be pulled: {message or reason}. Check podTemplate.image and "
            "podTemplate.imagePullSecrets; the pod starts once the image can be pulled",
        )
    if reason in _CONTAINER_CONFIG_REASONS:
        return Explanation(
            "ContainerConfigError", f"the container can't be created: {message or reason}"
        )
    unscheduled = _condition_with(status, "PodScheduled", "False")
    if unscheduled is None:
        return None
    scheduling_message = str(unscheduled.get("message") or "")
    missing = _CLAIM_MISSING.search(scheduling_message)
    if missing:
        return Explanation(
            "ClaimNotFound",
            f"PersistentVolumeClaim {missing[1]} does not exist in this namespace: create it and "
            "the pod starts",
        )
    if "unbound immediate PersistentVolumeClaims" in scheduling_message:
        return Explanation(
            "ClaimNotBound", f"a PersistentVolumeClaim is not bound yet: {scheduling_message}"
        )
    return Explanation("Unschedulable", f"the pod cannot be scheduled: {scheduling_message}")


def _index(metadata: JsonObject) -> int:
    text = str((metadata.get("annotations") or {}).get(names.ANNOTATION_COMPLETION_INDEX, "0"))
    return int(text) if text.isascii() and text.isdecimal() else 0


def _condition_with(status: JsonObject, kind: str, truth: str) -> JsonObject | None:
    conditions = status.get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == truth), None)


def _owners(document: JsonObject) -> list[JsonObject]:
    return list(_part(document, "metadata").get("ownerReferences") or [])


def _part(document: JsonObject, key: str) -> JsonObject:
    value: Any = document.get(key)
    return value if isinstance(value, dict) else {}


def _time(text: object) -> datetime | None:
    try:
        return parse_time(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _event_time(event: JsonObject) -> datetime | None:
    created = _part(event, "metadata").get("creationTimestamp")
    return _time(event.get("lastTimestamp") or event.get("eventTime") or created)

"""From objects as the API server returns them to the few facts that the rules need. Pure.

Labels can be edited by anyone, so an object is taken for ours by its owner's uid and its attempt
by its name, neither of which can change.
"""

import re
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import DISRUPTION, attempt_in
from kubelora_operator.controller.pod_reports import read_final
from kubelora_operator.decision.conditions import time_of
from kubelora_operator.decision.snapshot import Child, TrainerPod, Why

_CLAIM_MISSING: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_IMAGE_TROUBLE: Final = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}
)
_TELLING_WARNINGS: Final = frozenset(
    {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
)
_WARNING_AGE: Final = timedelta(minutes=4)
"""The kubelet repeats what still holds every two minutes or so."""
_CONFIG_TROUBLE: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})


def child_from(document: JsonObject, job: str, uid: str) -> Child | None:
    """A batch/v1 Job as a child; None where it is not the job's."""
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
        failure=Why(str(failed.get("reason", "")), str(failed.get("message", "")))
        if failed
        else None,
        started=_time(status.get("startTime")),
        finished=_time(ended.get("lastTransitionTime")),
    )


def pod_from(document: JsonObject, job: str, uid: str) -> TrainerPod | None:
    """A pod of one of the job's children; None where it is none."""
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
    final, words = read_final(str(ended.get("message") or ""), uid, attempt)
    return TrainerPod(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        attempt=attempt,
        index=_index(metadata),
        phase=str(status.get("phase") or "Pending"),
        address=status.get("podIP"),
        deleting="deletionTimestamp" in metadata,
        disrupted=_has(status, DISRUPTION, "True") is not None,
        running=bool(running),
        ready=bool(container.get("ready")),
        since=_time(running.get("startedAt")),
        ended=_time(ended.get("finishedAt")),
        stuck=_stuck(status, state.get("waiting") or {}),
        exit_code=ended.get("exitCode"),
        out_of_memory=ended.get("reason") == "OOMKilled",
        final=final,
        last_words=words,
    )


def warning_from(events: list[JsonObject], now: datetime) -> str | None:
    """What the newest warning says that can still hold the pod up; old ones may be mended."""
    telling = [
        (when, str(e.get("message") or ""))
        for e in events
        if e.get("reason") in _TELLING_WARNINGS
        and (when := _event_time(e))
        and now - when < _WARNING_AGE
    ]
    return max(telling)[1] or None if telling else None


def owned_by(document: JsonObject, uid: str) -> bool:
    """Whether the object's controller has this uid."""
    return any(o.get("uid") == uid and o.get("controller") for o in _owners(document))


def _stuck(status: JsonObject, waiting: JsonObject) -> Why | None:
    """Why the pod's container does not run, and what to do, as far as its status says."""
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _IMAGE_TROUBLE:
        return Why(
            "ImagePullFailed",
            f"the image can't be pulled: {message or reason}. Check podTemplate.image and "
            "podTemplate.imagePullSecrets; the pod goes on by itself once it can be pulled",
        )
    if reason in _CONFIG_TROUBLE:
        return Why("ContainerConfigError", f"the container can't be created: {message or reason}")
    unscheduled = _has(status, "PodScheduled", "False")
    if unscheduled is None:
        return None
    told = str(unscheduled.get("message") or "")
    missing = _CLAIM_MISSING.search(told)
    if missing:
        return Why(
            "ClaimNotFound",
            f"PersistentVolumeClaim {missing[1]} does not exist in this namespace: create it and "
            "the pod starts by itself",
        )
    if "unbound immediate PersistentVolumeClaims" in told:
        return Why("ClaimNotBound", f"a claim has no volume yet: {told}")
    return Why("Unschedulable", f"no node takes the pod: {told}")


def _index(metadata: JsonObject) -> int:
    text = str((metadata.get("annotations") or {}).get(names.ANNOTATION_COMPLETION_INDEX, "0"))
    return int(text) if text.isascii() and text.isdecimal() else 0


def _has(status: JsonObject, kind: str, truth: str) -> JsonObject | None:
    conditions = status.get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == truth), None)


def _owners(document: JsonObject) -> list[JsonObject]:
    return list(_part(document, "metadata").get("ownerReferences") or [])


def _part(document: JsonObject, key: str) -> JsonObject:
    value: Any = document.get(key)
    return value if isinstance(value, dict) else {}


def _time(text: object) -> datetime | None:
    try:
        return time_of(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _event_time(event: JsonObject) -> datetime | None:
    created = _part(event, "metadata").get("creationTimestamp")
    return _time(event.get("lastTimestamp") or event.get("eventTime") or created)

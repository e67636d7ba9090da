"""Manifests of an attempt: a ConfigMap with the job document, an Indexed Job, and for several
nodes the headless Service through which their pods find each other.

Pure builders from a typed job to the objects sent to the API server. Names are deterministic, so
two operators running at the same time create the same object instead of two attempts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from kubelora_api import names
from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import ExitCode
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.pod_spec import build_pod_spec
from kubelora_operator.decision.spec_changes import digests_of

DISRUPTION: Final = "DisruptionTarget"


def child_name(job: str, uid: str, attempt: int) -> str:
    """Return ``<job>-<first five characters of the uid>-<attempt>``.

    A job name of at most 40 characters keeps this, with a pod's suffix, below the limit of 63.

    Args:
        job: Name of the LoraTrainingJob.
        uid: Its uid.
        attempt: Number of the attempt.
    """
    return f"{job}-{uid[:5]}-{attempt}"


def attempt_in(child: str, job: str, uid: str) -> int | None:
    """Parse the attempt number from a child's name; None if the name is not one of ours.

    Args:
        child: Name of the object.
        job: Name of the LoraTrainingJob.
        uid: Its uid.
    """
    prefix = f"{job}-{uid[:5]}-"
    number = child.removeprefix(prefix)
    if not child.startswith(prefix) or not number.isascii() or not number.isdigit():
        return None
    return int(number) if number == str(int(number)) and int(number) > 0 else None


def build_config_map(job: LoraTrainingJob, attempt: int) -> JsonObject:
    """Build the ConfigMap with the resolved document, which `kubelora train` reads in the pod.

    It carries the job's uid, which the trainer uses as the run id. It is immutable so that an
    attempt's configuration can't change while it runs. It has no podTemplate because more people
    may read ConfigMaps than jobs.
    """
    document = job.recorded_document() | {"metadata": _identity(job)}
    document.pop("status", None)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": attempt_metadata(job, attempt),
        "immutable": True,
        "data": {names.JOB_FILE: json.dumps(document, indent=2)},
    }


def build_service(job: LoraTrainingJob, attempt: int) -> JsonObject | None:
    """Build the headless Service that gives each pod a DNS name; None for a single node.

    The names must resolve before the pods are ready because the rendezvous makes them ready.
    """
    if job.spec.workers.nodes == 1:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": attempt_metadata(job, attempt),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": attempt_selector(job, attempt),
            "ports": [
                {
                    "name": names.RENDEZVOUS_PORT_NAME,
                    "port": names.RENDEZVOUS_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def build_job(
    job: LoraTrainingJob, attempt: int, trainer_image: str, avoided_nodes: Sequence[str] = ()
) -> JsonObject:
    """Build the attempt's Job.

    Args:
        job: The LoraTrainingJob.
        attempt: Number of the attempt.
        trainer_image: Image used if the job's podTemplate does not set one.
        avoided_nodes: Nodes whose GPU failed in an earlier attempt.
    """
    template = job.spec.pod_template
    pod_labels = dict(template.labels) | _labels(job, attempt)
    pod_metadata: JsonObject = {"labels": pod_labels}
    if template.annotations:
        pod_metadata["annotations"] = dict(template.annotations)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": attempt_metadata(job, attempt, _queue_labels(job))
        | {"annotations": {names.ANNOTATION_BEGUN_WITH: json.dumps(digests_of(job.spec))}},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.spec.workers.nodes,
            "parallelism": job.spec.workers.nodes,
            # The operator restarts, not the Job: a new attempt needs a number and a delay.
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _pod_failure_policy(),
            **_success_policy(job.spec.workers.nodes),
            "template": {
                "metadata": pod_metadata,
                "spec": build_pod_spec(
                    job.spec,
                    attempt=attempt,
                    child=child_name(job.metadata.name, job.metadata.uid or "", attempt),
                    trainer_image=trainer_image,
                    avoided_nodes=avoided_nodes,
                ),
            },
        },
    }


def _success_policy(nodes: int) -> JsonObject:
    """Let rank 0 decide success: it exits with 0 only after the exported adapter was verified."""
    if nodes == 1:
        return {}
    return {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def _pod_failure_policy() -> JsonObject:
    """Record the cause of a failure on the Job, where it outlives the pod.

    There is no rule for exit code 75 because failing the Job at once races with a suspension by
    the queue, and no catch-all because backoffLimit 0 fails the Job anyway.
    """
    return {
        "rules": [
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": names.TRAINER_CONTAINER,
                    "operator": "In",
                    "values": [
                        int(ExitCode.CONFIGURATION),
                        int(ExitCode.NUMERICAL),
                        int(ExitCode.HELD),
                        int(ExitCode.OUT_OF_MEMORY),
                        int(ExitCode.DEVICE),
                    ],
                },
            },
            {
                "action": "FailJob",
                "onPodConditions": [{"type": DISRUPTION, "status": "True"}],
            },
        ]
    }


def attempt_selector(job: LoraTrainingJob, attempt: int) -> dict[str, str]:
    """Return the labels that select the pods of an attempt."""
    return {names.LABEL_JOB_UID: job.metadata.uid or "", names.LABEL_ATTEMPT: str(attempt)}


def attempt_metadata(
    job: LoraTrainingJob, attempt: int, extra: Mapping[str, str] | None = None
) -> JsonObject:
    """Build the metadata of an object that the job owns.

    Args:
        job: The LoraTrainingJob.
        attempt: Number of the attempt.
        extra: Labels besides those of each object.
    """
    uid = job.metadata.uid or ""
    return {
        "name": child_name(job.metadata.name, uid, attempt),
        "namespace": job.metadata.namespace,
        "labels": _labels(job, attempt) | dict(extra or {}),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": job.metadata.name,
                "uid": uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def _labels(job: LoraTrainingJob, attempt: int) -> dict[str, str]:
    return {
        names.LABEL_NAME: names.TRAINER_APP,
        names.LABEL_MANAGED_BY: names.OPERATOR_APP,
        names.LABEL_JOB: job.metadata.name,
        names.LABEL_JOB_UID: job.metadata.uid or "",
        names.LABEL_ATTEMPT: str(attempt),
    }


def _queue_labels(job: LoraTrainingJob) -> dict[str, str]:
    """Return the labels that make Kueue manage the Job, including its ``suspend``."""
    labels = {}
    if job.spec.queue_name:
        labels[names.LABEL_QUEUE_NAME] = job.spec.queue_name
    priority = job.metadata.labels.get(names.LABEL_PRIORITY_CLASS)
    if priority:
        labels[names.LABEL_PRIORITY_CLASS] = priority
    return labels


def _identity(job: LoraTrainingJob) -> JsonObject:
    return {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "uid": job.metadata.uid,
    }

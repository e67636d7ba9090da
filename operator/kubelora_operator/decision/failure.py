"""Classification of a failed attempt: why it ended, and whether its restart counts.

Pure. The Job's failure message comes first because it outlives the pod: the pod failure policy
writes the exit code or the disruption into it.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from kubelora_api.names import ExitCode
from kubelora_api.status import JobStatus
from kubelora_operator.decision.conditions import RUNNING
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod

_EXIT_CODE: Final = re.compile(r"failed with exit code (\d+)")
HEALTH_POLICY_REASON: Final = "HealthPolicy"
_DISRUPTION: Final = "condition DisruptionTarget"
JOB_DELETED: Final = "JobDeleted"
WAITING_REASONS: Final = frozenset(
    {
        "Unschedulable",
        "ImagePullFailed",
        "ClaimNotFound",
        "ClaimNotBound",
        "ContainerConfigError",
        "PodNotStarted",
        "PodNotCreated",
    }
)
"""Reasons why a pod did not run, which explain the end of an attempt better than its deletion."""
FREE_REASONS: Final = WAITING_REASONS | {
    "Disrupted",
    "Interrupted",
    JOB_DELETED,
    "NodeFailure",
    "NodeLost",
    "PodDeleted",
    HEALTH_POLICY_REASON,
}
"""Reasons of ends that don't count against maxRestarts."""
_NODE_FAILURES: Final = re.compile(
    "UnexpectedAdmissionError|OutOf.*|NodeShutdown|Shutdown|Terminated|NodeAffinity|NodeLost"
    "|Evicted|Preempting|Preempted|TopologyAffinityError|TaintToleration|NodePorts"
)
"""Reasons in the status of a pod that a kubelet refused or ended, whatever the pod runs."""
_OWN_LIMIT: Final = re.compile("exceed.* limit")
"""In the message of an eviction: the pod used more storage than its own limit allows."""


class RestartCost(Enum):
    """Effect of a failed attempt on the restarts that are left."""

    FREE = "free"
    COUNTED = "counted"
    FINAL = "final"
    SUSPENDED = "suspended"
    """Not counted, but the next attempt waits for the user."""


@dataclass(frozen=True)
class Failure:
    """Reason and message of a failed attempt, and whether its restart counts."""

    cost: RestartCost
    explanation: Explanation


def classify_failure(snapshot: Snapshot, child: Child) -> Failure:
    """Determine why a failed child failed."""
    job_failure = child.failure or Explanation("Unknown", "")
    found = _EXIT_CODE.search(job_failure.message)
    code = int(found[1]) if found else None
    pod = _failed_pod(snapshot.pods_of(child.attempt), code)
    if code is not None and (failure := _from_exit_code(code, pod)):
        return failure
    lost_peer = pod is not None and pod.exit_code == ExitCode.PEER_LOST
    pods = snapshot.pods_of(child.attempt) if lost_peer else (pod,)
    by_node = next((p.verdict for p in pods if p and p.verdict), None)
    if by_node and _NODE_FAILURES.fullmatch(by_node.reason):
        return _ended_by_node(by_node)
    if _DISRUPTION in job_failure.message or any(p.disrupted for p in pods if p):
        return Failure(
            RestartCost.FREE,
            Explanation("Disrupted", "the pod was evicted or preempted, or its node was lost"),
        )
    if job_failure.reason != "BackoffLimitExceeded":
        return Failure(
            RestartCost.COUNTED,
            Explanation(
                "JobFailed",
                f"Job {child.name} failed ({job_failure.reason}): {job_failure.message}",
            ),
        )
    if pod is None or pod.deleting:
        return waiting_failure(snapshot.status) or Failure(
            RestartCost.FREE,
            Explanation("PodDeleted", "the pod was deleted, but not by the operator"),
        )
    return _failure_from_pod(snapshot, pod)


def waiting_failure(status: JobStatus) -> Failure | None:
    """Return the failure of an attempt that ended while a pod waited for something, or None.

    The cause was reported while the pod was there to show it; afterwards nothing else does.
    """
    running = next((c for c in status.conditions if c.type == RUNNING), None)
    if running is None or running.status == "True" or running.reason not in WAITING_REASONS:
        return None
    message = f"it ended before all its pods ran: {running.message}"
    return Failure(RestartCost.FREE, Explanation(running.reason, message))


def _ended_by_node(verdict: Explanation) -> Failure:
    if verdict.reason == "Evicted" and _OWN_LIMIT.search(verdict.message):
        message = (
            f"the pod was evicted: {verdict.message.strip()} Raise the limit in podTemplate in a "
            "new job"
        )
        return Failure(RestartCost.COUNTED, Explanation("StorageLimitExceeded", message))
    detail = f": {verdict.message.strip()}" if verdict.message.strip() else ""
    return Failure(
        RestartCost.FREE,
        Explanation("NodeFailure", f"the node refused or ended the pod ({verdict.reason}{detail})"),
    )


def _from_exit_code(code: int, pod: TrainerPod | None) -> Failure | None:
    """Return the failure for an exit code that is not retried; None for other codes."""
    match code:
        case ExitCode.CONFIGURATION:
            return Failure(
                RestartCost.FINAL,
                Explanation("ConfigurationError", _pod_message(pod, _CONFIGURATION)),
            )
        case ExitCode.NUMERICAL:
            return Failure(
                RestartCost.FINAL, Explanation("NumericalFailure", _pod_message(pod, _NUMERICAL))
            )
        case ExitCode.HELD:
            return Failure(
                RestartCost.SUSPENDED, Explanation(HEALTH_POLICY_REASON, _pod_message(pod, _HELD))
            )
        case _:
            return None


def externally_deleted(child_name: str, status: JobStatus) -> Failure:
    """Return the failure of an attempt whose Job was deleted, but not by the operator.

    Its outcome is unknown: it may have crashed. So only the first such end is free.
    """
    deleted = f"Job {child_name} was deleted, but not by the operator"
    if waited := waiting_failure(status):
        return waited
    if status.unknown_ends:
        message = f"{deleted}, and not for the first time: its outcome is unknown"
        return Failure(RestartCost.COUNTED, Explanation("OutcomeUnknown", message))
    return Failure(RestartCost.FREE, Explanation(JOB_DELETED, deleted))


_CONFIGURATION: Final = (
    "the configuration, the model or the data is invalid (exit code 2); see the pod's log, fix the "
    "cause and create a new job"
)
_NUMERICAL: Final = (
    "the trainer stopped because of a numerical failure (exit code 3); see the pod's log"
)
_HELD: Final = (
    "the watchdog reported a critical finding and health.policy is Suspend (exit code 5); a "
    "checkpoint was saved"
)


def _failed_pod(pods: tuple[TrainerPod, ...], code: int | None) -> TrainerPod | None:
    """Return the pod that made the attempt fail: one that exited with ``code``, else the first.

    A pod that only lost its peer, or was deleted because another one failed, is considered last.
    """
    ended = [p for p in pods if p.phase == "Failed" or (p.exit_code or 0) != 0]
    in_order = sorted(ended, key=lambda p: (p.ended is None, p.ended or datetime.max))
    own = [p for p in in_order if not p.deleting]
    others_than_peer_lost = [p for p in own if p.exit_code != ExitCode.PEER_LOST]
    named = [p for p in in_order if code is not None and p.exit_code == code]
    return next(iter(named or others_than_peer_lost or own or in_order), None)


def _failure_from_pod(snapshot: Snapshot, pod: TrainerPod) -> Failure:
    if pod.exit_code is not None and (failure := _from_exit_code(pod.exit_code, pod)):
        return failure
    if pod.exit_code == ExitCode.INTERRUPTED:
        return Failure(
            RestartCost.FREE,
            Explanation("Interrupted", "the trainer was interrupted after it saved a checkpoint"),
        )
    if pod.exit_code == ExitCode.PEER_LOST:
        return _peer_lost(snapshot, pod)
    if pod.out_of_memory:
        return Failure(RestartCost.COUNTED, Explanation("OutOfMemory", _out_of_memory(snapshot)))
    code = "without an exit code" if pod.exit_code is None else f"with exit code {pod.exit_code}"
    message = pod.final.message if pod.final else pod.termination_message
    detail = f": {message}" if message else f"; see `kubectl logs {pod.name}`"
    return Failure(
        RestartCost.COUNTED, Explanation("TrainerFailed", f"the trainer ended {code}{detail}")
    )


def _peer_lost(snapshot: Snapshot, pod: TrainerPod) -> Failure:
    """Return the failure of an attempt whose remaining pods all lost a peer."""
    if waited := waiting_failure(snapshot.status):
        return waited
    nodes = snapshot.spec.workers.nodes if snapshot.spec else 1
    indices = {p.index for p in snapshot.pods_of(pod.attempt)}
    gone = [str(index) for index in range(nodes) if index not in indices]
    if gone:
        return Failure(
            RestartCost.FREE,
            Explanation(
                "PodDeleted",
                f"the pod of index {', '.join(gone)} was deleted or its node was lost, and the "
                "other pods exited as a result",
            ),
        )
    return Failure(
        RestartCost.COUNTED,
        Explanation(
            "PeerLost",
            "the pods lost contact with each other and none reported a cause: check their logs and "
            "the network between their nodes",
        ),
    )


def _out_of_memory(snapshot: Snapshot) -> str:
    limit = None
    if snapshot.spec and snapshot.spec.pod_template.resources:
        limit = snapshot.spec.pod_template.resources.limits.get("memory")
    bound = f"its memory limit of {limit}" if limit else "the memory of its node"
    batch = snapshot.spec.training.batch_size if snapshot.spec else 1
    lower = (
        f"lower training.batchSize (now {batch})"
        if batch > 1
        else "lower dataset.resolution or set training.gradientCheckpointing"
    )
    return (
        f"the trainer was killed because it exceeded {bound}: raise "
        f"podTemplate.resources.limits.memory, or {lower} in a new job"
    )


def _pod_message(pod: TrainerPod | None, otherwise: str) -> str:
    if pod and pod.final:
        return pod.final.message
    return pod.termination_message if pod and pod.termination_message else otherwise

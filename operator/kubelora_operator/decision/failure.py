"""Classification of a failed attempt: why it ended, and whether its restart counts.

Pure. The Job's failure message comes first because it outlives the pod: the pod failure policy
writes the exit code or the disruption into it.
"""

import re
from collections.abc import Sequence
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
    "DeviceFailure",
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
    """A failed attempt.

    cost: Whether its restart counts.
    explanation: Reason and message.
    memory_step: Steps done when memory ran out.
    failed_node: Node whose GPU failed.
    """

    cost: RestartCost
    explanation: Explanation
    memory_step: int | None = None
    failed_node: str | None = None


def classify_failure(snapshot: Snapshot, child: Child) -> Failure:
    """Determine why a failed child failed."""
    job_failure = child.failure or Explanation("Unknown", "")
    found = _EXIT_CODE.search(job_failure.message)
    code = int(found[1]) if found else None
    pod = _failed_pod(snapshot.pods_of(child.attempt), code)
    if code is not None and (failure := _from_exit_code(code, pod, snapshot.status)):
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


def _from_exit_code(code: int, pod: TrainerPod | None, status: JobStatus) -> Failure | None:
    """Return the failure for an exit code with a meaning of its own; None for other codes.

    Args:
        code: The exit code.
        pod: The pod that exited with it, if it is still known.
        status: The job's status, with the step at which memory ran out before.
    """
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
        case ExitCode.OUT_OF_MEMORY:
            return _memory_ran_out(pod, status)
        case ExitCode.DEVICE:
            return _device_failed(pod, status)
        case _:
            return None


def _device_failed(pod: TrainerPod | None, status: JobStatus) -> Failure:
    """Return the failure of an attempt whose device failed, or computed wrongly.

    A device that reports nothing and has other results is known from a step that was computed
    again. That is free on a job's first two nodes: three of such devices are less likely than a
    program whose results change by themselves, and every attempt would end that way.
    """
    node = pod.node_name if pod else None
    health = pod.final.health if pod and pod.final else None
    if health is None or not any(found.cause == "Hardware" for found in health.findings):
        explanation = Explanation("DeviceFailure", _pod_message(pod, _DEVICE))
        return Failure(RestartCost.FREE, explanation, failed_node=node)
    within = len(status.avoided_nodes) < _FREE_VERDICTS
    return Failure(
        RestartCost.FREE if within else RestartCost.COUNTED,
        Explanation(MISCOMPUTES_REASON, _pod_message(pod, _DEVICE)),
        failed_node=node,
    )


def _memory_ran_out(pod: TrainerPod | None, status: JobStatus) -> Failure:
    """Return the failure of a trainer that ran out of memory: final the second time at a step.

    The first time may be chance: another process on the GPU, or fragmented memory.
    """
    step = pod.final.step if pod and pod.final else None
    message = _pod_message(pod, _MEMORY)
    if step is not None and step == status.out_of_memory_step:
        message = f"memory ran out twice after step {step}, so it would again. {message}"
        return Failure(RestartCost.FINAL, Explanation("OutOfMemory", message))
    return Failure(RestartCost.COUNTED, Explanation("OutOfMemory", message), memory_step=step)


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


def avoid(nodes: Sequence[str], failed: str) -> list[str]:
    """Return the nodes that new attempts should avoid, after the GPU of one more has failed."""
    return [*(node for node in nodes if node != failed), failed][-_MOST_AVOIDED:]


MISCOMPUTES_REASON: Final = "DeviceMiscomputes"
_FREE_VERDICTS: Final = 2
"""Nodes that a job may leave for free because their devices compute wrongly."""
_MOST_AVOIDED: Final = 4
"""A cluster where more GPUs fail has another fault, and the job must be able to run somewhere."""
_CONFIGURATION: Final = (
    "the configuration, the model or the data is invalid (exit code 2); see the pod's log, fix the "
    "cause and create a new job"
)
_NUMERICAL: Final = (
    "the trainer stopped because of a numerical failure (exit code 3); see the pod's log"
)
_MEMORY: Final = (
    "memory ran out (exit code 6); see the pod's log for where and for what to lower in a new job"
)
_DEVICE: Final = "the GPU or its driver failed (exit code 7); see the pod's log"
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
    status = snapshot.status
    if pod.exit_code is not None and (failure := _from_exit_code(pod.exit_code, pod, status)):
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

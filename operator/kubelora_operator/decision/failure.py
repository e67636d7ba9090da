"""How an attempt ended, and what that costs: the exit codes' contract, read from Job and pods.

Pure. The Job's own failure message is the first witness, for it outlives the pod: the pod failure
policy writes the exit code or the disruption into it.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

from kubelora_api.names import ExitCode
from kubelora_operator.decision.snapshot import Child, Observation, TrainerPod, Why

_EXIT_CODE: Final = re.compile(r"failed with exit code (\d+)")
HELD_REASON: Final = "HealthPolicy"
_DISRUPTION: Final = "condition DisruptionTarget"
_FIRST_DELAY: Final = timedelta(seconds=10)
_LONGEST_DELAY: Final = timedelta(minutes=10)
_LONG_RUN: Final = timedelta(minutes=5)
"""An attempt that ran this long was no hot loop: its free restart need not wait."""


class Cost(Enum):
    """What an ended attempt costs."""

    FREE = "free"
    COUNTED = "counted"
    FINAL = "final"
    HELD = "held"
    """Free, but the next attempt waits for the user."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended, in a reason and a sentence, and what it costs."""

    cost: Cost
    why: Why


def cause_of(seen: Observation, child: Child) -> Cause:
    """Why a failed child failed."""
    told = child.failure or Why("Unknown", "")
    found = _EXIT_CODE.search(told.message)
    code = int(found[1]) if found else None
    pod = _failed_pod(seen.pods_of(child.attempt), code)
    if code is not None and (judged := _by_contract(code, pod)):
        return judged
    lost_peer = pod is not None and pod.exit_code == ExitCode.PEER_LOST
    witnesses = seen.pods_of(child.attempt) if lost_peer else (pod,)
    if _DISRUPTION in told.message or any(p.disrupted for p in witnesses if p):
        return Cause(
            Cost.FREE,
            Why("Disrupted", "the pod was evicted, preempted or lost with its node"),
        )
    if told.reason != "BackoffLimitExceeded":
        return Cause(
            Cost.COUNTED,
            Why("JobFailed", f"Job {child.name} failed ({told.reason}): {told.message}"),
        )
    if pod is None or pod.deleting:
        return Cause(Cost.FREE, Why("PodDeleted", "the pod was deleted from outside"))
    return _cause_from_pod(seen, pod)


def _by_contract(code: int, pod: TrainerPod | None) -> Cause | None:
    """What the contract says of an exit code that nobody retries."""
    match code:
        case ExitCode.CONFIGURATION:
            return Cause(Cost.FINAL, Why("ConfigurationError", _sentence(pod, _CONFIGURATION)))
        case ExitCode.NUMERICAL:
            return Cause(Cost.FINAL, Why("NumericalFailure", _sentence(pod, _NUMERICAL)))
        case ExitCode.HELD:
            return Cause(Cost.HELD, Why(HELD_REASON, _sentence(pod, _HELD)))
        case _:
            return None


def deleted_from_outside(child_name: str) -> Cause:
    """The attempt's Job is gone and we did not delete it."""
    return Cause(Cost.FREE, Why("JobDeleted", f"Job {child_name} was deleted from outside"))


def restart_delay(cost: Cost, count: int, ran: timedelta | None) -> timedelta:
    """How long to wait before the next attempt: 10 s, 20 s, 40 s, … at most 10 minutes.

    count: restarts of this kind so far, this one included. ran: how long the attempt ran, None
    where nobody knows. A free restart after a long run (or one by hand) does not wait.
    """
    if cost is Cost.FREE and (count <= 1 or ran is None or ran >= _LONG_RUN):
        return timedelta()
    exponent = min(max(count - (2 if cost is Cost.FREE else 1), 0), 16)
    return min(_FIRST_DELAY * (1 << exponent), _LONGEST_DELAY)


def ran_for(child: Child | None) -> timedelta | None:
    """How long a finished child was at work."""
    if child is None or child.started is None or child.finished is None:
        return None
    return max(child.finished - child.started, timedelta())


def end_of(child: Child | None, now: datetime) -> datetime:
    """When an attempt ended, as far as anyone knows."""
    return child.finished if child and child.finished else now


_CONFIGURATION: Final = (
    "the trainer found the configuration, the model or the data wrong (exit code 2); "
    "see the pod's log, mend it and create a new job"
)
_NUMERICAL: Final = (
    "the trainer stopped because its numbers were wrong (exit code 3); see the pod's log"
)
_HELD: Final = (
    "the watchdog found something critical, and health.policy is Suspend (exit code 5); a "
    "checkpoint is saved"
)


def _failed_pod(pods: tuple[TrainerPod, ...], code: int | None) -> TrainerPod | None:
    """The pod that the attempt ended by: one with the Job's ``code``, else the first that ended.

    A pod that only lost its peer, or was deleted because another had failed, is none where there is
    any other.
    """
    ended = [p for p in pods if p.phase == "Failed" or (p.exit_code or 0) != 0]
    in_order = sorted(ended, key=lambda p: (p.ended is None, p.ended or datetime.max))
    own = [p for p in in_order if not p.deleting]
    causes = [p for p in own if p.exit_code != ExitCode.PEER_LOST]
    named = [p for p in in_order if code is not None and p.exit_code == code]
    return next(iter(named or causes or own or in_order), None)


def _cause_from_pod(seen: Observation, pod: TrainerPod) -> Cause:
    if pod.exit_code is not None and (judged := _by_contract(pod.exit_code, pod)):
        return judged
    if pod.exit_code == ExitCode.INTERRUPTED:
        return Cause(
            Cost.FREE, Why("Interrupted", "the trainer was interrupted and saved a checkpoint")
        )
    if pod.exit_code == ExitCode.PEER_LOST:
        return _peer_lost(seen, pod)
    if pod.out_of_memory:
        return Cause(Cost.COUNTED, Why("OutOfMemory", _out_of_memory(seen)))
    code = "without an exit code" if pod.exit_code is None else f"with exit code {pod.exit_code}"
    words = pod.final.message if pod.final else pod.last_words
    said = f": {words}" if words else f"; see `kubectl logs {pod.name}`"
    return Cause(Cost.COUNTED, Why("TrainerFailed", f"the trainer ended {code}{said}"))


def _peer_lost(seen: Observation, pod: TrainerPod) -> Cause:
    """All that is left of a gang are pods that lost a peer."""
    nodes = seen.spec.workers.nodes if seen.spec else 1
    indices = {p.index for p in seen.pods_of(pod.attempt)}
    gone = [str(index) for index in range(nodes) if index not in indices]
    if gone:
        return Cause(
            Cost.FREE,
            Why(
                "PodDeleted",
                f"the pod of index {', '.join(gone)} was deleted from outside, or lost with its "
                "node, and the others ended with it",
            ),
        )
    return Cause(
        Cost.COUNTED,
        Why(
            "PeerLost",
            "the pods lost each other and none says why: look at their logs, and whether the "
            "network between their nodes is sound",
        ),
    )


def _out_of_memory(seen: Observation) -> str:
    limit = None
    if seen.spec and seen.spec.pod_template.resources:
        limit = seen.spec.pod_template.resources.limits.get("memory")
    bound = f"its memory limit of {limit}" if limit else "the memory of its node"
    batch = seen.spec.training.batch_size if seen.spec else 1
    lower = (
        f"lower training.batchSize (now {batch})"
        if batch > 1
        else "lower dataset.resolution or set training.gradientCheckpointing"
    )
    return (
        f"the trainer was killed because it went over {bound}: raise "
        f"podTemplate.resources.limits.memory, or {lower} in a new job"
    )


def _sentence(pod: TrainerPod | None, otherwise: str) -> str:
    if pod and pod.final:
        return pod.final.message
    return pod.last_words if pod and pod.last_words else otherwise

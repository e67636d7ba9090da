"""Pods that don't end although they were deleted, because their node is lost. Pure.

No kubelet is left to end such a pod, so it would keep the job waiting forever. It is force-deleted
a minute after its grace period, but only if its node is not ready or gone: a container on a working
node must not be forgotten while it runs.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_operator.decision.conditions import SUSPENDED, format_time
from kubelora_operator.decision.failure import Failure, RestartCost
from kubelora_operator.decision.plan_builder import REQUEUE_SOON, PlanBuilder, set_not_running
from kubelora_operator.decision.snapshot import Explanation, Snapshot, TrainerPod

FORCE_AFTER: Final = timedelta(seconds=60)
"""After the grace period: a kubelet that is only slow reports several times within a minute."""
_REQUEUE_OVERDUE: Final = timedelta(seconds=30)
"""No event announces that a node is back or gone; two looks before `FORCE_AFTER` is over."""


def forced_pods(snapshot: Snapshot, now: datetime) -> tuple[TrainerPod, ...]:
    """Return the pods to force-delete."""
    return tuple(p for p in snapshot.pods if _is_forced(p, now))


def lost_with_its_node(pod: TrainerPod) -> Failure:
    """Return the failure of an attempt whose pod was lost with its node."""
    found = f": {pod.node.message}" if pod.node else ""
    return Failure(
        RestartCost.FREE,
        Explanation("NodeLost", f"pod {pod.name} was lost with its node{found}"),
    )


def report_overdue_pod(builder: PlanBuilder) -> PlanBuilder:
    """Report in the condition which pod does not end, why, and what happens when."""
    pod = next((p for p in builder.snapshot.pods if p.overdue(builder.now) and p.node), None)
    if pod is None or pod.delete_by is None or pod.node is None:
        return builder
    explanation = _explain(pod, pod.delete_by)
    builder = set_not_running(builder, explanation.reason, explanation.message)
    if builder.conditions.reason(SUSPENDED) == "Suspending":
        builder = builder.set_condition(SUSPENDED, False, "Suspending", explanation.message)
    left = pod.delete_by + FORCE_AFTER - builder.now
    soon = max(left, REQUEUE_SOON) if left > timedelta() else _REQUEUE_OVERDUE
    return replace(builder, requeue_after=min(soon, _REQUEUE_OVERDUE))


def _is_forced(pod: TrainerPod, now: datetime) -> bool:
    lost = pod.node is not None and pod.node.lost is True
    return lost and pod.delete_by is not None and pod.overdue(now - FORCE_AFTER)


def _explain(pod: TrainerPod, due: datetime) -> Explanation:
    assert pod.node is not None
    should = f"pod {pod.name} should have ended by {format_time(due)}"
    if pod.node.lost:
        force = format_time(due + FORCE_AFTER)
        return Explanation(
            "NodeLost",
            f"{should}, but {pod.node.message}. It is deleted by force at {force}; the job "
            "continues after that",
        )
    if pod.node.lost is None:
        return Explanation(
            "PodTerminating",
            f"{should}, and {pod.node.message}. If the node is lost, run `kubectl delete pod "
            f"{pod.name} --force`",
        )
    return Explanation(
        "PodTerminating",
        f"{should}, but is still terminating, and {pod.node.message}; see `kubectl describe pod "
        f"{pod.name}`",
    )

"""Gangs of which only a part got a node: their GPUs are given back, and they try again. Pure.

Two gangs that each hold half of the GPUs would wait for each other forever, unless a queue admits
gangs as one. How long a gang holds on, and how long it waits then, differs from job to job and from
attempt to attempt, so that one of them gets all it needs.
"""

import zlib
from datetime import datetime, timedelta
from typing import Final

from kubelora_operator.decision.failure import Failure, RestartCost
from kubelora_operator.decision.snapshot import Explanation, Snapshot, TrainerPod

GANG_WAITING: Final = "GangWaiting"
HOLD: Final = timedelta(minutes=10)
"""An autoscaler usually brings a GPU node within ten minutes."""
_HOLD_SPREAD: Final = timedelta(minutes=5)
"""Several times what a scheduler needs to give the freed GPUs to the gang that still waits."""
_SHORTEST_DELAY: Final = timedelta(seconds=30)
"""Pods that were given back have usually ended by then."""
_DELAY_SPREAD: Final = timedelta(minutes=5)
"""Enough for a dozen gangs to come one after the other."""


def half_gang(
    snapshot: Snapshot, pods: tuple[TrainerPod, ...], now: datetime
) -> tuple[timedelta, int, int] | None:
    """Return how long a part of the gang still holds its nodes, its pods with one, and all pods.

    Args:
        snapshot: What is known about the job.
        pods: Pods of the attempt that neither ended nor are being deleted.
        now: Current time.

    Returns:
        None if all of the gang's pods have a node, or none has.
    """
    nodes = snapshot.spec.workers.nodes if snapshot.spec else 1
    placed = [p.scheduled for p in pods if p.scheduled is not None]
    if not placed or len(placed) >= nodes:
        return None
    hold = HOLD + _HOLD_SPREAD * _share(snapshot.uid, snapshot.status.attempt)
    return max(max(placed) + hold - now, timedelta()), len(placed), nodes


def gang_waiting(placed: int, nodes: int, cause: Explanation) -> Failure:
    """Return the end of an attempt that gave its nodes back.

    Args:
        placed: Pods that got a node.
        nodes: All pods of the gang.
        cause: Why another one got none.
    """
    message = (
        f"only {placed} of {nodes} pods got a node, and they have given their GPUs back to others: "
        f"{cause.message.rstrip('.')}"
    )
    return Failure(RestartCost.FREE, Explanation(GANG_WAITING, message))


def gang_delay(uid: str, attempt: int) -> timedelta:
    """Return how long a gang waits before it tries again: 30 s to 5.5 min."""
    return _SHORTEST_DELAY + _DELAY_SPREAD * _share(uid, -attempt)


def _share(uid: str, attempt: int) -> float:
    """Return a number from 0 to 1 that looks random and is always the same for the same attempt."""
    return zlib.crc32(f"{uid}/{attempt}".encode()) / 2**32

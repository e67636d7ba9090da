"""The reconcile plan of one job, as a value that `PlanApplier` applies.

The order of the steps is fixed so that a crash between two of them does no harm: the single status
update, deletes and creates (never without a successful status update), then Events.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from kubelora_api.status import JobStatus
from kubelora_operator.decision.snapshot import Child, TrainerPod


@dataclass(frozen=True)
class JobEvent:
    """An Event shown by `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class ReconcilePlan:
    """The changes to make for one job.

    force_delete: Pods on lost nodes, deleted without waiting for their kubelet.
    create: Number of the attempt whose objects (ConfigMap, Job, Service) are created.
    delete_job: Whether to delete the LoraTrainingJob itself, and with it what it owns.
    requeue_after: When to reconcile again without a change; None to wait for one.
    """

    status: JobStatus
    delete: tuple[Child, ...] = ()
    force_delete: tuple[TrainerPod, ...] = ()
    create: int | None = None
    delete_job: bool = False
    events: tuple[JobEvent, ...] = ()
    requeue_after: timedelta | None = None

"""The reconcile plan of one job, as a value that `PlanApplier` applies.

The order of the steps is fixed so that a crash between two of them does no harm: deletes, the
single status update, creates (never without a successful status update), then Events.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from kubelora_api.status import JobStatus
from kubelora_operator.decision.snapshot import Child


@dataclass(frozen=True)
class JobEvent:
    """An Event shown by `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class ReconcilePlan:
    """The changes to make for one job.

    create: Number of the attempt whose objects (ConfigMap, Job, Service) are created.
    requeue_after: When to reconcile again without a change; None to wait for one.
    """

    status: JobStatus
    delete: tuple[Child, ...] = ()
    create: int | None = None
    events: tuple[JobEvent, ...] = ()
    requeue_after: timedelta | None = None

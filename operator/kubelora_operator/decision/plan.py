"""What is to be done about one job: a decision as a value, which `act` carries out.

The order of a plan is fixed, so that a crash between two of its steps harms nothing: deletes, the
one status write, then creates (never without a status write that succeeded), then Events.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from kubelora_api.status import JobStatus
from kubelora_operator.decision.snapshot import Child


@dataclass(frozen=True)
class Notice:
    """An Event that a user sees in `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    create: number of the attempt whose objects (ConfigMap, Job, Service) are to be created.
    again_after: when to look again although nothing may have happened; None to wait for a change.
    """

    status: JobStatus
    delete: tuple[Child, ...] = ()
    create: int | None = None
    notices: tuple[Notice, ...] = ()
    again_after: timedelta | None = None

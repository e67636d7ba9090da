"""What is known about one job at one moment, as values that the decision is made from.

Read from the API server and from the pods by `observe`; nothing here does I/O. Objects of other
kinds are reduced to the few facts that a rule depends on, so that the rules read as sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from kubelora_api.report import FinalReport, RunReport
from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus

_MOST_RESTARTS: Final = 100


@dataclass(frozen=True)
class Why:
    """A CamelCase reason and a sentence that tells what to do."""

    reason: str
    message: str


@dataclass(frozen=True)
class Child:
    """A batch/v1 Job that belongs to the job: one attempt."""

    name: str
    uid: str
    attempt: int
    state: Literal["active", "complete", "failed"] = "active"
    deleting: bool = False
    suspended: bool = False
    queue: str | None = None
    failure: Why | None = None
    started: datetime | None = None
    finished: datetime | None = None

    @property
    def live(self) -> bool:
        """Whether it can still have a running pod."""
        return self.state == "active"


@dataclass(frozen=True)
class TrainerPod:
    """A pod of an attempt.

    index: which of the attempt's nodes it is; 0 tells of the run.
    stuck: why its container does not run, in the cluster's words.
    since: when its container started. ended: when it terminated.
    last_words: the termination message when it is no final report.
    """

    name: str
    uid: str
    attempt: int
    index: int = 0
    phase: str = "Pending"
    address: str | None = None
    deleting: bool = False
    disrupted: bool = False
    running: bool = False
    ready: bool = False
    since: datetime | None = None
    ended: datetime | None = None
    stuck: Why | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    final: FinalReport | None = None
    last_words: str = ""

    @property
    def live(self) -> bool:
        """Whether its container may still run."""
        return self.phase not in ("Succeeded", "Failed")


def speaker(pods: Sequence[TrainerPod]) -> TrainerPod | None:
    """The pod that is asked how the run fares: the newest of index 0, else the newest."""
    return next((p for p in reversed(pods) if p.index == 0), pods[-1] if pods else None)


def laggard(pods: Sequence[TrainerPod]) -> TrainerPod | None:
    """A pod that the others wait for: one that does not run, best one that says why."""
    waiting = [p for p in reversed(pods) if not p.running]
    return next((p for p in waiting if p.stuck), waiting[0] if waiting else None)


@dataclass(frozen=True)
class Unreachable:
    """A pod was asked how it fares and gave no usable answer."""

    cause: str


@dataclass(frozen=True)
class Observation:
    """Everything that a decision about one job is made from.

    spec: None where the resource breaks our own rules; ``problems`` then says how.
    anchors: attempts whose ConfigMap exists; looked up only where the status knows of none.
    report: None where no pod was asked, because none runs or it was asked a moment ago.
    rejection: why the API server refused to create the attempt's objects, just now.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec | None
    suspend: bool
    status: JobStatus
    problems: tuple[str, ...] = ()
    deleting: bool = False
    children: tuple[Child, ...] = ()
    pods: tuple[TrainerPod, ...] = ()
    anchors: frozenset[int] = frozenset()
    report: RunReport | Unreachable | None = None
    rejection: Why | None = None

    @property
    def max_restarts(self) -> int:
        """Restarts that the user allows; the API's bound while the spec can't be read."""
        return self.spec.restart_policy.max_restarts if self.spec else _MOST_RESTARTS

    def child_of(self, attempt: int) -> Child | None:
        """The attempt's Job."""
        return next((c for c in self.children if c.attempt == attempt), None)

    def pods_of(self, attempt: int) -> tuple[TrainerPod, ...]:
        """The attempt's pods."""
        return tuple(p for p in self.pods if p.attempt == attempt)

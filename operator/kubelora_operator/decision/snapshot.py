"""A snapshot of what is known about one job: the input of a decision.

`SnapshotReader` fills it from the API server and the pods; nothing here does I/O. Objects of other
kinds are reduced to the few fields that a rule depends on, so that the rules read as sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from kubelora_api.report import FinalReport, RunReport
from kubelora_api.spec import JobSpec
from kubelora_api.status import JobStatus

JobKey = tuple[str, str]
"""Namespace and name of a LoraTrainingJob."""
_MOST_RESTARTS: Final = 100
"""Used while the spec can't be read: the CRD accepts no larger value."""


@dataclass(frozen=True)
class Explanation:
    """A CamelCase reason and a message with advice, as in a condition."""

    reason: str
    message: str


@dataclass(frozen=True)
class Child:
    """A batch/v1 Job owned by the LoraTrainingJob: one attempt.

    begun_with: Digests of the parts of the spec that it was made from; see `spec_changes`.
    """

    name: str
    uid: str
    attempt: int
    state: Literal["active", "complete", "failed"] = "active"
    deleting: bool = False
    suspended: bool = False
    queue: str | None = None
    failure: Explanation | None = None
    started: datetime | None = None
    finished: datetime | None = None
    begun_with: tuple[tuple[str, str], ...] = ()

    @property
    def live(self) -> bool:
        """Whether it may still have a running pod."""
        return self.state == "active"


@dataclass(frozen=True)
class NodeState:
    """The state of a pod's node.

    lost: Whether it is not ready or gone; None if it could not be read.
    message: What was found, such as ``node gpu-3 has not been ready since …``.
    """

    lost: bool | None
    message: str


@dataclass(frozen=True)
class TrainerPod:
    """A pod of an attempt.

    index: Node of the attempt; the pod of index 0 reports on the run.
    delete_by: When its grace period is over, for a pod that is being deleted.
    node_name: Name of its node, once it is scheduled.
    node: State of its node; read only when the pod should be gone but is not.
    waiting: Why its container is not running, in the cluster's words.
    scheduled: When it was assigned to its node, so that it holds its GPUs.
    since: When its container started, also if it has ended.
    ended: When its container terminated.
    exit_code: The trainer's own, whatever the pod's phase: a sidecar may outlive the trainer.
    verdict: The kubelet's reason and message if it refused or ended the pod, such as Evicted.
    termination_message: The termination message if it is not a final report.
    """

    name: str
    uid: str
    attempt: int
    index: int = 0
    phase: str = "Pending"
    address: str | None = None
    deleting: bool = False
    delete_by: datetime | None = None
    node_name: str | None = None
    node: NodeState | None = None
    disrupted: bool = False
    running: bool = False
    ready: bool = False
    scheduled: datetime | None = None
    since: datetime | None = None
    ended: datetime | None = None
    waiting: Explanation | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    verdict: Explanation | None = None
    final: FinalReport | None = None
    termination_message: str = ""

    @property
    def live(self) -> bool:
        """Whether any of its containers may still be running."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def writing(self) -> bool:
        """Whether its trainer may still be running and write to the output."""
        return self.live and self.exit_code is None

    def overdue(self, now: datetime) -> bool:
        """Return whether it should be gone: it was deleted and its grace period is over."""
        return self.live and self.delete_by is not None and now >= self.delete_by


def reporting_pod(pods: Sequence[TrainerPod]) -> TrainerPod | None:
    """Return the pod whose report is read: the newest of index 0, else the newest."""
    return next((p for p in reversed(pods) if p.index == 0), pods[-1] if pods else None)


def blocking_pod(pods: Sequence[TrainerPod]) -> TrainerPod | None:
    """Return a pod that is not running and blocks the others, preferably one with a reason."""
    waiting = [p for p in reversed(pods) if not p.running]
    return next((p for p in waiting if p.waiting), waiting[0] if waiting else None)


@dataclass(frozen=True)
class Unreachable:
    """The result of a report request that got no usable answer."""

    message: str


@dataclass(frozen=True)
class Snapshot:
    """Everything that a decision about one job depends on.

    spec: None if the resource is invalid; ``problems`` then lists the violations.
    status_problems: What can't be read in the status, which is then left as it is.
    config_map_attempts: Attempts whose ConfigMap exists; read only if the status has no attempt.
    report: None if no report was requested, because no pod runs or the last one is recent.
    rejection: Why the API server has just refused to create the attempt's objects.
    refusals: What the pod policy does not allow, as sentences.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec | None
    suspend: bool
    status: JobStatus
    problems: tuple[str, ...] = ()
    status_problems: tuple[str, ...] = ()
    deleting: bool = False
    children: tuple[Child, ...] = ()
    pods: tuple[TrainerPod, ...] = ()
    config_map_attempts: frozenset[int] = frozenset()
    report: RunReport | Unreachable | None = None
    rejection: Explanation | None = None
    refusals: tuple[str, ...] = ()

    @property
    def max_restarts(self) -> int:
        """Restarts that the user allows; the API's maximum if the spec can't be parsed."""
        return self.spec.restart_policy.max_restarts if self.spec else _MOST_RESTARTS

    def child_of(self, attempt: int) -> Child | None:
        """Return the attempt's Job, or None."""
        return next((c for c in self.children if c.attempt == attempt), None)

    def pods_of(self, attempt: int) -> tuple[TrainerPod, ...]:
        """Return the attempt's pods."""
        return tuple(p for p in self.pods if p.attempt == attempt)

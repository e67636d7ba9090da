"""A job and its children as a cluster would treat them, in memory, for the rules to act upon.

A second, much simpler account of what the API server and the Job controller do: create-only
objects, status writes guarded by a version, pods that outlive their deleted Job for a while.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from kubelora_api.documents import parse_job
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_api.status import Condition, JobStatus
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.plan import ReconcilePlan
from kubelora_operator.decision.snapshot import Child, Explanation, Snapshot, TrainerPod

UID = "0b5e7a10-1111-4222-8333-944455556666"
START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def document(**spec: object) -> JsonObject:
    """A small valid job as `kubectl get -o json` gives it, with groups of ``spec`` replaced."""
    return {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": "bottles", "namespace": "studio", "uid": UID, "generation": 1},
        "spec": {
            "model": {"uri": "pvc://models/sdxl"},
            "dataset": {"uri": "pvc://photos/bottles"},
            "training": {"steps": 100},
            "output": {"uri": "pvc://adapters/bottles"},
        }
        | spec,
    }


def spec(**groups: object) -> JobSpec:
    """The typed spec of `document`."""
    return parse_job(document(**groups)).spec


def make_snapshot(**changes: object) -> Snapshot:
    """A job that was just made, with ``changes``."""
    blank = Snapshot(
        namespace="studio",
        name="bottles",
        uid=UID,
        generation=1,
        spec=spec(),
        suspend=False,
        status=JobStatus(),
    )
    return replace(blank, **changes)  # type: ignore[arg-type]


def condition(plan_or_status: ReconcilePlan | JobStatus, kind: str) -> Condition:
    """The condition of a type; the test fails where there is none."""
    status = plan_or_status.status if isinstance(plan_or_status, ReconcilePlan) else plan_or_status
    return next(c for c in status.conditions if c.type == kind)


def truth(status: JobStatus, kind: str) -> str | None:
    """``True``, ``False``, ``Unknown``, or None where it was never told."""
    return next((c.status for c in status.conditions if c.type == kind), None)


@dataclass
class World:
    """One job, its Jobs and pods, and a clock."""

    max_restarts: int = 2
    now: datetime = START
    status: JobStatus = field(default_factory=JobStatus)
    version: int = 1
    suspend: bool = False
    policy: str = "Warn"
    deadlines: JsonObject = field(default_factory=dict)
    """Of the spec: activeDeadlineSeconds, pendingDeadlineSeconds, ttlSecondsAfterFinished."""
    deleted: bool = False
    """The LoraTrainingJob itself."""
    generation: int = 1
    children: dict[int, Child] = field(default_factory=dict)
    pods: list[TrainerPod] = field(default_factory=list)
    config_maps: set[int] = field(default_factory=set)
    queue: str | None = None
    created: list[int] = field(default_factory=list)
    serial: int = 0
    sidecar: bool = False
    """A service mesh's container outlives the trainer: neither pod nor Job ends by itself."""

    def snapshot(self) -> Snapshot:
        return make_snapshot(
            spec=spec(
                restartPolicy={"maxRestarts": self.max_restarts},
                health={"policy": self.policy},
                **self.deadlines,
            ),
            generation=self.generation,
            suspend=self.suspend,
            status=self.status,
            children=tuple(self.children.values()),
            pods=tuple(self.pods),
            config_map_attempts=frozenset(self.config_maps)
            if self.status.attempt == 0
            else frozenset(),
        )

    def edit(self, **fields: object) -> None:
        """The user changes the spec."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.generation += 1

    def apply(self, plan: ReconcilePlan, version: int) -> bool:
        """Carry a plan out; False where its status write was refused as stale."""
        if plan.status != self.status or plan.create is not None or plan.delete:
            if version != self.version:
                return False
            if plan.status != self.status:
                self.status, self.version = plan.status, self.version + 1
        for doomed in plan.delete:
            found = self.children.get(doomed.attempt)
            if found and found.uid == doomed.uid:
                self.delete_child(doomed.attempt)
        if plan.create is not None:
            self.create(plan.create)
        self.deleted = self.deleted or plan.delete_job
        return True

    def reconcile(self) -> ReconcilePlan:
        plan = decide(self.snapshot(), self.now)
        assert self.apply(plan, self.version)
        return plan

    def settle(self, most: int = 8) -> ReconcilePlan:
        """Reconcile until nothing changes; the time stands still."""
        for _ in range(most):
            before = (self.status, dict(self.children), len(self.created))
            plan = self.reconcile()
            if (self.status, dict(self.children), len(self.created)) == before:
                return plan
        raise AssertionError("the rules do not come to rest")

    def wait(self, **duration: float) -> None:
        self.now += timedelta(**duration)

    def create(self, attempt: int) -> None:
        self.config_maps.add(attempt)
        if attempt in self.children:
            return  # AlreadyExists
        self.serial += 1
        self.created.append(attempt)
        self.children[attempt] = Child(
            name=f"bottles-0b5e7-{attempt}",
            uid=f"job-{self.serial}",
            attempt=attempt,
            suspended=self.queue is not None,
            queue=self.queue,
            started=self.now,
        )
        if self.queue is None:
            self.start_pod(attempt)

    def start_pod(self, attempt: int) -> None:
        self.serial += 1
        self.pods.append(TrainerPod(f"bottles-0b5e7-{attempt}-0", f"pod-{self.serial}", attempt))

    def pod_runs(self) -> None:
        self._pods(
            lambda p: p.phase == "Pending" and p.writing,
            phase="Running",
            running=True,
            since=self.now,
        )

    def pod_exits(self, code: int, *, out_of_memory: bool = False, evicted: bool = False) -> None:
        """The pod's container ends by itself or by an eviction, and the Job controller judges."""
        live = [p for p in self.pods if p.writing and not p.deleting and p.attempt in self.children]
        if self.sidecar and not evicted:
            killed = {"out_of_memory": out_of_memory, "running": False, "ended": self.now}
            self._pods(lambda p: p in live, exit_code=code, **killed)
            return
        for pod in live:
            ended = replace(
                pod,
                phase="Failed" if code else "Succeeded",
                running=False,
                ended=self.now if pod.since else None,
                exit_code=code,
                out_of_memory=out_of_memory,
                disrupted=evicted,
            )
            self.pods[self.pods.index(pod)] = ended
            if code == 0:
                self._end_child(pod.attempt, "complete", None)
            elif code in (2, 3, 5):
                told = f"Container trainer for pod studio/{pod.name} failed with exit code {code} "
                self._end_child(
                    pod.attempt,
                    "failed",
                    Explanation("PodFailurePolicy", told + "matching FailJob rule at index 0"),
                )
            elif evicted:
                told = f"Pod studio/{pod.name} has condition DisruptionTarget matching FailJob rule"
                self._end_child(
                    pod.attempt, "failed", Explanation("PodFailurePolicy", told + " at index 1")
                )
            else:
                self._end_child(
                    pod.attempt,
                    "failed",
                    Explanation(
                        "BackoffLimitExceeded", "Job has reached the specified backoff limit"
                    ),
                )

    def delete_pod(self) -> None:
        """Someone deletes the pod: it is gone, and the Job has failed."""
        for pod in [p for p in self.pods if p.live and not p.deleting]:
            self.pods.remove(pod)
            if pod.attempt in self.children:
                self._end_child(
                    pod.attempt,
                    "failed",
                    Explanation(
                        "BackoffLimitExceeded", "Job has reached the specified backoff limit"
                    ),
                )

    def delete_child(self, attempt: int) -> None:
        """The Job is gone at once, its pods terminate."""
        self.children.pop(attempt)
        self.pods = [p for p in self.pods if p.attempt != attempt or p.live]
        self._pods(lambda p: p.attempt == attempt, deleting=True)

    def pods_end(self) -> None:
        """Terminating pods are gone."""
        self.pods = [p for p in self.pods if not p.deleting]

    def admit(self) -> None:
        """The queue lets the Job run."""
        for attempt, child in self.children.items():
            if child.live and child.suspended:
                self.children[attempt] = replace(child, suspended=False)
                self.start_pod(attempt)

    def preempt(self) -> None:
        """The queue takes the Job's place away: suspended, its pods deleted."""
        for attempt, child in self.children.items():
            if child.live and child.queue and not child.suspended:
                self.children[attempt] = replace(child, suspended=True)
                self.pods = [p for p in self.pods if p.attempt != attempt]

    def live_attempts(self) -> set[int]:
        return {c.attempt for c in self.children.values() if c.live} | {
            p.attempt for p in self.pods if p.live
        }

    def writers(self) -> set[int]:
        """The attempts that may still write: a trainer runs, or a Job may yet start one."""
        silent = {c.attempt for c in self.children.values() if c.live} - {
            p.attempt for p in self.pods
        }
        return silent | {p.attempt for p in self.pods if p.writing}

    def _end_child(self, attempt: int, state: str, why: Explanation | None) -> None:
        self.children[attempt] = replace(
            self.children[attempt],
            state=state,  # type: ignore[arg-type]
            failure=why,
            finished=self.now,
        )

    def _pods(self, which: object, **changes: object) -> None:
        assert callable(which)
        self.pods = [
            replace(p, **changes) if which(p) else p  # type: ignore[arg-type]
            for p in self.pods
        ]

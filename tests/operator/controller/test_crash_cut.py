"""The operator is killed at each of its API calls, the request or its answer lost.

A job is created, runs, is suspended and resumed, fails once and completes. Wherever the operator is
killed, its successor must bring the job to the same end, and never to two attempts at once.
"""

import asyncio
from datetime import timedelta
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kubelora_api.schema import JsonObject
from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.controller.reconciler import Reconciler
from kubelora_operator.controller.report_pool import ReportPool
from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.workqueue import QueueState, WorkQueue
from kubelora_operator.decision.snapshot import JobKey, TrainerPod, Unreachable
from kubelora_operator.kube.client import ApiError, Cluster
from kubelora_operator.observability.metrics import OperatorMetrics
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.world import START

_STEP = 40.0
"""Seconds between two acts of the user or cluster: longer than any wait of the operator's here."""


class Killed(BaseException):
    """The operator's process ends here."""


class History:
    """A cluster with an operator that is replaced when it is killed."""

    def __init__(self, cut: int | None, *, answer: bool) -> None:
        self.now = 0.0
        self.cluster = FakeCluster()
        self.calls, self._cut, self._answer = 0, cut, answer
        self.cluster.fault = self._request
        self.cluster.lost = self._answered
        self.operators = 0
        self._start_operator()

    def _start_operator(self) -> None:
        self.operators += 1
        self.state: QueueState[JobKey] = QueueState(lambda: 0.0)
        queue = WorkQueue(lambda: self.now, self.state)
        self.cluster.connect(lambda key, urgent: queue.add(key, urgent=urgent), lambda: self.now)
        api, self.queue = cast(Cluster, self.cluster), queue
        self.reports = ReportPool(_unreachable, queue.add, 10, lambda: self.now)
        self.reconciler = Reconciler(
            SnapshotReader(api, self.cluster.store, self.reports, lambda: self.now),
            PlanApplier(api, self.cluster.store, "trainer:dev", "me"),
            OperatorMetrics(CollectorRegistry()),
            lambda: 10.0,
            now=lambda: START + timedelta(seconds=int(self.now)),
            clock=lambda: self.now,
        )

    def _request(self, verb: str, body: JsonObject) -> None:
        self.calls += 1
        if self.calls == self._cut and not self._answer:
            raise Killed

    def _answered(self, verb: str, body: JsonObject) -> None:
        if self.calls == self._cut and self._answer:
            raise Killed

    async def settle(self, seconds: float = _STEP) -> None:
        """Let the operator work until the next act, in ``seconds``."""
        end = self.now + seconds
        for _ in range(500):
            ready_at = self.state.next_ready_at()
            if ready_at is None or ready_at > end:
                break
            self.now = max(self.now, ready_at)
            key = await self.queue.get()
            try:
                await self.reconciler._reconcile_and_requeue(self.queue, key)
            except Killed:
                await self.reports.close()
                self._start_operator()
            self.check()
        else:
            raise AssertionError("the operator does not come to rest")
        self.now = end

    def check(self) -> None:
        live = [
            c for c in self.cluster.children.values() if not c.get("status", {}).get("conditions")
        ]
        assert len(live) <= 1

    def start_pod(self) -> str:
        """Start the pod of the only live child; return its name."""
        names = [n for n, c in self.cluster.children.items() if not c.get("status")]
        assert len(names) == 1
        self.cluster.run_pod(names[0])
        return names[0]

    def suspend(self, value: bool) -> None:
        job = self.cluster.jobs["bottles"]
        metadata = job["metadata"] | {"generation": job["metadata"]["generation"] + 1}
        self.cluster.put(
            Kind.JOB, job | {"metadata": metadata, "spec": job["spec"] | {"suspend": value}}
        )

    def end_pods(self) -> None:
        """Take the pods of deleted children away."""
        for name in list(self.cluster.pods):
            if name.removesuffix("-0") not in self.cluster.children:
                self.cluster.take(Kind.POD, name)

    def exit_pod(self, child: str, code: int) -> None:
        pod = self.cluster.pods[f"{child}-0"]
        time = (START + timedelta(seconds=self.now)).isoformat()
        ended = {"exitCode": code, "finishedAt": time, "startedAt": time}
        container = {"name": "trainer", "state": {"terminated": ended}}
        phase = "Failed" if code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [container]}
        self.cluster.put(Kind.POD, {"metadata": pod["metadata"], "status": status})
        kind, reason = ("Failed", "BackoffLimitExceeded") if code else ("Complete", "Completed")
        condition = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": time}
        job = self.cluster.children[child]
        self.cluster.put(Kind.CHILD, job | {"status": {"conditions": [condition]}})

    async def run(self) -> JsonObject:
        """Run the history; return the job's last status."""
        self.cluster.add_job("bottles")
        await self.settle()
        self.start_pod()
        await self.settle()
        self.suspend(True)
        await self.settle()
        self.end_pods()
        await self.settle()
        self.suspend(False)
        await self.settle()
        self.exit_pod(self.start_pod(), 1)
        await self.settle()
        child = self.start_pod()
        await self.settle()
        self.exit_pod(child, 0)
        await self.settle()
        await self.reports.close()
        status: JsonObject = self.cluster.jobs["bottles"]["status"]
        return status


async def _unreachable(pod: TrainerPod, run_id: str) -> Unreachable:
    return Unreachable("nobody answers")


async def test_a_killed_operators_successor_brings_the_job_to_the_same_end() -> None:
    undisturbed = History(None, answer=False)
    ended = _summary(await undisturbed.run())
    assert ended == ("Complete", 3, 1, 0)
    calls = undisturbed.calls
    assert calls > 15
    for cut in range(1, calls + 1):
        for answer in (False, True):
            history = History(cut, answer=answer)
            assert _summary(await history.run()) == ended, f"call {cut}, answer lost: {answer}"
            assert history.operators <= 2
            assert sorted(history.cluster.children) == sorted(undisturbed.cluster.children)


async def test_few_requests_are_made_for_a_job_and_none_for_what_it_has_settled_on() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    await history.settle(2)
    assert history.cluster.requests == {"put_status": 1, "create_ConfigMap": 1, "create_child": 1}
    child = history.start_pod()
    await history.settle(2)
    assert history.calls == 4
    assert history.cluster.jobs["bottles"]["status"]["state"] == "Running"
    await history.settle()
    history.exit_pod(child, 0)
    await history.settle()
    assert history.calls <= 8
    before = history.calls
    job = history.cluster.jobs["bottles"]
    history.cluster.put(Kind.JOB, job | {"metadata": job["metadata"] | {"labels": {"a": "b"}}})
    history._start_operator()
    await history.settle()
    assert history.calls == before
    await history.reports.close()


async def test_a_stale_store_never_doubles_a_child() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    await history.settle()
    # The store loses the child, as if an event had been missed.
    store = history.cluster.store
    child = next(iter(history.cluster.children))
    store.discard(Kind.CHILD, ("studio", child))
    history.queue.add(("studio", "bottles"), urgent=True)
    await history.settle()
    assert history.cluster.requests["create_child"] == 1
    assert history.cluster.requests["get_child"] >= 1
    await history.reports.close()


async def test_a_write_from_a_stale_snapshot_is_refused_and_the_job_read_again() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    history.cluster.watching = False
    history.suspend(True)
    await history.settle()
    assert history.cluster.children == {}
    assert history.cluster.requests["get_job"] == 1
    status = history.cluster.jobs["bottles"]["status"]
    assert status["state"] == "Suspended"
    await history.reports.close()


async def test_a_job_that_is_gone_is_not_acted_on() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    history.cluster.watching = False
    history.cluster.take(Kind.JOB, "bottles")
    await history.settle()
    assert history.cluster.children == {}
    assert history.cluster.requests == {"put_status": 1, "get_job": 1}
    await history.reports.close()


async def test_a_lost_status_is_noticed_by_the_job_that_a_new_operator_finds() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    await history.settle()
    history.cluster.take(Kind.CHILD, next(iter(history.cluster.children)))
    job = dict(history.cluster.jobs["bottles"])
    del job["status"]
    history.cluster.put(Kind.JOB, job)
    history._start_operator()
    await history.settle()
    assert history.cluster.children == {}
    status = history.cluster.jobs["bottles"]["status"]
    assert [c["reason"] for c in status["conditions"] if c["type"] == "Failed"] == ["StateLost"]
    await history.reports.close()


async def test_no_decision_is_made_before_the_first_lists_are_complete() -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    store = history.cluster.store
    store._unseen.add(store._sources[2])
    await history.settle()
    assert history.calls == 0


@pytest.mark.parametrize("code", [409, 500])
async def test_a_refused_read_after_a_conflict_is_retried(code: int) -> None:
    history = History(None, answer=False)
    history.cluster.add_job("bottles")
    failed = asyncio.Event()

    def fault(verb: str, body: JsonObject) -> None:
        if verb == "get_job":
            failed.set()
            raise ApiError(code, "Error", "no")
        if verb == "put_status" and not failed.is_set():
            raise ApiError(409, "Conflict", "the object has been modified")

    history.cluster.fault = fault
    await history.settle()
    assert failed.is_set()
    assert len(history.cluster.children) == 1


def _summary(status: JsonObject) -> tuple[object, ...]:
    free = status.get("freeRestarts", 0)
    return status.get("state"), status.get("attempt"), status.get("restarts", 0), free

"""A prepared control plane with a client: nodes, CRD, rights, namespaces and recording watches."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.operator_scale import documents, simulated_nodes
from benchmarks.operator_scale.api import Api, BenchError, Object, connect
from benchmarks.operator_scale.control_plane import (
    OPERATOR_NAMESPACE,
    ControlPlane,
    control_plane,
)
from benchmarks.operator_scale.subject import OURS, Subject
from benchmarks.operator_scale.timeline import Timeline
from benchmarks.operator_scale.trainers import Trainers, serving_trainers
from tests.cluster.harness.errors import tail

BARE: Final = "bare"
"""Namespace of the bare client's jobs."""
_WARM_UP: Final = "warm-up"
COMPLETE: Final = "Complete"
RUNNING: Final = "Running"
_PATIENCE: Final = 120.0


@dataclass(frozen=True)
class Session:
    """What a measurement works with.

    subject: The operator to measure.
    jobs: Its jobs by name.
    children: Their children, by the name of the job.
    bare: The bare client's Jobs by name.
    """

    subject: Subject
    plane: ControlPlane
    api: Api
    trainers: Trainers
    jobs: Timeline
    children: Timeline
    bare: Timeline

    async def warm_up_bare(self) -> None:
        """Complete one Job of the bare client, so that caches are warm; forget it."""
        document = documents.bare_job(BARE, _WARM_UP)
        await self._warm_up(self.bare, jobs_in(BARE), document, COMPLETE)

    async def warm_up(self) -> None:
        """Complete one job of the operator, so that it has started; forget it."""
        subject = self.subject
        document = subject.document(_WARM_UP)
        await self._warm_up(self.jobs, subject.jobs, document, subject.complete)

    async def _warm_up(
        self, timeline: Timeline, path: str, document: Object, complete: str
    ) -> None:
        await self.api.create(path, document)
        if not await timeline.until(complete, 1, _PATIENCE):
            logs = self.plane.places.logs
            raise BenchError(
                f"The first job at {path} was not {complete} after {_PATIENCE:g} s. The operator's "
                f"log ends with\n{tail(logs / 'operator.log', 25)}\nand the scheduler's with\n"
                f"{tail(logs / 'kube-scheduler.log', 3)}"
            )
        for each in (self.jobs, self.children, self.bare):
            each.forget()


@asynccontextmanager
async def prepared(subject: Subject, run_seconds: float | None) -> AsyncIterator[Session]:
    """Start and prepare a control plane; take it down after the block.

    Args:
        subject: The operator to measure, which is not started.
        run_seconds: How long a pod runs before it completes; None for ever.
    """
    async with AsyncExitStack() as stack:
        trainers = await stack.enter_async_context(serving_trainers())
        plane = stack.enter_context(control_plane(run_seconds))
        api = await stack.enter_async_context(connect(plane))
        await _prepare(api, subject)
        session = Session(
            subject,
            plane,
            api,
            trainers,
            jobs=Timeline(_name),
            children=Timeline(lambda item: str(item["metadata"]["labels"][subject.job_label])),
            bare=Timeline(_name),
        )
        works = (
            session.jobs.follow(api, subject.jobs),
            session.children.follow(api, subject.children),
            session.bare.follow(api, jobs_in(BARE)),
            trainers.follow(api, f"/api/v1/namespaces/{OURS}/pods"),
            *([subject.helper(api)] if subject.helper else []),
        )
        await stack.enter_async_context(_background(*works))
        yield session


def say(line: str) -> None:
    """Print progress to standard error: standard output carries figures only."""
    print(line, file=sys.stderr, flush=True)


def jobs_in(namespace: str) -> str:
    """Return the collection of the Jobs of a namespace."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


async def _prepare(api: Api, subject: Subject) -> None:
    for node in simulated_nodes.nodes():
        await api.create("/api/v1/nodes", node)
    for namespace in (OPERATOR_NAMESPACE, OURS, BARE):
        await api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    for collection, document in (
        *subject.objects,
        *documents.claims(OURS),
        *documents.claims(BARE),
    ):
        await api.create(collection, document)
    async with asyncio.timeout(_PATIENCE):
        for path in (subject.jobs, f"/api/v1/namespaces/{OURS}/serviceaccounts/default"):
            await _wait_for(api, path)


async def _wait_for(api: Api, path: str) -> None:
    """Wait until ``path`` is served: a CRD and a default service account take a moment."""
    while True:
        try:
            await api.get(path)
            return
        except BenchError:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``works`` during the block; a failure of one of them ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()

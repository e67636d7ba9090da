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
from benchmarks.operator_scale.timeline import Timeline
from benchmarks.operator_scale.trainers import Trainers, serving_trainers
from kubelora_api import names
from tests.cluster.harness.errors import tail

OURS: Final = "studio"
BARE: Final = "bare"
"""Namespaces of the operator's jobs and of the bare client's."""
WARM_UP: Final = "warm-up"
COMPLETE: Final = "Complete"
RUNNING: Final = "Running"
_PATIENCE: Final = 120.0
JOBS: Final = f"/apis/{names.API_VERSION}/namespaces/{OURS}/{names.PLURAL}"


@dataclass(frozen=True)
class Session:
    """What a measurement works with.

    jobs: LoraTrainingJobs by name.
    children: Their Jobs, by the name of the LoraTrainingJob.
    bare: The bare client's Jobs by name.
    """

    plane: ControlPlane
    api: Api
    trainers: Trainers
    jobs: Timeline
    children: Timeline
    bare: Timeline

    async def warm_up(self, timeline: Timeline, path: str, document: Object) -> None:
        """Complete one job, so that all that is needed works and caches are warm; forget it.

        Args:
            timeline: Where it completes.
            path: Its collection.
            document: The job.
        """
        await self.api.create(path, document)
        if not await timeline.until(COMPLETE, 1, _PATIENCE):
            logs = self.plane.places.logs
            found = "\n".join(f"{log.name}:\n{tail(log, 5)}" for log in sorted(logs.glob("*.log")))
            raise BenchError(
                f"The first job at {path} was not Complete after {_PATIENCE:g} s. The logs end "
                f"with\n{found}"
            )
        for each in (self.jobs, self.children, self.bare):
            each.forget()


@asynccontextmanager
async def prepared(run_seconds: float | None) -> AsyncIterator[Session]:
    """Start and prepare a control plane; take it down after the block.

    Args:
        run_seconds: How long a pod runs before it completes; None for ever.
    """
    async with AsyncExitStack() as stack:
        trainers = await stack.enter_async_context(serving_trainers())
        plane = stack.enter_context(control_plane(run_seconds))
        api = await stack.enter_async_context(connect(plane))
        await _prepare(api)
        session = Session(
            plane,
            api,
            trainers,
            jobs=Timeline(_name),
            children=Timeline(lambda item: str(item["metadata"]["labels"][names.LABEL_JOB])),
            bare=Timeline(_name),
        )
        watches = (
            session.jobs.follow(api, JOBS),
            session.children.follow(api, jobs_in(OURS)),
            session.bare.follow(api, jobs_in(BARE)),
            trainers.follow(api, f"/api/v1/namespaces/{OURS}/pods"),
        )
        await stack.enter_async_context(_background(*watches))
        yield session


def say(line: str) -> None:
    """Print progress to standard error: standard output carries figures only."""
    print(line, file=sys.stderr, flush=True)


def jobs_in(namespace: str) -> str:
    """Return the collection of the Jobs of a namespace."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


async def _prepare(api: Api) -> None:
    for node in simulated_nodes.nodes():
        await api.create("/api/v1/nodes", node)
    for namespace in (OPERATOR_NAMESPACE, OURS, BARE):
        await api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    for collection, document in (
        *documents.rights(),
        *documents.claims(OURS),
        *documents.claims(BARE),
    ):
        await api.create(collection, document)
    await api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", documents.crd())
    async with asyncio.timeout(_PATIENCE):
        for path in (JOBS, f"/api/v1/namespaces/{OURS}/serviceaccounts/default"):
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

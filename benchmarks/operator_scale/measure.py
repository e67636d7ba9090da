"""Measurement of N jobs created at once: a bare client first, then the operator."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.operator_scale import audit, documents
from benchmarks.operator_scale.audit import Request
from benchmarks.operator_scale.operator_process import OperatorProcess, running_operator
from benchmarks.operator_scale.session import (
    BARE,
    COMPLETE,
    RUNNING,
    Session,
    jobs_in,
    prepared,
    say,
)
from benchmarks.operator_scale.subject import Subject
from benchmarks.operator_scale.timeline import CREATED, Timeline

_LATE: Final = "late"
"""Name of the job that is created while the operator restarts."""
_EVENTS: Final = 50
"""Settled jobs that are touched to count what an event costs."""
NEVER: Final = float("inf")


@dataclass(frozen=True)
class Settings:
    """Times of a measurement, in seconds.

    run: How long a pod runs.
    deadline: Longest wait for all jobs to get a child, to run or to complete.
    settled: How long the settled state is observed.
    """

    run: float = 10.0
    deadline: float = 600.0
    settled: float = 20.0


@dataclass
class Result:
    """Figures of one N. A time is `NEVER` where the deadline passed."""

    subject: str
    jobs: int
    load: float = 0.0
    """Processes that ran or waited for a core before the start, on average of a minute."""
    floor_last_child: float = NEVER
    floor_complete: float = NEVER
    last_child: float = NEVER
    p50: float = NEVER
    p99: float = NEVER
    complete: float = NEVER
    until_running: Counter[str] = field(default_factory=Counter)
    """Requests about all jobs until each of them ran."""
    life: Counter[str] = field(default_factory=Counter)
    """Requests from the first creation until all jobs were complete and settled."""
    cpu: float = 0.0
    peak_mib: float = 0.0
    settled_requests: Counter[str] = field(default_factory=Counter)
    settled_seconds: float = 0.0
    event_requests: Counter[str] = field(default_factory=Counter)
    events: int = 0
    restart: float = NEVER
    restarted_mib: float = 0.0
    restart_writes: Counter[str] = field(default_factory=Counter)
    """Writes about unchanged jobs after the restart."""
    user_agents: Counter[str] = field(default_factory=Counter)

    @property
    def complete_ratio(self) -> float:
        """Time until all are complete, over the floor's."""
        return self.complete / self.floor_complete


async def measure(subject: Subject, jobs: int, settings: Settings) -> Result:
    """Measure the floor, the operator's work, the settled state and a restart.

    Args:
        subject: The operator.
        jobs: Jobs that are created at once.
        settings: Times.
    """
    result = Result(subject.name, jobs, os.getloadavg()[0])
    say(f"n={jobs}: starting the control plane")
    async with prepared(subject, settings.run) as session:
        say(f"n={jobs}: the bare client")
        await _floor(session, result, settings)
        say(f"n={jobs}: the {subject.name}")
        with running_operator(session.plane, subject) as operator:
            await session.warm_up()
            began = time.time()
            await _work(session, operator, result, settings)
            say(f"n={jobs}: the settled state")
            await _settled(session, result, settings)
            result.life = audit.by_operation(r for r in _requests(session) if began <= r.received)
            await _events(session, result)
            result.peak_mib = operator.peak_mib()
        say(f"n={jobs}: the restarted {subject.name}")
        with running_operator(session.plane, subject) as operator:
            await _restart(session, operator, result, settings)
        result.user_agents = Counter(r.user_agent for r in _requests(session))
    return result


async def _floor(session: Session, result: Result, settings: Settings) -> None:
    """Create the Jobs as a client would that had no operator."""
    path = jobs_in(BARE)
    await session.warm_up_bare()
    bodies = [documents.bare_job(BARE, name) for name in _names(result.jobs)]
    began = time.monotonic()
    await session.api.create_all(path, bodies)
    result.floor_last_child = await _last(session.bare, CREATED, began, result, settings)
    result.floor_complete = await _last(session.bare, COMPLETE, began, result, settings)


async def _work(
    session: Session, operator: OperatorProcess, result: Result, settings: Settings
) -> None:
    bodies = [session.subject.document(name) for name in _names(result.jobs)]
    cpu, began = operator.cpu_seconds(), time.monotonic()
    await session.api.create_all(session.subject.jobs, bodies)
    result.last_child = await _last(session.children, CREATED, began, result, settings)
    created, children = session.jobs.of(CREATED), session.children.of(CREATED)
    waits = [children[k].monotonic - m.monotonic for k, m in created.items() if k in children]
    if len(waits) == result.jobs:
        result.p50, result.p99 = (float(p) for p in np.percentile(waits, [50, 99]))
    result.complete = await _last(session.jobs, session.subject.complete, began, result, settings)
    result.cpu = operator.cpu_seconds() - cpu
    # A job whose pod ended before its operator looked was never Running.
    reached = session.jobs.of(session.subject.complete) | session.jobs.of(RUNNING)
    ends = {name: moment.wall for name, moment in reached.items()}
    result.until_running = audit.count_until(_requests(session), session.jobs.uids, ends)


async def _settled(session: Session, result: Result, settings: Settings) -> None:
    """Count requests while nothing happens; what the last change caused may still be under way."""
    await asyncio.sleep(5)
    began = time.time()
    await asyncio.sleep(settings.settled)
    ended = time.time()
    result.settled_seconds = ended - began
    result.settled_requests = audit.by_operation(audit.between(_requests(session), began, ended))


async def _events(session: Session, result: Result) -> None:
    """Count requests that a change of a settled job's annotation causes."""
    touched = list(session.jobs.of(session.subject.complete))[:_EVENTS]
    began = time.time()
    for number, name in enumerate(touched):
        patch = {"metadata": {"annotations": {"example.org/touched": str(number)}}}
        await session.api.merge_patch(f"{session.subject.jobs}/{name}", patch)
    await asyncio.sleep(5)
    result.events = len(touched)
    result.event_requests = audit.by_operation(
        audit.between(_requests(session), began, time.time())
    )


async def _restart(
    session: Session, operator: OperatorProcess, result: Result, settings: Settings
) -> None:
    """Measure from the start of the process to the child of a job that is created meanwhile."""
    began = time.time()
    await session.api.create(session.subject.jobs, session.subject.document(_LATE))
    count = len(session.children.of(CREATED).keys() | {_LATE})
    if await session.children.until(CREATED, count, settings.deadline):
        result.restart = session.children.of(CREATED)[_LATE].monotonic - operator.started
    await asyncio.sleep(settings.settled)
    result.restarted_mib = operator.peak_mib()
    writes = [r for r in _requests(session) if r.received >= began and r.is_write]
    result.restart_writes = audit.by_operation(r for r in writes if not r.mentions(_LATE))


async def _last(
    timeline: Timeline, condition: str, began: float, result: Result, settings: Settings
) -> float:
    """Wait for all jobs; return the seconds until the last one."""
    if not await timeline.until(condition, result.jobs, settings.deadline):
        return NEVER
    return max(m.monotonic for m in timeline.of(condition).values()) - began


def _requests(session: Session) -> list[Request]:
    return audit.read_requests(session.plane.audit_log)


def _names(jobs: int) -> Sequence[str]:
    return [f"bench-{number:05d}" for number in range(jobs)]

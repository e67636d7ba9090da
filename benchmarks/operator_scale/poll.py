"""What running jobs cost: their pods are asked for progress again and again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.operator_scale import audit
from benchmarks.operator_scale.api import BenchError
from benchmarks.operator_scale.operator_process import running_operator
from benchmarks.operator_scale.session import RUNNING, prepared
from benchmarks.operator_scale.subject import Subject


@dataclass
class PollResult:
    """Figures of N running jobs over a period.

    reports: Reports that pods gave meanwhile.
    cores: The operator's CPU seconds per second.
    """

    jobs: int
    seconds: float
    requests: Counter[str] = field(default_factory=Counter)
    reports: int = 0
    cores: float = 0.0
    peak_mib: float = 0.0

    @property
    def requests_per_second(self) -> float:
        """The operator's own requests to the API server."""
        return self.requests.total() / self.seconds


async def poll(subject: Subject, jobs: int, seconds: float, deadline: float) -> PollResult:
    """Measure N running jobs whose pods answer.

    Args:
        subject: The operator.
        jobs: Number of jobs.
        seconds: How long to measure.
        deadline: Longest wait until all run.
    """
    result = PollResult(jobs, seconds)
    async with prepared(subject, None) as session:
        with running_operator(session.plane, subject) as operator:
            names = [f"run-{number:05d}" for number in range(jobs)]
            await session.api.create_all(subject.jobs, map(subject.document, names))
            if not await session.jobs.until(RUNNING, jobs, deadline):
                running = len(session.jobs.of(RUNNING))
                raise BenchError(f"{running} of {jobs} jobs were Running after {deadline:g} s.")
            # Each pod's first reports are over: conditions no longer change, only progress does.
            await asyncio.sleep(20)
            cpu, reports, began = operator.cpu_seconds(), session.trainers.answered, time.time()
            await asyncio.sleep(seconds)
            requests = audit.read_requests(session.plane.audit_log)
            result.seconds = time.time() - began
            result.cores = (operator.cpu_seconds() - cpu) / result.seconds
            result.reports = session.trainers.answered - reports
            result.requests = audit.by_operation(audit.between(requests, began, time.time()))
            result.peak_mib = operator.peak_mib()
    return result

"""A bounded pool that requests the reports of pods, away from the reconcile workers.

A pod that accepts a connection and never answers holds a request until its timeout. So a worker
only reads the last answer and asks for another; an answer that arrives makes the job due again.
Limits per namespace keep the pods of one tenant from delaying another's.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kubelora_api.report import RunReport
from kubelora_operator.decision.snapshot import JobKey, TrainerPod, Unreachable

IN_FLIGHT_PER_NAMESPACE: Final = 4
"""A namespace whose pods never answer then takes a sixteenth of `IN_FLIGHT`."""
IN_FLIGHT: Final = 64
"""Below the 100 connections that the HTTP client opens at most."""
REQUESTS_PER_SECOND: Final = 20.0
"""Requests to all pods: 1,000 running pods are each asked every 50 s."""
LONGEST_REPORT_BACKOFF: Final = 60.0
"""Seconds between two requests to a pod that does not answer."""
_JITTER: Final = 0.25
"""Largest part of a back-off left out at random, so that pods are not asked in step."""

Report = RunReport | Unreachable
Fetch = Callable[[TrainerPod, str], Awaitable[Report]]
"""Requests the report of a pod about the run of this id."""


@dataclass(eq=False)
class _Entry:
    """The pod of a job and its last answer; ``unread`` until the job's status has it."""

    pod: TrainerPod
    run_id: str
    due_at: float
    failures: int = 0
    answer: Report | None = None
    unread: bool = False
    pending: bool = False
    task: asyncio.Task[None] | None = None


class ReportPool:
    """The last known report of each job's pod.

    fetch: Requests a report; must end by itself.
    answered: Called with the job whose pod has answered or failed to.
    poll_seconds: Minimum interval between two requests to a pod.
    """

    def __init__(
        self,
        fetch: Fetch,
        answered: Callable[[JobKey], None],
        poll_seconds: float,
        clock: Callable[[], float],
        random_part: Callable[[], float] = random.random,
    ) -> None:
        self._fetch, self._answered, self._least = fetch, answered, poll_seconds
        self._clock, self._random_part = clock, random_part
        self._entries: dict[JobKey, _Entry] = {}
        self._waiting: dict[str, deque[tuple[JobKey, _Entry]]] = {}
        self._in_flight: dict[str, int] = {}

    @property
    def poll_seconds(self) -> float:
        """Interval between two requests to a pod, which grows with the number of pods."""
        return max(self._least, len(self._entries) / REQUESTS_PER_SECOND)

    def read(self, key: JobKey, run_id: str, pod: TrainerPod) -> Report | None:
        """Return the answer that is not in the status yet, and request the next if it is due.

        Args:
            key: The job.
            run_id: Its uid.
            pod: The pod that reports on the run.
        """
        entry = self._entries.get(key)
        if entry is None or (entry.pod.uid, entry.run_id) != (pod.uid, run_id):
            self.forget(key)
            entry = self._entries[key] = _Entry(pod, run_id, self._clock())
        elif pod.ready and not entry.pod.ready:
            # A model takes minutes to load: its first report does not wait for a long backoff.
            entry.due_at, entry.failures = min(entry.due_at, self._clock() + self.poll_seconds), 0
        entry.pod = pod
        if not entry.pending and self._clock() >= entry.due_at:
            entry.pending = True
            self._waiting.setdefault(key[0], deque()).append((key, entry))
            self._start_waiting()
        return entry.answer if entry.unread else None

    def acknowledge(self, key: JobKey, answer: Report) -> None:
        """Mark an answer as recorded in the job's status."""
        entry = self._entries.get(key)
        if entry is not None and entry.answer is answer:
            entry.unread = False

    def forget(self, key: JobKey) -> None:
        """Forget the pod of a job, because it is gone or no longer reports."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.task is not None:
            entry.task.cancel()

    async def close(self) -> None:
        """Cancel the requests in flight."""
        tasks = [e.task for e in self._entries.values() if e.task is not None]
        self._waiting.clear()
        for key in list(self._entries):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests in flight by namespace."""
        return dict(self._in_flight)

    def __len__(self) -> int:
        return len(self._entries)

    def _start_waiting(self) -> None:
        """Start as many requests as the limits permit, taking the namespaces in turn."""
        started = True
        while started:
            started = False
            for namespace in list(self._waiting):
                if sum(self._in_flight.values()) >= IN_FLIGHT:
                    return
                if self._in_flight.get(namespace, 0) < IN_FLIGHT_PER_NAMESPACE:
                    started = self._start_next(namespace) or started

    def _start_next(self, namespace: str) -> bool:
        queue = self._waiting.pop(namespace)
        while queue:
            key, entry = queue.popleft()
            if self._entries.get(key) is not entry:
                continue  # its pod is gone
            self._in_flight[namespace] = self._in_flight.get(namespace, 0) + 1
            entry.task = asyncio.create_task(self._request(key, entry))
            entry.task.add_done_callback(lambda _: self._ended(namespace))
            break
        if queue:
            self._waiting[namespace] = queue  # now last, so that the others come first
        return True

    async def _request(self, key: JobKey, entry: _Entry) -> None:
        try:
            answer = await self._fetch(entry.pod, entry.run_id)
        except Exception as error:
            answer = Unreachable(f"{type(error).__name__}: {error}")
        entry.answer, entry.unread, entry.pending, entry.task = answer, True, False, None
        entry.failures = entry.failures + 1 if isinstance(answer, Unreachable) else 0
        entry.due_at = self._clock() + self._delay(entry.failures)
        if self._entries.get(key) is entry:
            self._answered(key)

    def _delay(self, failures: int) -> float:
        if failures <= 1:
            # One second less, because a look comes at the interval or slightly before it.
            return max(self.poll_seconds - 1.0, self.poll_seconds / 2)
        longest = max(LONGEST_REPORT_BACKOFF, self.poll_seconds)
        delay: float = min(self.poll_seconds * 2.0 ** min(failures - 1, 32), longest)
        return delay * (1 - _JITTER * self._random_part())

    def _ended(self, namespace: str) -> None:
        self._in_flight[namespace] -= 1
        if not self._in_flight[namespace]:
            del self._in_flight[namespace]
        self._start_waiting()

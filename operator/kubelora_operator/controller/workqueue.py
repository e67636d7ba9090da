"""A rate-limited work queue: which job to reconcile next, at most one worker per job.

Level-triggered reconciling needs three rules: a key added twice is processed once; a key added
while it is being processed is processed once more afterwards; a failed key waits, longer each time.
What the operator itself writes comes back as a change, so a change ends that wait only if its cause
is another: a new spec, or an event of a child or pod.

`QueueState` implements the rules without waiting, so that tests need no clock; `WorkQueue` adds the
waiting.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
FIRST_BACKOFF: Final = 1.0
"""Seconds: most failed requests succeed at the second try."""
LONGEST_BACKOFF: Final = 30.0
"""Seconds. After an outage of the API server, each job is tried again within this time."""
_JITTER: Final = 0.25
"""Largest part of a backoff that is left out at random, so that jobs do not retry in step."""


class QueueState(Generic[K]):
    """Keys and the time when each is ready, in seconds of a monotonic clock."""

    def __init__(self, random_part: Callable[[], float] = random.random) -> None:
        self._random_part = random_part
        self._ready_at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._retry_at: dict[K, float] = {}
        self._not_before: dict[K, float] = {}
        self._urgent_at: dict[K, float] = {}

    def add(self, key: K, at: float, urgent: bool = False) -> None:
        """Add ``key`` for processing; of two times the earlier one counts.

        Args:
            key: The key.
            at: When to process it.
            urgent: Whether this ends the wait after a failure. Nothing ends a wait that the API
                server asked for.
        """
        if urgent:
            if key in self._busy:
                self._urgent_at[key] = min(at, self._urgent_at.get(key, at))
            self._retry_at.pop(key, None)
        at = max(at, self._retry_at.get(key, at), self._not_before.get(key, at))
        if key in self._ready_at and self._ready_at[key] <= at:
            return
        self._ready_at[key] = at
        if key not in self._busy:
            heapq.heappush(self._heap, (at, next(self._order), key))

    def get(self, now: float) -> K | None:
        """Return a ready key that is not being processed, or None. It is busy until `done`."""
        ready_at = self.next_ready_at()
        if ready_at is None or ready_at > now:
            return None
        taken = heapq.heappop(self._heap)[2]
        del self._ready_at[taken]
        self._retry_at.pop(taken, None)
        self._not_before.pop(taken, None)
        self._busy.add(taken)
        return taken

    def next_ready_at(self) -> float | None:
        """Return when the next key that is not being processed becomes ready; None if none."""
        while self._heap:
            at, _, key = self._heap[0]
            if key not in self._busy and self._ready_at.get(key) == at:
                break
            heapq.heappop(self._heap)  # replaced by an earlier time, or due again once it is done
        return self._heap[0][0] if self._heap else None

    def done(self, key: K) -> None:
        """Mark ``key`` as processed and reset its failure count."""
        self._busy.discard(key)
        self._failures.pop(key, None)
        self._urgent_at.pop(key, None)
        if key in self._ready_at:
            heapq.heappush(self._heap, (self._ready_at[key], next(self._order), key))

    def failed(
        self,
        key: K,
        now: float,
        *,
        first: float = FIRST_BACKOFF,
        longest: float = LONGEST_BACKOFF,
        at_least: float = 0.0,
    ) -> float:
        """Add ``key`` again after a delay that doubles with each failure in a row.

        Args:
            key: The key.
            now: Current time.
            first: Delay after the first failure.
            longest: Longest delay.
            at_least: Seconds that the API server asked to wait, which no change shortens.

        Returns:
            The delay in seconds.
        """
        self._busy.discard(key)
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(first * 2 ** min(count, 32), longest) * (1 - _JITTER * self._random_part())
        delay = max(delay, at_least)
        # Drop an earlier time first: it may come from the failing key's own status writes.
        self._ready_at.pop(key, None)
        self._retry_at[key] = now + delay
        if at_least > 0:
            self._not_before[key] = now + at_least
        self.add(key, now + delay)
        if key in self._urgent_at:
            self.add(key, self._urgent_at.pop(key), urgent=True)
        return float(delay)

    def __len__(self) -> int:
        return len(self._ready_at)


class WorkQueue(Generic[K]):
    """A `QueueState` on which the workers of one event loop can wait."""

    def __init__(self, clock: Callable[[], float], state: QueueState[K] | None = None) -> None:
        self._clock = clock
        # An empty state is false, so `or` would drop it.
        self._state: QueueState[K] = QueueState() if state is None else state
        self._wakers: set[asyncio.Future[None]] = set()

    def add(self, key: K, delay: float = 0.0, urgent: bool = False) -> None:
        """Add ``key`` for processing in ``delay`` seconds; see `QueueState.add`.

        Args:
            key: The key.
            delay: Seconds to wait.
            urgent: Whether this ends the wait after a failure.
        """
        self._state.add(key, self._clock() + delay, urgent)
        self._wake()

    async def get(self) -> K:
        """Wait for a ready key. The caller must call `done` or `failed` with it."""
        while True:
            now = self._clock()
            key = self._state.get(now)
            if key is not None:
                self._wake()  # another worker waits for what is due next
                return key
            ready_at = self._state.next_ready_at()
            await self._changed_within(None if ready_at is None else max(ready_at - now, 0.0))

    def done(self, key: K, requeue_after: float | None = None) -> None:
        """Mark ``key`` as processed; add it again after ``requeue_after`` seconds if given."""
        self._state.done(key)
        if requeue_after is not None:
            self._state.add(key, self._clock() + requeue_after)
        self._wake()

    def failed(
        self,
        key: K,
        *,
        first: float = FIRST_BACKOFF,
        longest: float = LONGEST_BACKOFF,
        at_least: float = 0.0,
    ) -> float:
        """Add ``key`` again after a backoff; see `QueueState.failed`.

        Args:
            key: The key.
            first: Delay after the first failure in a row.
            longest: Longest delay.
            at_least: Seconds that the API server asked to wait.

        Returns:
            The backoff in seconds.
        """
        delay = self._state.failed(
            key, self._clock(), first=first, longest=longest, at_least=at_least
        )
        self._wake()
        return delay

    def __len__(self) -> int:
        return len(self._state)

    def _wake(self) -> None:
        """Let one waiting worker look: whoever takes a key wakes the next."""
        waker = next((w for w in self._wakers if not w.done()), None)
        if waker is not None:
            waker.set_result(None)

    async def _changed_within(self, seconds: float | None) -> None:
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakers.add(waker)
        try:
            await asyncio.wait({waker}, timeout=seconds)
        finally:
            self._wakers.discard(waker)

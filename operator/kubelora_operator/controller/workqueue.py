"""A rate-limited work queue: which job to reconcile next, at most one worker per job.

Level-triggered reconciling needs three rules: a key added twice is processed once; a key added
while it is being processed is processed once more afterwards; a failed key waits, longer each time.
`QueueState` implements the rules without waiting, so that tests need no clock; `WorkQueue` adds the
waiting.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class QueueState(Generic[K]):
    """Keys and the time when each is ready, in seconds of a monotonic clock."""

    def __init__(self, first_backoff: float = 1.0, longest_backoff: float = 300.0) -> None:
        self._first, self._longest = first_backoff, longest_backoff
        self._ready_at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}

    def add(self, key: K, at: float) -> None:
        """Add ``key`` for processing at ``at``; of two times the earlier one counts."""
        if key in self._ready_at and self._ready_at[key] <= at:
            return
        self._ready_at[key] = at
        heapq.heappush(self._heap, (at, next(self._order), key))

    def get(self, now: float) -> K | None:
        """Return a ready key that is not being processed, or None. It is busy until `done`."""
        waiting: list[tuple[float, int, K]] = []
        taken: K | None = None
        while self._heap and self._heap[0][0] <= now:
            at, order, key = heapq.heappop(self._heap)
            if self._ready_at.get(key) != at:
                continue  # an earlier time has replaced this entry
            if key in self._busy:
                waiting.append((at, order, key))
                continue
            taken = key
            break
        for entry in waiting:
            heapq.heappush(self._heap, entry)
        if taken is not None:
            del self._ready_at[taken]
            self._busy.add(taken)
        return taken

    def next_ready_at(self) -> float | None:
        """Return when the next key that is not being processed becomes ready; None if none."""
        times = [at for key, at in self._ready_at.items() if key not in self._busy]
        return min(times, default=None)

    def done(self, key: K) -> None:
        """Mark ``key`` as processed and reset its failure count."""
        self._busy.discard(key)
        self._failures.pop(key, None)

    def failed(self, key: K, now: float) -> float:
        """Add ``key`` again after a delay that doubles with each failure; return the delay."""
        self._busy.discard(key)
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(self._first * 2 ** min(count, 32), self._longest)
        # Drop an earlier time first: the failing key's own status writes cause watch events, which
        # would otherwise bypass the backoff.
        self._ready_at.pop(key, None)
        self.add(key, now + delay)
        return float(delay)

    def __len__(self) -> int:
        return len(self._ready_at)


class WorkQueue(Generic[K]):
    """A `QueueState` on which the workers of one event loop can wait."""

    def __init__(self, clock: Callable[[], float], state: QueueState[K] | None = None) -> None:
        self._clock = clock
        self._state: QueueState[K] = state or QueueState()
        self._wakers: set[asyncio.Future[None]] = set()

    def add(self, key: K, delay: float = 0.0) -> None:
        """Add ``key`` for processing in ``delay`` seconds or earlier."""
        self._state.add(key, self._clock() + delay)
        self._wake()

    async def get(self) -> K:
        """Wait for a ready key. The caller must call `done` or `failed` with it."""
        while True:
            now = self._clock()
            key = self._state.get(now)
            if key is not None:
                return key
            ready_at = self._state.next_ready_at()
            await self._changed_within(None if ready_at is None else max(ready_at - now, 0.0))

    def done(self, key: K, requeue_after: float | None = None) -> None:
        """Mark ``key`` as processed; add it again after ``requeue_after`` seconds if given."""
        self._state.done(key)
        if requeue_after is not None:
            self._state.add(key, self._clock() + requeue_after)
        self._wake()

    def failed(self, key: K) -> float:
        """Add ``key`` again after a backoff; return the backoff in seconds."""
        delay = self._state.failed(key, self._clock())
        self._wake()
        return delay

    def __len__(self) -> int:
        return len(self._state)

    def _wake(self) -> None:
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)

    async def _changed_within(self, seconds: float | None) -> None:
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakers.add(waker)
        try:
            await asyncio.wait({waker}, timeout=seconds)
        finally:
            self._wakers.discard(waker)

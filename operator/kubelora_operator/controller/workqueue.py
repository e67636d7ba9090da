"""The work queue: which job to look at next, one worker for each job at a time.

Level-triggered work needs little: a key that is added twice is done once; a key that is added while
it is being worked on is done once more afterwards; a failed key waits, longer each time. `Schedule`
holds these rules without any waiting and is what the tests hold to them; `WorkQueue` adds the
waiting.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Schedule(Generic[K]):
    """Keys and when each is due. Times are seconds of any clock that does not go backwards."""

    def __init__(self, first_backoff: float = 1.0, longest_backoff: float = 300.0) -> None:
        self._first, self._longest = first_backoff, longest_backoff
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}

    def add(self, key: K, at: float) -> None:
        """Have ``key`` done at ``at`` or earlier: the sooner of two wishes counts."""
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, next(self._order), key))

    def take(self, now: float) -> K | None:
        """A due key that nobody works on, or None. It is busy until `done`."""
        waiting: list[tuple[float, int, K]] = []
        taken: K | None = None
        while self._heap and self._heap[0][0] <= now:
            at, order, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue  # a sooner wish has replaced this one
            if key in self._busy:
                waiting.append((at, order, key))
                continue
            taken = key
            break
        for entry in waiting:
            heapq.heappush(self._heap, entry)
        if taken is not None:
            del self._due[taken]
            self._busy.add(taken)
        return taken

    def next_due(self) -> float | None:
        """When the next key that nobody works on is due."""
        times = [at for key, at in self._due.items() if key not in self._busy]
        return min(times, default=None)

    def done(self, key: K) -> None:
        """Work on ``key`` went well: its failures are forgotten."""
        self._busy.discard(key)
        self._failures.pop(key, None)

    def failed(self, key: K, now: float) -> float:
        """Work on ``key`` failed: it is due again after a delay that doubles; returns the delay."""
        self._busy.discard(key)
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(self._first * 2 ** min(count, 32), self._longest)
        # An event may have asked for it at once; a failing key must not spin on its own writes.
        self._due.pop(key, None)
        self.add(key, now + delay)
        return float(delay)

    def __len__(self) -> int:
        return len(self._due)


class WorkQueue(Generic[K]):
    """A `Schedule` that workers of one event loop can wait on."""

    def __init__(self, clock: Callable[[], float], schedule: Schedule[K] | None = None) -> None:
        self._clock = clock
        self._schedule: Schedule[K] = schedule or Schedule()
        self._wakers: set[asyncio.Future[None]] = set()

    def add(self, key: K, delay: float = 0.0) -> None:
        """Have ``key`` done in ``delay`` seconds or earlier."""
        self._schedule.add(key, self._clock() + delay)
        self._wake()

    async def take(self) -> K:
        """Wait for a key that is due. The caller ends with `done` or `failed`."""
        while True:
            now = self._clock()
            key = self._schedule.take(now)
            if key is not None:
                return key
            due = self._schedule.next_due()
            await self._changed_within(None if due is None else max(due - now, 0.0))

    def done(self, key: K, again_after: float | None = None) -> None:
        """Work went well; ``again_after``: seconds until the key is due again."""
        self._schedule.done(key)
        if again_after is not None:
            self._schedule.add(key, self._clock() + again_after)
        self._wake()

    def failed(self, key: K) -> float:
        """Work failed; returns the seconds until the key is due again."""
        delay = self._schedule.failed(key, self._clock())
        self._wake()
        return delay

    def __len__(self) -> int:
        return len(self._schedule)

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

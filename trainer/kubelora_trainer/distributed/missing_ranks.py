"""Identification of the missing rank when the others can no longer reach it.

A failed collective reports that some rank is gone, but not which. So each rank that notices checks
in at the rendezvous store, which node 0's launcher keeps and which no failed connection affects; a
rank that does not check in within a few seconds is the cause. A healthy run pays nothing for this.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch

from kubelora_trainer.utils.errors import PeerLostError, PeerTimeoutError, RunEndedError
from kubelora_trainer.utils.text import ranks_named

CHECK_IN_SECONDS: Final = 5.0
"""How long ranks wait for the others to check in; must be less than the launcher's grace."""
_ROUND_SECONDS: Final = 0.05
"""A request to the store each; `CHECK_IN_SECONDS` allows a hundred."""
_STORE_TIMEOUT: Final = timedelta(seconds=5)
"""The store's default of minutes would outlast the launcher's grace if node 0 is gone."""


class CheckInStore(Protocol):
    """The part of torch's store that the check-in needs."""

    def set(self, key: str, value: str) -> object:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit the duration of a call."""


class RankMonitor:
    """One rank's view of which other ranks are still reachable."""

    def __init__(
        self,
        place: CheckInStore | None,
        rank: int,
        size: int,
        silence: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a monitor.

        Args:
            place: Rendezvous store; None if missing ranks cannot be named.
            rank: This rank.
            size: World size.
            silence: Timeout of a collective.
            clock: Monotonic clock in seconds.
        """
        self._place, self._rank, self._size = place, rank, size
        self._silence, self._clock = silence.total_seconds(), clock

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a collective.

        Errors of this rank's own device pass through unchanged.

        Raises:
            PeerLostError: The collective failed.
            PeerTimeoutError: The collective timed out.
        """
        begun = self._clock()
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            waited = self._clock() - begun
            # 0.9, because backends start to count their timeout a little later.
            raise self._ended(self.missing(), waited >= 0.9 * self._silence) from error

    def _ended(self, missing: Sequence[int], timed_out: bool) -> RunEndedError:
        who = f"{ranks_named(missing, 'another rank')} of this run's {self._size}"
        ended: RunEndedError
        if timed_out:
            ended = PeerTimeoutError(
                f"{who} did not respond for {self._silence:.0f} s while the others waited at the "
                "end of a window: it is stopped, stuck reading data, or on an unreachable machine. "
                "Check its process or pod; the next start resumes from the last checkpoint"
            )
        else:
            ended = PeerLostError(
                f"{who} went away, so this one stops; the cause is in that rank's log"
            )
        left = [rank for rank in range(self._size) if rank not in missing]
        ended.reported_elsewhere = bool(missing) and self._rank != left[0]
        return ended

    def missing(self) -> Sequence[int]:
        """Return the ranks that do not check in within ``CHECK_IN_SECONDS``."""
        if self._place is None:
            return ()
        here = {self._rank}
        deadline = self._clock() + CHECK_IN_SECONDS
        try:
            self._place.set_timeout(_STORE_TIMEOUT)
            self._place.set(_key(self._rank), "")
            while len(here) < self._size - 1 and self._clock() < deadline:
                time.sleep(_ROUND_SECONDS)
                here |= {r for r in range(self._size) if self._place.check([_key(r)])}
        except RuntimeError:  # node 0 is gone, and its store too
            return ()
        return [rank for rank in range(self._size) if rank not in here]


def _key(rank: int) -> str:
    return f"misses/{rank}"

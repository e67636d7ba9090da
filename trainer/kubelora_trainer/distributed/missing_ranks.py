"""Names the rank that is missing when the others can't reach it any more.

A collective that fails tells that someone is gone, never who. So each rank that notices says so at
the meeting place, which node 0's launcher keeps and no failed connection touches; who does not say
so within a few seconds is the cause. Nothing of this costs a healthy run anything.
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
"""How long ranks that noticed wait for the others to notice; less than the launcher's grace."""
_ROUND_SECONDS: Final = 0.05
_STORE_TIMEOUT: Final = timedelta(seconds=5)


class CheckInStore(Protocol):
    """What a roll call needs of torch's store."""

    def set(self, key: str, value: str) -> object:
        """Put a word down."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may take."""


class RankMonitor:
    """The ranks of a run, as one of them misses them."""

    def __init__(
        self,
        place: CheckInStore | None,
        rank: int,
        size: int,
        silence: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """silence: how long a collective waits. place: None names nobody."""
        self._place, self._rank, self._size = place, rank, size
        self._silence, self._clock = silence.total_seconds(), clock

    @contextmanager
    def around(self) -> Iterator[None]:
        """Watch a collective.

        Raises PeerLostError where it broke, PeerTimeoutError where it waited in vain.

        What is wrong with this rank's own device stays what it is.
        """
        begun = self._clock()
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            waited = self._clock() - begun
            raise self._ended(self.missing(), waited >= 0.9 * self._silence) from error

    def _ended(self, missing: Sequence[int], in_vain: bool) -> RunEndedError:
        who = f"{ranks_named(missing, 'another rank')} of this run's {self._size}"
        ended: RunEndedError
        if in_vain:
            ended = PeerTimeoutError(
                f"{who} said nothing for {self._silence:.0f} s, while the others waited at the end "
                "of a window: stopped, stuck in reading data, or on a machine that is out of "
                "reach. Look at its process or pod; the next start goes on from the last checkpoint"
            )
        else:
            ended = PeerLostError(
                f"{who} went away, so this one stops; the cause is in that rank's words"
            )
        left = [rank for rank in range(self._size) if rank not in missing]
        ended.told_by_another = bool(missing) and self._rank != left[0]
        return ended

    def missing(self) -> Sequence[int]:
        """Ranks that don't say within ``CHECK_IN_SECONDS`` that they miss someone too."""
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
        except RuntimeError:  # node 0 is gone, and the meeting place with it
            return ()
        return [rank for rank in range(self._size) if rank not in here]


def _key(rank: int) -> str:
    return f"misses/{rank}"

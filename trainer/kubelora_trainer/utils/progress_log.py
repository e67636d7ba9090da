"""Throttled progress messages of slow work; fast work logs nothing."""

import time
from collections.abc import Callable

from kubelora_trainer.utils.text import duration_text

PAUSE_SECONDS = 5.0
"""Interval between messages; work that takes less is not reported."""


def log_progress(
    what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Build a progress callback (done, total) that logs every 5 s, with the time left.

    Args:
        what: Name of the work.
        say: Called with each message.
        clock: Monotonic clock in seconds.
    """
    begun = last = clock()

    def tick(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last < PAUSE_SECONDS or not 0 < done < total:
            return
        last = now
        left = (now - begun) / done * (total - done)
        say(f"{what}: {done:,} of {total:,}, {duration_text(left)} left")

    return tick

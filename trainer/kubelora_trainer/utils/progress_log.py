"""Says now and then how far a long piece of work is; short work says nothing."""

import time
from collections.abc import Callable

from kubelora_trainer.utils.text import duration_text

PAUSE_SECONDS = 5.0


def log_progress(
    what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """A function to tell (done, of how many): a line every 5 s, with the time left."""
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

"""Delay before a failed attempt is restarted, as an exponential backoff. Pure."""

from datetime import timedelta
from typing import Final

from kubelora_operator.decision.failure import RestartCost
from kubelora_operator.decision.snapshot import Child

_FIRST_DELAY: Final = timedelta(seconds=10)
"""The kubelet's own first delay for a crashing container."""
_LONGEST_DELAY: Final = timedelta(minutes=10)
"""Twice the kubelet's longest: an attempt reserves GPUs and loads a model before it fails."""
_LONG_RUN: Final = timedelta(minutes=5)
"""An attempt that ran this long is no crash loop, so an uncounted restart need not wait."""


def restart_delay(cost: RestartCost, count: int, ran: timedelta | None) -> timedelta:
    """Return the delay before the next attempt: 10 s, 20 s, 40 s, … up to 10 minutes.

    An uncounted restart does not wait after a long run, or when it is the first, but always if it
    is unknown how long the attempt ran.

    Args:
        cost: Whether the restart is counted.
        count: Restarts of this kind so far, including this one.
        ran: How long the attempt ran; None if unknown.
    """
    known_free = cost is RestartCost.FREE and ran is not None
    if known_free and (count <= 1 or (ran or timedelta()) >= _LONG_RUN):
        return timedelta()
    exponent = min(max(count - (2 if known_free else 1), 0), 16)
    return min(_FIRST_DELAY * (1 << exponent), _LONGEST_DELAY)


def run_duration(child: Child | None) -> timedelta | None:
    """Return how long a finished child ran; None if unknown."""
    if child is None or child.started is None or child.finished is None:
        return None
    return max(child.finished - child.started, timedelta())

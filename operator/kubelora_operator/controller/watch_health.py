"""The health of the watches: whether each source is listed, heard of and complete."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kubelora_operator.controller.object_store import WatchSource
from kubelora_operator.controller.trim import Kind

MISSED_GRACE: Final = 30.0
"""Seconds that a restarted watch has to bring a change that a list has found."""
LIST_GRACE: Final = 150.0
"""Seconds without a complete list: twice the interval of the lists, and their timeout."""
BLIND_GRACE: Final = 300.0
"""Seconds without a list of any source after which the leader gives up its lease."""


@dataclass
class _State:
    listed_at: float
    heard_at: float
    missed_since: float | None = None
    missed: int = 0
    problem: str = ""


class WatchHealth:
    """The state of each source. Times are monotonic seconds; a start counts as a list.

    seconds: Interval of the periodic lists.
    """

    def __init__(
        self, sources: list[WatchSource], seconds: float, clock: Callable[[], float]
    ) -> None:
        self._clock, self._grace = clock, max(LIST_GRACE, 2 * seconds + 30)
        self._states = {s: _State(clock(), clock()) for s in sources}

    def heard(self, source: WatchSource) -> None:
        """Record an event or bookmark."""
        self._states[source].heard_at = self._clock()

    def listed(self, source: WatchSource) -> None:
        """Record a complete list."""
        state = self._states[source]
        state.listed_at, state.problem = self._clock(), ""

    def failed(self, source: WatchSource, problem: str) -> None:
        """Record why a list or watch failed.

        Args:
            source: The source.
            problem: The error.
        """
        self._states[source].problem = problem

    def compared(self, source: WatchSource, missed: int) -> None:
        """Record how many changes a list has found that the watch has not brought.

        Args:
            source: The source.
            missed: Number of changes.
        """
        state = self._states[source]
        state.missed_since = (state.missed_since or self._clock()) if missed else None
        state.missed = missed

    def missed(self) -> int:
        """Return how many changes that a list found no watch has brought within the grace."""
        now = self._clock()
        return sum(
            state.missed
            for state in self._states.values()
            if state.missed_since is not None and now - state.missed_since > MISSED_GRACE
        )

    def stale(self) -> list[str]:
        """Return a sentence for each source that is stale."""
        now = self._clock()
        return [p for s, state in self._states.items() if (p := self._problem(s, state, now))]

    def problem(self) -> str | None:
        """Return why the operator is unhealthy: a kind is stale wherever it is watched.

        One refused namespace does not make the operator unhealthy for the others.
        """
        now = self._clock()
        for kind in Kind:
            states = [(s, state) for s, state in self._states.items() if s.kind is kind]
            problems = [self._problem(s, state, now) for s, state in states]
            if problems and all(problems):
                return problems[0]
        return None

    def blind(self) -> bool:
        """Return whether nothing at all could be listed for so long that another should lead."""
        now = self._clock()
        return all(now - s.listed_at > max(self._grace, BLIND_GRACE) for s in self._states.values())

    def _problem(self, source: WatchSource, state: _State, now: float) -> str | None:
        if state.missed_since is not None and now - state.missed_since > MISSED_GRACE:
            return f"the watch of {source} misses changes that a list finds"
        if now - state.listed_at > self._grace:
            why = f": {state.problem}" if state.problem else ""
            heard = f"last heard of {now - state.heard_at:.0f} s ago"
            return (
                f"{source} can't be listed for {now - state.listed_at:.0f} s, {heard}{why}. Check "
                "the operator's rights and the API server"
            )
        return None

"""The cluster's warnings about a Job without pods or a pod that does not start.

The API server answers a list of Events by scanning all of the namespace, so it is asked only about
what does not start for some seconds, and ever more rarely about the same object.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kubelora_operator.controller.convert import warning_from
from kubelora_operator.decision.snapshot import Explanation, JobKey
from kubelora_operator.kube.client import Cluster

_FIRST_WAIT: Final = 5.0
"""Seconds: most pods are created and start within this time."""
_SECOND_WAIT: Final = 15.0
"""Seconds until the second request, doubled for each further one."""
_LONGEST_WAIT: Final = 120.0
"""Seconds. The kubelet repeats a warning about as often while its cause persists."""


@dataclass
class _Waiting:
    uid: str
    ask_at: float
    wait: float
    found: Explanation | None = None


class Warnings:
    """The last warning about what each job waits for."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster, self._clock = cluster, clock
        self._waiting: dict[JobKey, _Waiting] = {}

    async def about(
        self, key: JobKey, uid: str, reason: str, now: datetime
    ) -> tuple[Explanation | None, float]:
        """Return the warning about the object that a job waits for, and the seconds to the next.

        Args:
            key: The job.
            uid: uid of the Job or pod that does not start.
            reason: Reason of the explanation.
            now: Current time; an old warning may be resolved.
        """
        clock, waiting = self._clock(), self._waiting.get(key)
        if waiting is None or waiting.uid != uid:
            waiting = self._waiting[key] = _Waiting(uid, clock + _FIRST_WAIT, _SECOND_WAIT)
        elif clock >= waiting.ask_at:
            waiting.ask_at = clock + waiting.wait
            waiting.wait = min(waiting.wait * 2, _LONGEST_WAIT)
            text = warning_from(await self._cluster.warnings_about(key[0], uid), now)
            waiting.found = Explanation(reason, text) if text else None
        return waiting.found, max(waiting.ask_at - clock, 0.0)

    def forget(self, key: JobKey) -> None:
        """Forget a job that waits for nothing."""
        self._waiting.pop(key, None)

"""The operator's requests, from the API server's audit log. Pure but for reading the file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

_WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Request:
    """A request that the API server has answered.

    resource: With its subresource, for example ``jobs/status``.
    received: Seconds since the epoch.
    """

    verb: str
    resource: str
    name: str
    uri: str
    code: int
    received: float
    user_agent: str

    @property
    def is_write(self) -> bool:
        """Whether the request changes something."""
        return self.verb in _WRITES

    @property
    def operation(self) -> str:
        """Verb and resource."""
        return f"{self.verb} {self.resource}"

    def mentions(self, job: str) -> bool:
        """Return whether the request is about an object named after this job."""
        return job in self.name or job in self.uri


def read_requests(log: Path) -> list[Request]:
    """Read all requests that are about jobs: no watches, which stay open, and no Leases."""
    found = []
    with log.open() as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # still being written
            request = _request(json.loads(line))
            if request.verb != "watch" and request.resource != "leases":
                found.append(request)
    return found


def between(requests: Iterable[Request], start: float, end: float) -> list[Request]:
    """Return the requests received in this period, in seconds since the epoch."""
    return [r for r in requests if start <= r.received < end]


def count_until(
    requests: Iterable[Request], names: Mapping[str, str], ends: Mapping[str, float]
) -> Counter[str]:
    """Count requests by operation, each up to the end of its own job's period.

    Args:
        requests: The requests.
        names: Name of each job by its uid.
        ends: End of each job's period, in seconds since the epoch, by the job's name.
    """
    counts: Counter[str] = Counter()
    for request in requests:
        job = _job_of(request, names, ends)
        if job is not None and request.received <= ends[job]:
            counts[request.operation] += 1
    return counts


def by_operation(requests: Iterable[Request]) -> Counter[str]:
    """Count requests by operation."""
    return Counter(r.operation for r in requests)


def _job_of(request: Request, names: Mapping[str, str], ends: Mapping[str, float]) -> str | None:
    """Return the job that a request is about: by the uid in a selector, or the object's name."""
    for uid in _UID.findall(request.uri):
        if names.get(uid) in ends:
            return names[uid]
    name = request.name
    while name and name not in ends:
        # The names of a job's objects are the job's, a hyphen or a dot, and more.
        name = name[: max(name.rfind("-"), name.rfind("."), 0)]
    return name or None


def _request(event: Mapping[str, Any]) -> Request:
    target = event.get("objectRef") or {}
    subresource = target.get("subresource")
    resource = str(target.get("resource") or event["requestURI"].partition("?")[0])
    return Request(
        verb=event["verb"],
        resource=f"{resource}/{subresource}" if subresource else resource,
        name=str(target.get("name") or ""),
        uri=event["requestURI"],
        code=int((event.get("responseStatus") or {}).get("code") or 0),
        received=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        user_agent=str(event.get("userAgent") or ""),
    )

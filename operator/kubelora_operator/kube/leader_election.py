"""Leader election among replicas, with one Lease.

The client library's elector can't create its Lease, exits at the first refused connection and does
not notice a frozen network. This one measures with a monotonic clock, limits each request to the
time that the lease has left, treats every failure as a failed renewal, and raises `LeaseLostError`
when the lease is lost, after which the process must exit at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

from kubelora_api import names
from kubelora_api.schema import JsonObject

log = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """The three requests needed for leader election."""

    async def get_lease(self, namespace: str, name: str, timeout: float) -> JsonObject | None:
        """Get the Lease, or None.

        Args:
            namespace: Its namespace.
            name: Its name.
            timeout: Seconds for the request.
        """

    async def create_lease(self, lease: JsonObject, timeout: float) -> JsonObject:
        """Create the Lease."""

    async def put_lease(self, lease: JsonObject, timeout: float) -> JsonObject:
        """Update the Lease; its resourceVersion makes a concurrent update fail."""


class LeaseLostError(Exception):
    """Another replica may be the leader by now: this process must do nothing more."""


@dataclass(frozen=True)
class Timing:
    """Durations in seconds, by default those of client-go.

    The leader gives up after ``renew_deadline``, before a candidate may take over after
    ``duration``.
    """

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0
    request: float = 4.0


DEFAULT_TIMING: Final = Timing()


@dataclass(frozen=True)
class ObservedLease:
    """The Lease as a candidate last saw it, and the monotonic time of its last change."""

    record: tuple[object, ...]
    since: float


def can_acquire(
    lease: JsonObject, observed: ObservedLease, identity: str, now: float, timing: Timing
) -> bool:
    """Return whether the Lease is free: ours, released, or not renewed for its duration.

    Only our own clock is used because the holder's may be wrong.

    Args:
        lease: The Lease.
        observed: The Lease as last observed.
        identity: Our identity.
        now: Monotonic time.
        timing: Our durations; a longer duration in the Lease wins.
    """
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder or holder == identity:
        return True
    declared = spec.get("leaseDurationSeconds")
    duration = (
        max(float(declared), timing.duration) if isinstance(declared, int) else timing.duration
    )
    return now - observed.since > duration


def renewal_record(lease: JsonObject) -> tuple[object, ...]:
    """Return the fields that change when the holder renews."""
    spec = lease.get("spec") or {}
    return (
        spec.get("holderIdentity"),
        spec.get("renewTime"),
        spec.get("leaseTransitions"),
        (lease.get("metadata") or {}).get("uid"),
    )


class Elector:
    """Leader election of one replica."""

    def __init__(
        self,
        api: LeaseApi,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        timing: Timing = DEFAULT_TIMING,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._clock, self._timing, self._sleep = api, clock, timing, sleep
        self._namespace, self._name, self._identity = namespace, name, identity
        self._observed_lease: ObservedLease | None = None
        self._current: JsonObject | None = None
        self._renewed = 0.0

    async def acquire(self) -> None:
        """Wait until this replica holds the Lease."""
        while not await self._try_acquire():
            await self._sleep(self._timing.retry)

    async def keep_renewing(self) -> None:
        """Renew forever. Raises LeaseLostError when the deadline passed without a renewal."""
        while True:
            await self._sleep(self._timing.retry)
            if self._overdue():
                raise LeaseLostError("the process was paused for longer than the lease allows")
            began = self._clock()
            left = self._timing.renew_deadline - (began - self._renewed)
            try:
                async with asyncio.timeout(left):
                    await self._renew()
                self._renewed = began
            except LeaseLostError:
                raise
            except Exception as error:
                log.warning("failed to renew the lease: %s", error)
            if self._overdue():
                raise LeaseLostError(
                    f"not renewed for {self._timing.renew_deadline:g} s; another replica may lead"
                )

    async def release(self) -> None:
        """Release the Lease so that another replica need not wait; a failure is only logged."""
        if self._current is None or self._overdue():
            return
        lease, self._current = self._current, None
        try:
            await self._api.put_lease(
                lease | {"spec": lease["spec"] | {"holderIdentity": ""}}, self._timing.request
            )
        except Exception as error:
            log.warning("failed to release the lease, it will expire: %s", error)

    def _overdue(self) -> bool:
        return self._clock() - self._renewed >= self._timing.renew_deadline

    async def _try_acquire(self) -> bool:
        began = self._clock()
        try:
            lease = await self._api.get_lease(self._namespace, self._name, self._timing.request)
            if lease is None:
                fresh = self._lease(None)
                self._current = await self._api.create_lease(fresh, self._timing.request)
            else:
                if not self._free(lease):
                    return False
                self._current = await self._api.put_lease(self._lease(lease), self._timing.request)
        except Exception as error:
            # Another candidate was faster, or the API server is unavailable: retry in both cases.
            log.info("failed to acquire the lease: %s", error)
            return False
        self._renewed = began
        return True

    def _free(self, lease: JsonObject) -> bool:
        now, record = self._clock(), renewal_record(lease)
        if self._observed_lease is None or self._observed_lease.record != record:
            self._observed_lease = ObservedLease(record, now)
        return can_acquire(lease, self._observed_lease, self._identity, now, self._timing)

    async def _renew(self) -> None:
        assert self._current is not None
        try:
            self._current = await self._api.put_lease(
                self._lease(self._current), self._timing.request
            )
        except Exception:
            # Someone edited the Lease, or our last update succeeded but its response was lost:
            # read it once to find out.
            found = await self._api.get_lease(self._namespace, self._name, self._timing.request)
            holder = ((found or {}).get("spec") or {}).get("holderIdentity")
            if found is None or holder not in (self._identity, "", None):
                raise LeaseLostError(f"the lease is now held by {holder or 'nobody'}") from None
            self._current = await self._api.put_lease(self._lease(found), self._timing.request)

    def _lease(self, old: JsonObject | None) -> JsonObject:
        """Build the Lease that replaces ``old``."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((old or {}).get("spec") or {})
        mine = spec.get("holderIdentity") == self._identity
        transitions = int(spec.get("leaseTransitions") or 0)
        fresh = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timing.duration),
            "acquireTime": spec.get("acquireTime") if mine else now,
            "renewTime": now,
            "leaseTransitions": transitions if mine or old is None else transitions + 1,
        }
        if old is not None:
            return old | {"spec": spec | fresh}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {names.LABEL_NAME: names.OPERATOR_APP},
            },
            "spec": fresh,
        }

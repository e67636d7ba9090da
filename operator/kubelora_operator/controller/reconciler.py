"""One look at one job: observe, decide, act. What every worker of the queue does."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kubelora_operator.controller.apply import Actor, StaleView
from kubelora_operator.controller.snapshot_reader import Observer, Sight, read_status
from kubelora_operator.controller.workqueue import WorkQueue
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import Why
from kubelora_operator.kube.client import ApiError
from kubelora_operator.observability.logging import job_in_log
from kubelora_operator.observability.metrics import JobKey, Telemetry

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """The time that conditions are stamped with, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


class Reconciler:
    """Brings one job after the other to where it should be."""

    def __init__(
        self,
        observer: Observer,
        actor: Actor,
        telemetry: Telemetry,
        poll: timedelta,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._observer, self._actor, self._telemetry = observer, actor, telemetry
        self._poll, self._now = poll, now

    async def work(self, queue: WorkQueue[JobKey]) -> None:
        """Take jobs from the queue for ever. Nothing that a job does can end a worker."""
        while True:
            key = await queue.take()
            self._telemetry.queue_depth.set(len(queue))
            began = time.monotonic()
            with job_in_log(*key):
                result = await self._attempt(queue, key)
            self._telemetry.duration.observe(time.monotonic() - began)
            self._telemetry.reconciles.labels(result=result).inc()

    async def _attempt(self, queue: WorkQueue[JobKey], key: JobKey) -> str:
        try:
            again_after, rejected = await self._reconcile(key)
        except StaleView as error:
            log.debug("looked at a stale view: %s", error)
            queue.done(key, again_after=0.2)
            return "stale"
        except ApiError as error:
            delay = queue.failed(key)
            log.warning("the API server failed, again in %.0f s: %s", delay, error)
            return "api_error"
        except Exception:
            delay = queue.failed(key)
            log.exception("not foreseen, again in %.0f s", delay)
            return "error"
        if rejected:
            delay = queue.failed(key)
            log.warning("%s; again in %.0f s", rejected.message, delay)
            return "rejected"
        queue.done(key, again_after)
        return "ok"

    async def _reconcile(self, key: JobKey) -> tuple[float | None, Why | None]:
        """Seconds until the job is due again, and why its children were refused."""
        now = self._now()
        sight = await self._observer.look(*key, now)
        if sight is None:
            self._telemetry.forget(key)
            return None, None
        plan = decide(sight.seen, now, self._poll)
        with job_in_log(*key, plan.status.attempt):
            for notice in plan.notices:
                log.info("%s: %s", notice.reason, notice.message)
            outcome = await self._actor.carry_out(sight, plan, now)
            self._telemetry.show(key, plan.status)
            if outcome.rejection:
                await self._tell_rejection(sight, outcome.document, outcome.rejection, now)
                return None, outcome.rejection
        if plan.create is not None:
            return 0.0, None  # the child's uid goes into the status right after
        return plan.again_after.total_seconds() if plan.again_after is not None else None, None

    async def _tell_rejection(
        self, sight: Sight, document: dict[str, object], why: Why, now: datetime
    ) -> None:
        """Put into the status why the API server refused the children, and create nothing."""
        seen = replace(sight.seen, status=read_status(document), rejection=why)
        plan = replace(decide(seen, now, self._poll), create=None, delete=())
        await self._actor.carry_out(replace(sight, seen=seen, document=document), plan, now)

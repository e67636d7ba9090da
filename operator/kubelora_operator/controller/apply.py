"""Carry out a plan, in the order that a crash between two steps can't harm.

Deletes, then the one status write, then creates, then Events. The status write carries uid and
resourceVersion, so a plan made from a stale view stops there; creates are never reached without it.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import build_config_map, build_job, build_service
from kubelora_operator.controller.convert import owned_by
from kubelora_operator.controller.snapshot_reader import Sight, read_status
from kubelora_operator.decision.conditions import shortened, time_text
from kubelora_operator.decision.plan import Notice, Plan
from kubelora_operator.decision.snapshot import Observation, Why
from kubelora_operator.kube.client import ApiError, Cluster

log = logging.getLogger(__name__)
_EVENT_MESSAGE_MAX: Final = 1024
_REMEMBERED_EVENTS: Final = 1024
_REFUSALS: Final = frozenset({400, 403, 404, 409, 413, 422})
"""Answers to a create that a person must mend: quota, policy, a template the API refuses."""


_Create = Callable[[JsonObject], Awaitable[JsonObject]]
_Get = Callable[[str, str], Awaitable[JsonObject | None]]


class StaleView(Exception):
    """The job changed since it was looked at; look again."""


@dataclass(frozen=True)
class Outcome:
    """document: the job as last written. rejection: why the children could not be created."""

    document: JsonObject
    rejection: Why | None = None


class Actor:
    """Carries out plans. ``trainer_image``: for jobs that name none."""

    def __init__(self, cluster: Cluster, trainer_image: str, identity: str) -> None:
        self._cluster, self._image, self._identity = cluster, trainer_image, identity
        self._counts: OrderedDict[str, int] = OrderedDict()

    async def carry_out(self, sight: Sight, plan: Plan, now: datetime) -> Outcome:
        """Do what the plan says. Raises StaleView or ApiError; the queue then tries again."""
        seen = sight.seen
        for child in plan.delete:
            log.info("deleting Job %s", child.name)
            await self._cluster.delete_child(seen.namespace, child.name, child.uid)
        document = sight.document
        # A create is preceded by a write even when nothing changed: it proves that we are current.
        if plan.create is not None or plan.status != read_status(document):
            document = await self._write_status(document, plan)
        rejection = None
        if plan.create is not None and sight.job is not None:
            rejection = await self._create(sight, plan.create)
        for notice in plan.notices:
            await self._tell(seen, notice, now)
        return Outcome(document, rejection)

    async def _write_status(self, document: JsonObject, plan: Plan) -> JsonObject:
        body = document | {"status": plan.status.document()}
        try:
            return await self._cluster.put_status(body)
        except ApiError as error:
            if error.code in (404, 409):
                raise StaleView(error.message) from error
            raise

    async def _create(self, sight: Sight, attempt: int) -> Why | None:
        """Create the attempt's objects, the Job last; what is there already is not touched."""
        assert sight.job is not None
        seen, cluster = sight.seen, self._cluster
        config_map = build_config_map(sight.job, attempt)
        service = build_service(sight.job, attempt)
        child = build_job(sight.job, attempt, self._image)
        try:
            for manifest, create, get in (
                (config_map, cluster.create_config_map, cluster.get_config_map),
                (service, cluster.create_service, cluster.get_service),
                (child, cluster.create_child, cluster.get_child),
            ):
                if manifest and not await _there_and_ours(manifest, create, get, seen):
                    return _taken(manifest["kind"], manifest["metadata"]["name"])
        except ApiError as error:
            if error.code not in _REFUSALS:
                raise
            return Why("Rejected", f"the API server refuses the attempt's objects: {error.message}")
        log.info("attempt %d: Job %s is there", attempt, child["metadata"]["name"])
        return None

    async def _tell(self, seen: Observation, notice: Notice, now: datetime) -> None:
        """An Event on the job; the same one again only raises its count. Never fails a plan."""
        key = f"{seen.uid}/{notice.reason}/{notice.message}"
        name = f"{seen.name}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED_EVENTS:
            self._counts.popitem(last=False)
        try:
            try:
                await self._cluster.create_event(self._event(seen, notice, name, now))
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                patch = {"count": count, "lastTimestamp": time_text(now)}
                await self._cluster.patch_event(seen.namespace, name, patch)
        except ApiError as error:
            log.warning("the Event %s could not be written: %s", notice.reason, error)

    def _event(self, seen: Observation, notice: Notice, name: str, now: datetime) -> JsonObject:
        stamp = time_text(now)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": seen.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": seen.namespace,
                "name": seen.name,
                "uid": seen.uid,
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": shortened(notice.message)[:_EVENT_MESSAGE_MAX],
            "source": {"component": names.OPERATOR_APP},
            "reportingComponent": f"{names.GROUP}/{names.OPERATOR_APP}",
            "reportingInstance": self._identity,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }


async def _there_and_ours(
    manifest: JsonObject, create: _Create, get: _Get, seen: Observation
) -> bool:
    """Create it; whether what then has its name belongs to the job."""
    try:
        await create(manifest)
        return True
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
    found = await get(seen.namespace, manifest["metadata"]["name"])
    return found is None or owned_by(found, seen.uid)


def _taken(kind: str, name: str) -> Why:
    return Why(
        "NameTaken",
        f"{kind} {name} exists and belongs to something else: delete it and the job goes on",
    )

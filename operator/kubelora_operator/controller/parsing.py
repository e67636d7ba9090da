"""Parsing of LoraTrainingJobs, once per generation of the spec and once per version of the status.

Parsing costs more CPU than all else that a look does, so the last results are kept.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus

_KEPT: Final = 1024
"""Jobs whose parsed form is kept, at about 20 KiB each: those that run or wait, not all finished
ones."""


def parse_resource(document: JsonObject) -> tuple[LoraTrainingJob | None, tuple[str, ...]]:
    """Parse the resource without its status; return the job, or None and the violations."""
    try:
        return parse_job({k: v for k, v in document.items() if k != "status"}), ()
    except InvalidDocumentError as error:
        return None, tuple(str(p) for p in error.problems)


def parse_status(document: JsonObject) -> JobStatus:
    """Parse the status; an empty one if there is none or `status_problems` finds any."""
    raw = document.get("status")
    if not isinstance(raw, dict) or status_problems(document):
        return JobStatus()
    return JobStatus.model_validate(raw)


def status_problems(document: JsonObject) -> tuple[str, ...]:
    """Return what can't be read in the status, as field and reason.

    A newer operator may have written it; acting without it would run finished work again.
    """
    try:
        JobStatus.model_validate(document.get("status") or {})
    except ValidationError as error:
        return tuple(
            f"{'.'.join(['status', *map(str, e['loc'])])}: {e['msg']}" for e in error.errors()
        )
    return ()


@dataclass(frozen=True)
class ParsedJob:
    """A job's resource and status, with what can't be read in each."""

    job: LoraTrainingJob | None
    problems: tuple[str, ...]
    status: JobStatus
    status_problems: tuple[str, ...]


@dataclass(frozen=True)
class _Kept:
    resource: tuple[object, ...]
    status: object
    parsed: ParsedJob


class ParsedJobs:
    """The last parsed jobs, by uid."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def parse(self, document: JsonObject) -> ParsedJob:
        """Return the parsed document; only what has changed since the last time is parsed."""
        metadata, raw = document["metadata"], document.get("status")
        uid = str(metadata["uid"])
        resource = (metadata.get("generation"), metadata.get("labels"), metadata.get("annotations"))
        old = self._kept.pop(uid, None)
        if old is not None and old.resource == resource:
            job, problems = old.parsed.job, old.parsed.problems
        else:
            job, problems = parse_resource(document)
        if old is not None and old.status == raw:
            status, unread = old.parsed.status, old.parsed.status_problems
        else:
            status, unread = parse_status(document), status_problems(document)
        parsed = ParsedJob(job, problems, status, unread)
        self._kept[uid] = _Kept(resource, raw, parsed)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return parsed

"""An operator that can be measured: what it needs, how it is started, and what its jobs are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.operator_scale import documents
from benchmarks.operator_scale.api import Api, Object
from benchmarks.operator_scale.control_plane import OPERATOR_NAMESPACE
from kubelora_api import names

OURS: Final = "studio"
"""Namespace of the operator's jobs."""


@dataclass(frozen=True)
class Subject:
    """An operator.

    jobs: Path of the collection of its jobs, in the namespace `OURS`.
    children: Path of the collection of what it creates for a job.
    job_label: Label of a child that names its job.
    complete: Condition of a job that has succeeded.
    document: Makes a job of a name.
    objects: What must exist, each with its collection.
    command: Makes its command line, without ports of its own.
    port_flags: Flags that each take a free port, as an address of loopback if they end with ``:``.
    helper: What must run next to it, if anything.
    """

    name: str
    jobs: str
    children: str
    job_label: str
    complete: str
    document: Callable[[str], Object]
    objects: tuple[tuple[str, Object], ...]
    command: tuple[str, ...]
    port_flags: tuple[str, ...]
    helper: Callable[[Api], Coroutine[Any, Any, None]] | None = None


def kubelora() -> Subject:
    """Return this repository's operator, with the rights that the chart gives to it."""
    return Subject(
        name="operator",
        jobs=f"/apis/{names.API_VERSION}/namespaces/{OURS}/{names.PLURAL}",
        children=f"/apis/batch/v1/namespaces/{OURS}/jobs",
        job_label=names.LABEL_JOB,
        complete="Complete",
        document=lambda name: documents.training_job(OURS, name),
        objects=(*documents.rights(), (documents.CRDS, documents.crd())),
        command=(
            sys.executable,
            *("-m", "kubelora_operator.manager.main", "run", "--all-namespaces"),
            *("--trainer-image", documents.IMAGE),
            *("--lease-namespace", OPERATOR_NAMESPACE),
        ),
        port_flags=("--metrics-port=",),
    )

"""Feed the work queue from watches. All that kopf is used for: streams, reconnects, start-up.

Only ``on.event`` handlers: kopf's other kinds write annotations and finalizers onto users' objects,
and a finalizer blocks deletion while the operator is down. The handlers keep nothing of an object
but whose it is; what happened to it is looked up when the job's turn comes.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import kopf

from kubelora_api import names
from kubelora_operator.observability.metrics import JobKey

Changed = Callable[[JobKey, str | None], None]
"""Hears of a job that changed, and its resourceVersion where the job itself did."""
_OURS: Final = f"{names.LABEL_MANAGED_BY}={names.OPERATOR_APP}"


class _EndlessBackoffs:
    """1, 2, 4, 8, 16 and then 30 s for ever: an API server that is away must not end us."""

    def __iter__(self) -> Iterator[float]:
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        while True:
            yield 30.0


def build_settings() -> kopf.OperatorSettings:
    """kopf as a watcher and nothing else."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 200
    # Without these kopf would read every Job and every pod of the cluster.
    settings.watching.label_selectors["batch", "v1", "jobs"] = _OURS
    settings.watching.label_selectors["", "v1", "pods"] = _OURS
    return settings


def build_registry(changed: Changed) -> kopf.OperatorRegistry:
    """The handlers: three kinds, one duty."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**context: Any) -> kopf.ConnectionInfo | None:
        """The pod's service account, unless KUBECONFIG names another cluster."""
        return kopf.login_with_kubeconfig(**context) or kopf.login_with_service_account(**context)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def job_changed(body: kopf.Body, **_: Any) -> None:
        metadata = body.metadata
        if metadata.namespace and metadata.name:
            version = metadata.get("resourceVersion")
            changed((metadata.namespace, metadata.name), str(version) if version else None)

    @kopf.on.event("batch", "v1", "jobs", registry=registry)
    async def child_changed(body: kopf.Body, **_: Any) -> None:
        _owner_changed(body)

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod_changed(body: kopf.Body, **_: Any) -> None:
        _owner_changed(body)

    def _owner_changed(body: kopf.Body) -> None:
        # The label only wakes the job; whether the object is its own is judged by owner and uid.
        job = body.metadata.labels.get(names.LABEL_JOB)
        if job and body.metadata.namespace:
            changed((body.metadata.namespace, job), None)

    return registry

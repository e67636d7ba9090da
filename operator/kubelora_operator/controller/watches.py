"""Watches that feed the work queue. kopf provides only streams, reconnects and start-up.

Only ``on.event`` handlers are used: kopf's other handlers write annotations and finalizers to
users' objects, and a finalizer blocks deletion while the operator is down. The handlers take only
the owner from an object; its state is read when the job is reconciled.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import kopf

from kubelora_api import names
from kubelora_operator.decision.snapshot import JobKey

OnChange = Callable[[JobKey, str | None, bool], None]
"""Callback for a changed job, with its resourceVersion if the job itself changed.

The last argument is False for a change of nothing but status or metadata, such as the echo of the
operator's own write.
"""
_OURS: Final = f"{names.LABEL_MANAGED_BY}={names.OPERATOR_APP}"


class _EndlessBackoffs:
    """Backoffs of 1, 2, 4, 8, 16 and then 30 s forever: a long API outage must not end kopf."""

    def __iter__(self) -> Iterator[float]:
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        while True:
            yield 30.0


def build_settings() -> kopf.OperatorSettings:
    """Return settings that restrict kopf to watching."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 200
    # Without these selectors kopf would read every Job and every pod of the cluster.
    settings.watching.label_selectors["batch", "v1", "jobs"] = _OURS
    settings.watching.label_selectors["", "v1", "pods"] = _OURS
    return settings


def build_registry(changed: OnChange) -> kopf.OperatorRegistry:
    """Register handlers that pass each changed job to ``changed``."""
    registry = kopf.OperatorRegistry()
    specs: dict[JobKey, tuple[object, ...]] = {}

    @kopf.on.login(registry=registry)
    def login(**context: Any) -> kopf.ConnectionInfo | None:
        """Log in with KUBECONFIG if it is set, else with the pod's service account."""
        return kopf.login_with_kubeconfig(**context) or kopf.login_with_service_account(**context)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def job_changed(body: kopf.Body, type: str | None, **_: Any) -> None:
        metadata = body.metadata
        if metadata.namespace and metadata.name:
            version = metadata.get("resourceVersion")
            key = (metadata.namespace, metadata.name)
            spec = (metadata.uid, metadata.get("generation"), metadata.deletion_timestamp)
            urgent = type == "DELETED" or specs.get(key) != spec
            if type == "DELETED":
                specs.pop(key, None)
            else:
                specs[key] = spec
            changed(key, str(version) if version else None, urgent)

    @kopf.on.event("batch", "v1", "jobs", registry=registry)
    async def child_changed(body: kopf.Body, **_: Any) -> None:
        _owner_changed(body)

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod_changed(body: kopf.Body, **_: Any) -> None:
        _owner_changed(body)

    def _owner_changed(body: kopf.Body) -> None:
        # The label only enqueues the job; ownership is checked later, by owner and uid.
        job = body.metadata.labels.get(names.LABEL_JOB)
        if job and body.metadata.namespace:
            changed((body.metadata.namespace, job), None, True)

    return registry

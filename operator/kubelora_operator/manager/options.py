"""Options of the operator process, as one value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of one operator process.

    namespaces: Namespaces to watch; empty for all.
    poll_seconds: Seconds between two reads of a running pod's progress.
    resync_seconds: Seconds between two full lists.
    """

    namespaces: tuple[str, ...]
    trainer_image: str
    lease_namespace: str
    lease_name: str
    identity: str
    port: int
    poll_seconds: float
    resync_seconds: float

"""What the person who installs the operator decides, as one value that travels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of one operator process.

    namespaces: those to serve; empty for all.
    poll_seconds: between two looks at a running pod.
    resync_seconds: between two full lists.
    """

    namespaces: tuple[str, ...]
    trainer_image: str
    lease_namespace: str
    lease_name: str
    identity: str
    port: int
    poll_seconds: float
    resync_seconds: float

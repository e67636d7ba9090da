"""Options of the operator process, as one value."""

from dataclasses import dataclass

from kubelora_operator.admission.policy import PodPolicy
from kubelora_operator.attempt.network_policy import NetworkSettings


@dataclass(frozen=True)
class Options:
    """Options of one operator process.

    namespaces: Namespaces to watch; empty for all.
    poll_seconds: Minimum interval between two reads of a running pod's progress.
    progress_seconds: Minimum interval between two writes of a job's progress.
    resync_seconds: Seconds between two full lists.
    pod_policy: What jobs may ask for in their podTemplate.
    network: Who may connect to training pods; None for no NetworkPolicies.
    """

    namespaces: tuple[str, ...]
    trainer_image: str
    lease_namespace: str
    lease_name: str
    identity: str
    port: int
    poll_seconds: float
    progress_seconds: float
    resync_seconds: float
    pod_policy: PodPolicy
    network: NetworkSettings | None

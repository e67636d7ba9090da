"""The NetworkPolicy of an attempt: who may connect to its pods, and where they may. Pure.

Kubelets reach the pods of their node under every NetworkPolicy, so probes need no rule.
"""

from typing import Final

from kubelora_api import names
from kubelora_api.job import LoraTrainingJob
from kubelora_api.schema import ApiModel, JsonObject
from kubelora_operator.attempt.manifests import attempt_metadata, attempt_selector

_DNS: Final = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


class NetworkSettings(ApiModel):
    """The chart's value ``networkPolicy``, and how the operator's own pods are selected.

    operator: Peer, as in a NetworkPolicy's ``from``, that reads the reports of pods.
    metrics_from: Further peers that may connect to the metrics port, such as Prometheus.
    restrict_egress: Whether pods may connect only to each other, DNS and ``egress``.
    egress: Rules, as in a NetworkPolicy's ``egress``.
    """

    operator: JsonObject
    metrics_from: tuple[JsonObject, ...] = ()
    restrict_egress: bool = False
    egress: tuple[JsonObject, ...] = ()


def build_network_policy(
    job: LoraTrainingJob, attempt: int, settings: NetworkSettings
) -> JsonObject:
    """Build the NetworkPolicy that selects the attempt's pods.

    Args:
        job: The LoraTrainingJob.
        attempt: Number of the attempt.
        settings: Who else may connect, and where pods may.
    """
    pods: JsonObject = {"podSelector": {"matchLabels": attempt_selector(job, attempt)}}
    # All-reduce connects on ports that the system chooses, so ranks may use any.
    ranks = job.spec.workers.nodes > 1
    spec: JsonObject = {
        **pods,
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [settings.operator, *settings.metrics_from],
                "ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}],
            },
            *([{"from": [pods]}] if ranks else []),
        ],
    }
    if settings.restrict_egress:
        spec["policyTypes"] = ["Ingress", "Egress"]
        between = [{"to": [pods]}] if ranks else []
        spec["egress"] = [{"ports": _DNS}, *between, *settings.egress]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": attempt_metadata(job, attempt),
        "spec": spec,
    }

"""The NetworkPolicy of an attempt, against ones written by hand."""

from kubelora_api.documents import parse_job
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import build_job
from kubelora_operator.attempt.network_policy import NetworkSettings, build_network_policy
from tests.operator.attempt.test_manifests import LABELS, NAME, OWNER
from tests.operator.world import UID, document

OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kubelora-operator"}}}
PROMETHEUS: JsonObject = {"namespaceSelector": {}}
SETTINGS = NetworkSettings(operator=OPERATOR, metrics_from=(PROMETHEUS,))
PODS = {"podSelector": {"matchLabels": {"kubelora.dev/job-uid": UID, "kubelora.dev/attempt": "2"}}}
METRICS = {"from": [OPERATOR, PROMETHEUS], "ports": [{"port": 9464, "protocol": "TCP"}]}
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def test_only_the_metrics_port_is_open_and_to_these_peers_alone() -> None:
    assert build_network_policy(parse_job(document()), 2, SETTINGS) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": NAME,
            "namespace": "studio",
            "labels": LABELS,
            "ownerReferences": [OWNER],
        },
        "spec": {**PODS, "policyTypes": ["Ingress"], "ingress": [METRICS]},
    }


def test_the_ranks_of_a_job_reach_each_other_on_every_port() -> None:
    nodes = document(workers={"nodes": 2}, training={"steps": 9, "gradientAccumulation": 2})
    job = parse_job(nodes)
    spec = build_network_policy(job, 2, SETTINGS)["spec"]
    assert spec["ingress"] == [METRICS, {"from": [PODS]}]
    selected = PODS["podSelector"]["matchLabels"].items()
    assert selected <= build_job(job, 2, "t")["spec"]["template"]["metadata"]["labels"].items()


def test_restricted_pods_reach_dns_and_what_the_chart_lists() -> None:
    hub = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    settings = SETTINGS.model_copy(update={"restrict_egress": True, "egress": (hub,)})
    spec = build_network_policy(parse_job(document()), 2, settings)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == [DNS, hub]

"""A template that passes yields a pod inside Pod Security "restricted", judged independently.

The checks are written from the standard's own list
(https://kubernetes.io/docs/concepts/security/pod-security-standards/), not from our rules.
"""

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.schema import JsonObject
from kubelora_operator.admission.check import refusals_of
from kubelora_operator.admission.policy import DEFAULT_POLICY
from kubelora_operator.attempt.manifests import build_job
from tests.operator.world import document

RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
NAMES = st.sampled_from(["default", "kubelora-a", "nvidia", "system-node-critical", "team", "x"])
KEYS = st.sampled_from(
    [
        *("team", "app", "nvidia.com/gpu", "node-role.kubernetes.io/control-plane"),
        "container.apparmor.security.beta.kubernetes.io/trainer",
        "seccomp.security.alpha.kubernetes.io/pod",
        "karpenter.sh/do-not-disrupt",
    ]
)
VALUES = st.sampled_from(["unconfined", "true", ""])
SIZES = st.sampled_from(["1Gi", "99999Gi"])
VOLUMES: list[JsonObject] = [
    {"emptyDir": {"sizeLimit": "1Gi"}},
    {"emptyDir": {}},
    {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    {"hostPath": {"path": "/"}},
    {"nfs": {"server": "s", "path": "/"}},
    {"csi": {"driver": "d"}},
    {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
    {"secret": {"secretName": "kubelora-a"}},
    {"iscsi": {"targetPortal": "p"}},
]
VOLUME = st.sampled_from(VOLUMES).map(lambda source: {"name": "v", **source})
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "annotations": st.dictionaries(KEYS, VALUES, max_size=2),
    "labels": st.dictionaries(KEYS, VALUES, max_size=2),
    "nodeSelector": st.dictionaries(KEYS, VALUES, max_size=2),
    "tolerations": st.lists(
        st.fixed_dictionaries(
            {}, optional={"key": KEYS, "effect": st.sampled_from(["NoSchedule", "NoExecute"])}
        ),
        max_size=2,
    ),
    "volumes": st.lists(VOLUME, max_size=1),
    "sharedMemorySize": SIZES,
    "scratchSize": SIZES,
    "priorityClassName": NAMES,
    "runtimeClassName": NAMES,
    "serviceAccountName": NAMES,
    "securityContext": st.sampled_from(
        [
            {"runAsUser": 0},
            {"runAsUser": 5},
            {"privileged": True},
            {"supplementalGroups": [1]},
            {"appArmorProfile": {"type": "Unconfined"}},
            {"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "0"}]},
        ]
    ),
    "schedulerName": st.just("mine"),
    # Fields of a pod that a template does not have.
    "hostNetwork": st.just(True),
    "hostPID": st.just(True),
    "hostUsers": st.just(True),
    "shareProcessNamespace": st.just(True),
    "initContainers": st.just([{"name": "i", "image": "i"}]),
    "hostAliases": st.just([{"ip": "1.1.1.1", "hostnames": ["h"]}]),
    "dnsConfig": st.just({"nameservers": ["1.1.1.1"]}),
}
TEMPLATES = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


def violations(template: JsonObject) -> list[str]:
    """What of a pod template is outside "restricted"."""
    pod, found = template["spec"], []
    security = pod["securityContext"]
    found += [k for k in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if k in pod]
    found += [k for k in ("seLinuxOptions", "sysctls", "appArmorProfile") if k in security]
    found += [k for k in template["metadata"].get("annotations", {}) if "security." in k]
    if security["seccompProfile"]["type"] not in ("RuntimeDefault", "Localhost"):
        found.append("seccomp")
    if security["runAsNonRoot"] is not True or security["runAsUser"] == 0:
        found.append("root")
    for volume in pod["volumes"]:
        found += [k for k in volume if k != "name" and k not in RESTRICTED_VOLUMES]
        sources = volume.get("projected", {}).get("sources", [])
        found += ["token" for source in sources if "serviceAccountToken" in source]
    for container in pod["containers"] + pod.get("initContainers", []):
        own = container["securityContext"]
        if own["capabilities"] != {"drop": ["ALL"]} or own["allowPrivilegeEscalation"]:
            found.append("capabilities")
        found += [k for k in ("privileged", "procMount", "seLinuxOptions") if k in own]
        found += ["hostPort" for p in container["ports"] if "hostPort" in p]
    return found


@given(TEMPLATES)
@settings(max_examples=150, deadline=None)
def test_what_passes_is_restricted(template: JsonObject) -> None:
    try:
        job = parse_job(document(podTemplate=template))
    except InvalidDocumentError:
        assume(False)
    if refusals_of(job, DEFAULT_POLICY):
        return
    made = build_job(job, 1, "trainer:1")["spec"]["template"]
    assert violations(made) == []
    pod = made["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not pod.get("priorityClassName", "").startswith("system-")
    assert all(t.get("key") == "nvidia.com/gpu" for t in pod.get("tolerations", []))
    assert all("sizeLimit" in v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v)


def test_a_pod_outside_is_seen() -> None:
    """The judge itself: each of these is found."""
    made = build_job(parse_job(document()), 1, "trainer:1")["spec"]["template"]
    assert violations(made) == []
    made["spec"]["hostNetwork"] = True
    made["spec"]["volumes"].append({"name": "v", "hostPath": {"path": "/"}})
    made["spec"]["containers"][0]["securityContext"]["privileged"] = True
    assert violations(made) == ["hostNetwork", "hostPath", "privileged"]

"""The manifests of an attempt, against ones written by hand."""

import hashlib
import json

from kubelora_api.documents import parse_job
from kubelora_operator.attempt.manifests import (
    attempt_in,
    build_config_map,
    build_job,
    build_service,
    child_name,
)
from tests.operator.world import UID, document

NAME = "bottles-0b5e7-2"
LABELS = {
    "app.kubernetes.io/name": "kubelora-trainer",
    "app.kubernetes.io/managed-by": "kubelora-operator",
    "kubelora.dev/job": "bottles",
    "kubelora.dev/job-uid": UID,
    "kubelora.dev/attempt": "2",
}
OWNER = {
    "apiVersion": "kubelora.dev/v1alpha1",
    "kind": "LoraTrainingJob",
    "name": "bottles",
    "uid": UID,
    "controller": True,
    "blockOwnerDeletion": False,
}
NOTHING_SET = hashlib.sha256(b"null").hexdigest()[:12]
BEGUN_WITH = json.dumps(
    dict.fromkeys(("health", "tracking", "podTemplate", "queueName"), NOTHING_SET)
)
POD = {
    "restartPolicy": "Never",
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "terminationGracePeriodSeconds": 120,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "containers": [
        {
            "name": "trainer",
            "image": "trainer:1",
            "imagePullPolicy": "IfNotPresent",
            "command": [
                *("kubelora", "train", "/kubelora/job/job.json"),
                *("--metrics-port", "9464", "--log-format", "json"),
            ],
            "env": [
                {"name": "KUBELORA_ATTEMPT", "value": "2"},
                {"name": "KUBELORA_TERMINATION_LOG", "value": "/dev/termination-log"},
                {
                    "name": "KUBELORA_NODE",
                    "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}},
                },
                {"name": "HOME", "value": "/tmp"},
                {"name": "USER", "value": "kubelora"},
                {"name": "TMPDIR", "value": "/tmp"},
                {"name": "HF_HOME", "value": "/tmp/huggingface"},
                {"name": "XDG_CACHE_HOME", "value": "/tmp/cache"},
                {"name": "TORCHINDUCTOR_CACHE_DIR", "value": "/tmp/torchinductor"},
                {"name": "TRITON_CACHE_DIR", "value": "/tmp/triton"},
                {"name": "MPLCONFIGDIR", "value": "/tmp/matplotlib"},
            ],
            "ports": [{"name": "metrics", "containerPort": 9464, "protocol": "TCP"}],
            "readinessProbe": {
                "httpGet": {"path": "/healthz", "port": "metrics"},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": 3,
            },
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "kubelora-job", "mountPath": "/kubelora/job", "readOnly": True},
                {"name": "kubelora-scratch", "mountPath": "/tmp"},
                {"name": "kubelora-shared-memory", "mountPath": "/dev/shm"},
                {"name": "kubelora-claim-0", "mountPath": "/kubelora/claims/adapters"},
                {
                    "name": "kubelora-claim-1",
                    "mountPath": "/kubelora/claims/models",
                    "readOnly": True,
                },
                {
                    "name": "kubelora-claim-2",
                    "mountPath": "/kubelora/claims/photos",
                    "readOnly": True,
                },
            ],
        }
    ],
    "volumes": [
        {"name": "kubelora-job", "configMap": {"name": NAME}},
        {"name": "kubelora-scratch", "emptyDir": {"sizeLimit": "100Gi"}},
        {"name": "kubelora-shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "kubelora-claim-0", "persistentVolumeClaim": {"claimName": "adapters"}},
        {"name": "kubelora-claim-1", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "kubelora-claim-2", "persistentVolumeClaim": {"claimName": "photos"}},
    ],
}


def read_only_of(job: dict[str, object]) -> dict[str, bool | None]:
    """Of each mount of the pod, whether it is read only; None for what may be written."""
    pod = build_job(parse_job(job), 1, "trainer:1")["spec"]["template"]["spec"]
    mounts = pod["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: mount.get("readOnly") for mount in mounts}


def test_the_job_is_indexed_restricted_and_keeps_the_cause_of_its_failure() -> None:
    assert build_job(parse_job(document()), 2, "trainer:1") == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": NAME,
            "namespace": "studio",
            "labels": LABELS,
            "ownerReferences": [OWNER],
            "annotations": {"kubelora.dev/begun-with": BEGUN_WITH},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": "trainer",
                            "operator": "In",
                            "values": [2, 3, 5, 6, 7],
                        },
                    },
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"metadata": {"labels": LABELS}, "spec": POD},
        },
    }


def test_the_config_map_is_immutable_and_carries_the_resolved_document_with_the_uid() -> None:
    config_map = build_config_map(parse_job(document()), 2)
    assert config_map["immutable"] is True
    assert config_map["metadata"]["name"] == NAME
    assert config_map["metadata"]["ownerReferences"] == [OWNER]
    told = json.loads(config_map["data"]["job.json"])
    assert told["metadata"] == {"name": "bottles", "namespace": "studio", "uid": UID}
    assert told["spec"]["training"]["batchSize"] == 1  # a default, filled in
    assert "status" not in told
    assert parse_job(told).spec == parse_job(document()).spec


def test_a_queue_and_its_priority_are_labels_of_the_job_and_not_of_the_pod() -> None:
    queued = document(queueName="team-studio")
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": "night", "team": "x"}
    job = build_job(parse_job(queued), 2, "trainer:1")
    assert job["metadata"]["labels"] == LABELS | {
        "kueue.x-k8s.io/queue-name": "team-studio",
        "kueue.x-k8s.io/priority-class": "night",
    }
    assert job["spec"]["template"]["metadata"]["labels"] == LABELS
    assert "suspend" not in job["spec"]


def test_what_the_pod_template_says_is_in_the_pod() -> None:
    template = {
        "image": "mine:2",
        "env": [{"name": "HF_HOME", "value": "/cache"}, {"name": "A", "value": "b"}],
        "envFrom": [{"secretRef": {"name": "s3"}}],
        "resources": {"limits": {"memory": "48Gi"}, "requests": {"cpu": 4}},
        "nodeSelector": {"gpu": "a100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/tmp"}],
        "serviceAccountName": "trainer",
        "labels": {"team": "studio"},
        "annotations": {"note": "x"},
        "imagePullSecrets": [{"name": "registry"}],
    }
    job = build_job(parse_job(document(podTemplate=template)), 2, "trainer:1")
    pod, container = (
        job["spec"]["template"]["spec"],
        job["spec"]["template"]["spec"]["containers"][0],
    )
    assert container["image"] == "mine:2"
    assert [e for e in container["env"] if e["name"] == "HF_HOME"] == [
        {"name": "HF_HOME", "value": "/cache"}
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert container["resources"] == {
        "limits": {"memory": "48Gi", "nvidia.com/gpu": "1"},
        "requests": {"cpu": 4},
    }
    assert pod["nodeSelector"] == {"gpu": "a100"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["automountServiceAccountToken"] is False
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert job["spec"]["template"]["metadata"] == {
        "labels": {"team": "studio"} | LABELS,
        "annotations": {"note": "x"},
    }
    # The user's volume takes the place of the scratch volume: one mount path, one mount.
    assert [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/tmp"] == ["cache"]
    assert "kubelora-scratch" not in [v["name"] for v in pod["volumes"]]


def test_a_claim_that_is_read_and_written_is_mounted_once_and_writable() -> None:
    one = document(
        model={"uri": "hf://org/sdxl", "vae": "pvc://all/vae"},
        dataset={"uri": "s3://photos/bottles"},
        output={"uri": "pvc://all/out"},
        workers={"gpusPerNode": 0},
    )
    pod = build_job(parse_job(one), 1, "trainer:1")["spec"]["template"]["spec"]
    mounts = [m for m in pod["containers"][0]["volumeMounts"] if "claims" in m["mountPath"]]
    assert mounts == [{"name": "kubelora-claim-0", "mountPath": "/kubelora/claims/all"}]
    assert pod["containers"][0]["resources"] == {}


def test_the_claim_of_the_cache_is_writable_and_those_of_extra_sources_are_read() -> None:
    one = document(
        dataset={
            "uri": "pvc://photos/bottles",
            "cache": "pvc://scratch/cache",
            "extraSources": [{"uri": "pvc://more/cans"}],
        }
    )
    mounts = read_only_of(one)
    assert mounts["/kubelora/claims/scratch"] is None
    assert mounts["/kubelora/claims/photos"] is True
    assert mounts["/kubelora/claims/more"] is True


def test_the_claim_of_the_lora_to_start_from_is_read() -> None:
    one = document(adapter={"from": "pvc://loras/may/adapter"})
    mounts = read_only_of(one)
    assert mounts["/kubelora/claims/loras"] is True


def test_the_claim_that_lends_configurations_to_a_single_file_is_read() -> None:
    model = {"uri": "pvc://models/a.safetensors", "config": "pvc://pipelines/sdxl"}
    mounts = read_only_of(document(model=model))
    assert mounts["/kubelora/claims/models"] is True
    assert mounts["/kubelora/claims/pipelines"] is True


def test_the_claim_of_the_baseline_is_read_and_stays_writable_where_it_is_the_output_too() -> None:
    one = document(health={"baseline": "pvc://good/bottles-may"})
    mounts = read_only_of(one)
    assert mounts["/kubelora/claims/good"] is True
    same = document(health={"baseline": "pvc://adapters/bottles-may"})
    mounts = read_only_of(same)
    assert mounts["/kubelora/claims/adapters"] is None


def test_the_longest_name_gives_a_host_name_that_is_still_legal() -> None:
    # An Indexed Job's pod is called <job>-<index>-<5>, its host <job>-<index>: 63 at most.
    assert len(child_name("a" * 40, UID, 9999)) + len("-0-abcde") <= 63


def test_an_attempt_is_read_from_a_name_of_ours_alone() -> None:
    assert attempt_in("bottles-0b5e7-12", "bottles", UID) == 12
    for other in ("bottles-0b5e7-", "bottles-0b5e7-012", "bottles-0b5e7-x", "bottles-99999-1", ""):
        assert attempt_in(other, "bottles", UID) is None


GANG = {
    "workers": {"nodes": 3, "gpusPerNode": 2},
    "training": {"steps": 9, "gradientAccumulation": 6},
}


def test_the_pods_of_several_nodes_find_each_other_by_a_headless_service() -> None:
    job = parse_job(document(**GANG))
    assert build_service(job, 2) == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": NAME,
            "namespace": "studio",
            "labels": LABELS,
            "ownerReferences": [OWNER],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"kubelora.dev/job-uid": UID, "kubelora.dev/attempt": "2"},
            "ports": [{"name": "rendezvous", "port": 29400, "protocol": "TCP"}],
        },
    }
    gang = build_job(job, 2, "trainer:1")["spec"]
    assert (gang["completions"], gang["parallelism"], gang["backoffLimit"]) == (3, 3, 0)
    assert gang["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    pod = gang["template"]["spec"]
    assert pod["subdomain"] == NAME
    (container,) = pod["containers"]
    assert container["env"][-2:] == [
        {"name": "MASTER_ADDR", "value": f"{NAME}-0.{NAME}"},
        {"name": "MASTER_PORT", "value": "29400"},
    ]
    assert [p["containerPort"] for p in container["ports"]] == [9464, 29400]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_a_single_node_has_no_service_and_no_meeting_place() -> None:
    job = parse_job(document())
    assert build_service(job, 2) is None
    made = build_job(job, 2, "trainer:1")["spec"]
    assert "successPolicy" not in made
    assert "subdomain" not in made["template"]["spec"]


def test_names_of_a_gang_are_legal_at_the_longest_name_a_job_may_have() -> None:
    """A Service's name and a host name have at most 63 characters and begin with a letter."""
    name = child_name("b" * 40, UID, 999_999)
    assert len(f"{name}-63") <= 63
    assert name[0].isalpha()


def test_a_literal_secret_gets_into_the_pod_alone() -> None:
    secret = "hunter2"
    made = document(podTemplate={"env": [{"name": "HF_TOKEN", "value": secret}]})
    made["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied": json.dumps(made)}
    job = parse_job(made)
    assert secret not in json.dumps(build_config_map(job, 1))
    child = build_job(job, 1, "trainer:1")
    container = child["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "HF_TOKEN", "value": secret} in container["env"]
    container["env"] = []
    assert secret not in json.dumps(child)


def test_what_the_config_map_leaves_out_changes_no_default_of_the_trainer() -> None:
    job = parse_job(document(podTemplate={"image": "mine:1"}))
    read = parse_job(json.loads(build_config_map(job, 1)["data"]["job.json"]))
    assert read.spec.model_copy(update={"pod_template": job.spec.pod_template}) == job.spec

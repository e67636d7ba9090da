"""Simulated nodes: what kwok makes of a pod, and the nodes themselves. Pure.

A pod starts at once with a loopback address, and its containers end with exit code 0 and a
trainer's final report after a given time. Nothing of it can reach another machine.
"""

import json
from typing import Any, Final

import yaml

from kubelora_api import names
from kubelora_api.report import FinalReport

POD_ADDRESSES: Final = "127.64.0.1/12"
_NODES: Final = 8
_ROOM: Final = "100000"
"""GPUs and pods of a node: the scheduler must never run out of either."""
_RUN_ID: Final = "RUN-ID"
_NOT_DELETED: Final = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}

_STARTED: Final = """
{{ $now := Now }}
phase: Running
hostIP: 127.0.0.1
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
startTime: {{ $now | Quote }}
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ $now | Quote }}}
- {type: ContainersReady, status: "True", lastTransitionTime: {{ $now | Quote }}}
- {type: Ready, status: "True", lastTransitionTime: {{ $now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""

_COMPLETED: Final = """
{{ $now := Now }}
{{ $started := .status.startTime }}
{{ $labels := .metadata.labels }}
phase: Succeeded
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: false
  started: false
  restartCount: 0
  state:
    terminated:
      exitCode: 0
      reason: Completed
      startedAt: {{ $started | Quote }}
      finishedAt: {{ $now | Quote }}
      message: {{ printf FORMAT ( index $labels "LABEL" ) | Quote }}
{{ end }}
"""


def configuration(run_seconds: float | None) -> str:
    """Return kwok's configuration file.

    Args:
        run_seconds: How long a pod runs before it completes; None for ever.
    """
    stages = [
        _stage("start", [_NOT_DELETED, _absent(".status.podIP")], {"statusTemplate": _STARTED}),
        # The Job controller removes its own finalizer once it has counted the pod.
        _stage(
            "delete",
            [{"key": ".metadata.deletionTimestamp", "operator": "Exists"}],
            {"delete": True},
        ),
    ]
    if run_seconds is not None:
        running = {"key": ".status.phase", "operator": "In", "values": ["Running"]}
        complete = _stage("complete", [_NOT_DELETED, running], {"statusTemplate": _completed()})
        complete["spec"]["delay"] = {"durationMilliseconds": round(1000 * run_seconds)}
        stages.append(complete)
    return yaml.safe_dump_all(stages)


def nodes() -> list[dict[str, Any]]:
    """Return the nodes, with enough GPUs for everything."""
    room = {
        "cpu": "100k",
        "memory": "1000Ti",
        "pods": _ROOM,
        "ephemeral-storage": "1000Ti",
        names.GPU_RESOURCE: _ROOM,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"simulated-{number}"},
            "status": {"allocatable": room, "capacity": room},
        }
        for number in range(_NODES)
    ]


def _completed() -> str:
    report = FinalReport(
        run_id=_RUN_ID,
        attempt=1,
        exit_code=0,
        message="100 steps are done, the adapter is written",
        step=100,
        total_steps=100,
        loss=0.05,
    )
    text = report.to_termination_message().decode().replace("%", "%%").replace(_RUN_ID, "%s")
    return _COMPLETED.replace("FORMAT", json.dumps(text)).replace("LABEL", names.LABEL_JOB_UID)


def _absent(key: str) -> dict[str, Any]:
    return {"key": key, "operator": "DoesNotExist"}


def _stage(name: str, conditions: list[dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {"matchExpressions": conditions},
            "next": result,
        },
    }

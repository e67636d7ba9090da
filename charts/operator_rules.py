"""Alerts on the operator itself, each for one release: two may share a namespace or a ruler."""

from typing import Final

from charts.rule import OPERATOR_LABELS, Alert, Knob, Runbook
from kubelora_api import metrics
from kubelora_api.names import LABEL_NAME, OPERATOR_APP

_RELEASE: Final = f'namespace="{Knob.NAMESPACE}",release="{Knob.RELEASE}"'
_PODS: Final = f"-n OPERATOR_NAMESPACE -l {LABEL_NAME}={OPERATOR_APP}"
_HERE: Final = f"-n {Knob.NAMESPACE} -l {LABEL_NAME}={OPERATOR_APP}"
_BACKLOG: Final = 50
"""Jobs: a leader that has just started has every job in its queue, for less than ten minutes."""
_FAILED_SHARE: Final = 0.2
"""A look that fails now and then is retried within seconds."""


def operator_alerts() -> list[Alert]:
    """Build all alerts on the operator."""
    return [operator_absent(), operator_errors(), queue_backlog(), watch_stale()]


def operator_absent() -> Alert:
    """Build the alert of a missing leader.

    It pages, though pods train on: while it fires, no other alert is sure to.
    """
    leads = f"{metrics.OPERATOR_IS_LEADER.name}{{{_RELEASE}}}"
    was = f"max by (cluster) (max_over_time({leads}[1d]))"
    absent = (
        f"({was} unless on (cluster) max by (cluster) ({leads} == 1))\n"
        f"or max by (cluster) (absent({leads} == 1))"
    )
    return Alert(
        name="KubeloraOperatorAbsent",
        expr=absent,
        hold=str(Knob.OPERATOR_ABSENT_FOR),
        severity="critical",
        summary=f"No KubeLoRA operator leads in {Knob.NAMESPACE}",
        description="Running pods train on, but no job is started, restarted or reported, and "
        f"findings of ended pods raise no alert. See why: kubectl describe pods {_HERE}",
        about="operator",
        runbook=Runbook(
            "No operator of the release holds the Lease.",
            "Running pods keep training and saving checkpoints. No job is started, restarted, "
            "suspended or reported, and no alert that reads the operator's series can fire. "
            "Nothing is lost: the next leader reads everything again.",
            f"# is there one, is it ready\nkubectl get pods {_PODS}\n"
            f"# why it ended; the last line has the reason\nkubectl logs --previous {_PODS}\n"
            "# who held the Lease last, and since when\nkubectl get lease -n OPERATOR_NAMESPACE",
            f"# start it again\nkubectl rollout restart deployment {_PODS}\n"
            "# after a failed upgrade\nhelm rollback RELEASE -n OPERATOR_NAMESPACE",
        ),
    )


def operator_errors() -> Alert:
    """Build the alert of reconciliations that fail for long."""
    looks = metrics.OPERATOR_RECONCILES.name

    def number(matchers: str) -> str:
        return f"sum by ({OPERATOR_LABELS}) (increase({looks}{{{matchers}}}[10m]))"

    failed = number(f'{_RELEASE},result=~"error|api_error"')
    return Alert(
        name="KubeloraOperatorErrors",
        expr=f"{failed} / ({number(_RELEASE)} > 0) > {_FAILED_SHARE:g}",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the KubeLoRA operator's looks fail",
        description="Jobs react late or not at all. The log names each job and error: "
        f"kubectl logs {_HERE} --tail=50",
        about="operator",
        runbook=Runbook(
            f"For ten minutes more than {_FAILED_SHARE:.0%} of the reconciliations have failed.",
            "Running pods train on; starts, restarts and reports are late.",
            f"# each line names a job and an error\nkubectl logs {_PODS} --tail=50\n"
            "# may it do what it must\nkubectl auth can-i list pods "
            "--as=system:serviceaccount:OPERATOR_NAMESPACE:SERVICE_ACCOUNT -n NAMESPACE",
            "# missing permissions: install the chart's roles again\n"
            "helm upgrade RELEASE CHART -n OPERATOR_NAMESPACE --reuse-values\n"
            "# an error in the operator: start it again\n"
            f"kubectl rollout restart deployment {_PODS}",
        ),
    )


def queue_backlog() -> Alert:
    """Build the alert of a queue that does not become shorter."""
    depth = f"{metrics.OPERATOR_QUEUE_DEPTH.name}{{{_RELEASE}}}"
    return Alert(
        name="KubeloraOperatorQueueBacklog",
        expr=f"max by ({OPERATOR_LABELS}) (min_over_time({depth}[10m])) > {_BACKLOG}",
        hold="10m",
        severity="warning",
        summary="{{ $value }} jobs wait for the KubeLoRA operator",
        description="Jobs react minutes late. A slow API server or too little CPU is likely: "
        f"kubectl top pods {_HERE}",
        about="operator",
        runbook=Runbook(
            f"More than {_BACKLOG} jobs have waited for a reconciliation for 20 minutes.",
            "Starts, restarts and reports are minutes late; running pods train on.",
            f"# is it short of CPU\nkubectl top pods {_PODS}\n"
            f"# are requests slow or refused\nkubectl logs {_PODS} --tail=50",
            "# give it more CPU\nhelm upgrade RELEASE CHART -n OPERATOR_NAMESPACE --reuse-values "
            "--set resources.requests.cpu=500m",
        ),
    )


def watch_stale() -> Alert:
    """Build the alert of a watch that misses changes which the periodic list finds."""
    overdue = f"{metrics.OPERATOR_WATCH_LAG.name}{{{_RELEASE}}}"
    return Alert(
        name="KubeloraWatchStale",
        expr=f"max by ({OPERATOR_LABELS}) (min_over_time({overdue}[5m])) > 0",
        hold="5m",
        severity="warning",
        summary="The KubeLoRA operator's watch misses changes of {{ $value }} jobs",
        description="The periodic list still finds them, later. The liveness probe should have "
        f"restarted the operator: kubectl describe pods {_HERE}",
        about="operator",
        runbook=Runbook(
            "The periodic list has found changes that no watch reported, for ten minutes.",
            "Jobs react up to `operator.resyncSeconds` late.",
            f"# restarts, and the liveness probe's last message\nkubectl describe pods {_PODS}\n"
            f"# errors of the watch\nkubectl logs {_PODS} --tail=50",
            f"# open the watches again\nkubectl rollout restart deployment {_PODS}",
        ),
    )

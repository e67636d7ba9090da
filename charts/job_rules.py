"""Alerts on jobs: what no pod can notice about itself, or what outlives it.

All but three read the operator's series alone, so they hold whatever becomes of the pods and fire
until somebody acts. Times are compared with the time of a condition rather than held by ``for``,
which a restart of Prometheus would begin again.
"""

from typing import Final

from charts.rule import (
    DESCRIBE,
    IN_JOB,
    JOB,
    JOB_LABELS,
    POD_LABELS,
    Alert,
    AlertSeverity,
    Knob,
    Runbook,
    acknowledge,
    of_job,
    per_job,
    unacknowledged,
)
from kubelora_api import metrics
from kubelora_api.names import LABEL_JOB, SHORT_NAME
from kubelora_operator.decision.policy_suspension import USER_WAIT_REASONS

NOT_ENDING: Final = ("NodeLost", "PodTerminating", "UnknownOwner")
"""Reasons of Running=False while a pod that was deleted does not end."""
_GAP: Final = "5m"
"""How far apart scrapes may be: the time for which Prometheus itself uses an old sample."""
_RESTARTS: Final = 4
"""Attempts in six hours: three restarts may be one bad node and its replacements."""
_STARVED: Final = 0.3
"""Share of the time spent waiting for data: below it, faster data would not save a third."""
_GET: Final = f"kubectl get {SHORT_NAME} NAME -n NAMESPACE"
_DESCRIBE: Final = f"kubectl describe {SHORT_NAME} NAME -n NAMESPACE"
_PODS: Final = f"kubectl get pods -n NAMESPACE -l {LABEL_JOB}=NAME -o wide"
_LOGS: Final = f"kubectl logs -n NAMESPACE -l {LABEL_JOB}=NAME --tail=50"
_EVENTS: Final = "kubectl get events -n NAMESPACE --sort-by=.lastTimestamp"
_DELETE: Final = f"kubectl delete {SHORT_NAME} NAME -n NAMESPACE"
_DELETE_POD: Final = f"kubectl delete pod -n NAMESPACE -l {LABEL_JOB}=NAME"

_SUSPEND: Final = '{"suspend":true}'
_RESUME: Final = '{"suspend":false}'
_POLICY_WARN: Final = '{"health":{"policy":"Warn"}}'
_POLICY_ROLLBACK: Final = '{"health":{"policy":"Rollback"}}'


def _patch(spec: str) -> str:
    return f"kubectl patch {SHORT_NAME} NAME -n NAMESPACE --type merge -p '{{\"spec\":{spec}}}'"


def job_alerts() -> list[Alert]:
    """Build all alerts on jobs."""
    return [
        job_failed(),
        job_suspended(),
        pod_not_ending(),
        job_not_starting(),
        job_queued(),
        job_silent(),
        training_stalled(),
        telemetry_missing(),
        checkpoint_stale(),
        restarts_many(),
        data_starved(),
        tracker_failed(),
        lossy_precision(),
    ]


def job_failed() -> Alert:
    """Build the alert of a failed job, which fires until the job is deleted."""
    name = "KubeloraJobFailed"
    return _alert(
        name,
        _in_state('="Failed"'),
        "warning",
        f"{JOB} has failed: {{{{ $labels.reason }}}}",
        "It is not tried again. The condition Failed names the cause and what to change: "
        f"{DESCRIBE}. Correct it in a new job, then delete this one.",
        Runbook(
            "The job has failed permanently: it is not retried, and nothing trains. The label "
            "`reason` is the reason of the condition `Failed`: `ConfigurationError` (exit 2), "
            "`NumericalFailure` (exit 3), or that no restarts are left.",
            "The GPUs are free and the last checkpoint is kept; the job's results do not come.",
            f"# the condition Failed names the field, file, image or finding\n{_DESCRIBE}\n"
            f"# what the last attempt wrote, while its pod is there\n{_LOGS}",
            "# correct the cause in a new job; the spec of a started one is fixed. Then:\n"
            f"{_DELETE}\n# or keep it, and end the alert\n{acknowledge(name)}",
        ),
    )


def job_suspended() -> Alert:
    """Build the alert of a job that its health policy, or the limit of restarts, has suspended."""
    name = "KubeloraJobSuspended"
    reasons = "|".join(USER_WAIT_REASONS)
    return _alert(
        name,
        _in_state('="Suspended"', f'=~"{reasons}"'),
        "warning",
        f"{JOB} waits for you: {{{{ $labels.reason }}}}",
        "It was suspended by its own policy, not by a user, and nothing trains until somebody "
        f"decides. The condition Suspended names the cause: {DESCRIBE}",
        Runbook(
            "The job is suspended and waits for a decision: a critical finding under "
            "`health.policy: Suspend`, or more free restarts in a day than allowed. A suspension "
            "by `spec.suspend` raises no alert.",
            "The GPUs are free. A checkpoint was saved; nothing is lost but time.",
            f"# the finding, its value, limit and first step\n{_GET} "
            "-o jsonpath='{.status.health}'\n"
            f"# the condition Suspended, and the last checkpoint\n{_DESCRIBE}",
            "# accept the finding once and continue from the checkpoint\n"
            f"{_patch(_SUSPEND)}\n"
            f"{_patch(_RESUME)}\n"
            "# continue whatever is found\n"
            f"{_patch(_POLICY_WARN)}\n"
            "# return to a checkpoint from before the finding\n"
            f"{_patch(_POLICY_ROLLBACK)}\n"
            f"# give it up\n{_DELETE}\n"
            f"# leave it suspended, and end the alert\n{acknowledge(name)}",
        ),
    )


def pod_not_ending() -> Alert:
    """Build the alert of a deleted pod that does not end and keeps its job waiting."""
    name = "KubeloraPodNotEnding"
    return _alert(
        name,
        _in_state('!~"Complete|Failed"', f'=~"{"|".join(NOT_ENDING)}"'),
        "warning",
        f"{JOB}: a pod does not end ({{{{ $labels.reason }}}})",
        "The job waits for a deleted pod whose grace period is over. The condition Running names "
        f"the pod, its node and what happens when: {DESCRIBE}",
        Runbook(
            "A pod of the job was deleted, its grace period is over, and it is still there. "
            "`NodeLost`: its node is gone or not ready. `PodTerminating`: its node is ready. "
            "`UnknownOwner`: the pod's Job no longer exists.",
            "The job neither trains nor restarts, because two attempts must not write to one "
            "output. Its GPU stays reserved.",
            f"# the condition Running: pod, node, time of the forced deletion\n{_DESCRIBE}\n"
            f"# which container still runs, and where\n{_PODS}\n"
            "# is the node ready, since when\nkubectl describe node NODE",
            "# the node is lost for good: removing it lets its pods be forgotten\n"
            "kubectl delete node NODE\n"
            "# the node is off or fenced, so the container cannot be running\n"
            "kubectl delete pod POD -n NAMESPACE --force --grace-period=0\n"
            f"# it can wait\n{acknowledge(name)}",
        ),
    )


def job_not_starting() -> Alert:
    """Build the alert of a job that should run and does not, with the reason."""
    name = "KubeloraJobNotStarting"
    waiting = _in_state('=~"Accepted|Pending|Invalid|Restarting"', f'!~"{"|".join(NOT_ENDING)}"')
    return _alert(
        name,
        _longer_than(waiting, Knob.NOT_STARTING_SECONDS),
        "warning",
        f"{JOB} does not start: {{{{ $labels.reason }}}}",
        "It has waited for {{ $value | humanizeDuration }}. The condition named by the reason has "
        f"a message with what is missing: {DESCRIBE}",
        Runbook(
            "The job has been neither queued nor running for longer than "
            "`monitoring.rules.notStartingAfterSeconds`. The label `reason` is that of the "
            "condition it waits for, such as `Unschedulable`, `ImagePullFailed`, `ClaimNotFound`.",
            "Nothing trains. It starts by itself once the cause is gone.",
            f"# the condition's message\n{_DESCRIBE}\n# the pod, if there is one\n{_PODS}\n"
            f"# refusals by quota, admission or the scheduler\n{_EVENTS}",
            "# create what is missing (claim, secret, quota, nodes): no command on the job is "
            "needed\n# a wrong field of a job that has not started can be changed\n"
            f"kubectl edit {SHORT_NAME} NAME -n NAMESPACE\n"
            f"# it can wait\n{acknowledge(name)}",
        ),
    )


def job_queued() -> Alert:
    """Build the alert of a job that its queue has not admitted for long."""
    name = "KubeloraJobQueued"
    return _alert(
        name,
        _longer_than(_in_state('="Queued"'), Knob.QUEUED_SECONDS),
        "warning",
        f"{JOB} has been queued for {{{{ $value | humanizeDuration }}}}",
        "Its queue has not admitted it. The condition Queued names the queue: "
        "kubectl describe workloads -n {{ $labels.job_namespace }}",
        Runbook(
            "Kueue has not admitted the job for longer than `monitoring.rules.queuedAfterSeconds`.",
            "Nothing trains. It starts by itself once its queue has quota.",
            f"# which queue\n{_DESCRIBE}\n# why Kueue waits\nkubectl describe workloads -n "
            "NAMESPACE\n# quota in use\nkubectl get clusterqueues",
            "# let it pass others: a priority class of Kueue, as a label\n"
            f"kubectl label {SHORT_NAME} NAME -n NAMESPACE kueue.x-k8s.io/priority-class=CLASS\n"
            f"# it can wait\n{acknowledge(name)}",
        ),
    )


def job_silent() -> Alert:
    """Build the alert of a running job whose pods do not report: a node may be lost."""
    name = "KubeloraJobSilent"
    age = f"(time() - {per_job(of_job(metrics.JOB_REPORT_TIME))})"
    running = per_job(of_job(metrics.JOB_STATE, state='="Running"'))
    return _alert(
        name,
        f"{running} * on ({JOB_LABELS}) {age} > {Knob.SILENT_SECONDS}",
        "warning",
        f"{JOB} has not reported for {{{{ $value | humanizeDuration }}}}",
        "Its pods run as far as Kubernetes knows, but do not answer the operator. A lost node, a "
        "process that hangs, or a NetworkPolicy is likely: kubectl get pods -o wide "
        f"-n {{{{ $labels.job_namespace }}}} -l {LABEL_JOB}={{{{ $labels.name }}}}",
        Runbook(
            "The job is Running, but the operator has had no report from its pod for "
            "`monitoring.rules.silentAfterSeconds`.",
            "Whether it trains is not known; status, findings and progress are old. After a lost "
            "node the job restarts by itself once Kubernetes has given up the pod.",
            f"# on which node, and is it ready\n{_PODS}\nkubectl get nodes\n"
            f"# does it still write\n{_LOGS}\n"
            "# may the operator reach port 9464 of the pods\n"
            "kubectl get networkpolicy -n NAMESPACE",
            f"# start a new attempt from the last checkpoint\n{_DELETE_POD}\n"
            f"# it can wait\n{acknowledge(name)}",
        ),
    )


def training_stalled() -> Alert:
    """Build the alert of a job without progress, once the number of planned steps is known.

    Start-up (no steps planned yet) and the end of a run are not judged. Slow steps are given ten
    times as long: a step that takes as long as the silence is slow, not stalled.
    """
    name = "KubeloraTrainingStalled"
    return _alert(
        name,
        f"{per_job(_without_step(''))}\nor {per_job(_without_step('0'))}",
        "warning",
        f"{JOB} makes no steps: it is at {{{{ $value }}}}",
        f"No optimizer step for {Knob.STALLED_SECONDS} s, though a step took less than a tenth of "
        "that (with slower steps: ten times as long). See what it waits for: "
        f"kubectl logs -n {{{{ $labels.job_namespace }}}} -l {LABEL_JOB}={{{{ $labels.name }}}} "
        "--tail=50",
        Runbook(
            "A pod lives and is scraped but has made no optimizer step for "
            "`monitoring.rules.stalledAfterSeconds`, although its steps took less than a tenth of "
            "that; a job with slower steps has ten times as long.",
            "GPU time passes and nothing is learned. Weights and checkpoints are untouched.",
            f"# what it did last\n{_LOGS}\n# on which node; there, a GPU that was lost shows as\n"
            "# NVRM: Xid in the kernel's log, a volume that hangs as processes in state D\n"
            f"{_PODS}",
            "# on a broken node first\nkubectl cordon NODE\n"
            "# a new attempt continues from the last checkpoint; only later steps are lost\n"
            f"{_DELETE_POD}\n# it is known\n{acknowledge(name)}",
        ),
    )


def _without_step(zero: str) -> str:
    """Select pods without a step for the allowed time, which the digit ``zero`` makes tenfold."""
    step, seconds = of_job(metrics.STEP), f"{Knob.STALLED_SECONDS}{zero}"
    duration, planned = of_job(metrics.STEP_DURATION), of_job(metrics.STEPS_PLANNED)
    return (
        f"\n  max_over_time({step}[{seconds}s]) == min_over_time({step}[{seconds}s])"
        f"\n  and on ({POD_LABELS}) count_over_time({step}[{_GAP}] offset {seconds}s) > 0"
        f"\n  and on ({POD_LABELS}) {step} < {planned}"
        f"\n  and on ({POD_LABELS}) {duration} * 10 < {seconds}\n"
    )


def telemetry_missing() -> Alert:
    """Build the alert of a running job that Prometheus has no metrics of."""
    name = "KubeloraTelemetryMissing"
    running = per_job(of_job(metrics.JOB_STATE, state='="Running"'))
    return _alert(
        name,
        f"{running} unless on ({JOB_LABELS}) {per_job(of_job(metrics.STEP))}",
        "warning",
        f"{JOB} trains without being scraped",
        "Its gradients are on no dashboard; findings still arrive by the operator. Check the "
        "PodMonitor's targets in Prometheus, and whether a NetworkPolicy blocks port 9464: "
        "kubectl get podmonitors,networkpolicies -n {{ $labels.job_namespace }}",
        Runbook(
            "The job is Running, and Prometheus has no metrics of its pods with the labels "
            "`job_namespace` and `name`, which the chart's PodMonitor adds.",
            "The pod's watchdog still checks the run, and its findings reach Prometheus by the "
            "operator. Dashboards are empty, and stalls are not noticed.",
            "# is the PodMonitor there, and does Prometheus select its labels\n"
            "kubectl get podmonitors -A\n# what may reach the pods\n"
            f"kubectl get networkpolicy -n NAMESPACE\n# health of the job meanwhile\n{_GET}",
            "# let Prometheus select the PodMonitor by its labels\n"
            "helm upgrade RELEASE CHART -n OPERATOR_NAMESPACE --reuse-values "
            "--set monitoring.podMonitor.labels.release=kube-prometheus-stack\n"
            f"# it is known\n{acknowledge(name)}",
        ),
        hold=str(Knob.UNSEEN_FOR),
    )


def checkpoint_stale() -> Alert:
    """Build the alert of a job that trains on without the checkpoints that its spec asks for."""
    name = "KubeloraCheckpointStale"
    step = per_job(of_job(metrics.JOB_STEP))
    saved = f"({per_job(of_job(metrics.JOB_CHECKPOINT_STEP))} or 0 * {step})"
    interval = per_job(of_job(metrics.JOB_CHECKPOINT_INTERVAL))
    running = per_job(of_job(metrics.JOB_STATE, state='="Running"'))
    return _alert(
        name,
        f"{step} - {saved} > 2 * {interval}\nand on ({JOB_LABELS}) {running}",
        "critical",
        f"{JOB}: {{{{ $value }}}} steps since the last checkpoint",
        "That is more than twice checkpoint.everySteps: an interruption now loses them. A full or "
        f"slow volume is likely: kubectl logs -n {{{{ $labels.job_namespace }}}} "
        f"-l {LABEL_JOB}={{{{ $labels.name }}}} --tail=50",
        Runbook(
            "The job has made more than twice `checkpoint.everySteps` since its newest checkpoint.",
            "Work is being lost if the pod ends now, more with every step.",
            f"# what it logs about saving\n{_LOGS}\n# room in the output's volume\n"
            f"kubectl exec -n NAMESPACE POD -- df -h /kubelora/claims\n# last checkpoint\n{_GET} "
            "-o jsonpath='{.status.checkpoint}'",
            "# make room, then stop behind a checkpoint\n"
            f"{_patch(_SUSPEND)}\n"
            f"{_patch(_RESUME)}\n"
            f"# it is known\n{acknowledge(name)}",
        ),
    )


def restarts_many() -> Alert:
    """Build the alert of a job that restarts again and again."""
    name = "KubeloraRestartsMany"
    attempt = of_job(metrics.JOB_ATTEMPT)
    since = f"{per_job(attempt)} - min by ({JOB_LABELS}) (min_over_time({attempt}[6h]))"
    ended = per_job(of_job(metrics.JOB_STATE, state='=~"Complete|Failed|Suspended"'))
    return _alert(
        name,
        f"{since} >= {_RESTARTS}\nunless on ({JOB_LABELS}) {ended}",
        "warning",
        f"{JOB} has restarted {{{{ $value }}}} times in six hours",
        "Each restart loads the model again and loses the steps since a checkpoint. The Events "
        f"name each cause: {DESCRIBE}",
        Runbook(
            f"The job has begun {_RESTARTS} or more attempts in six hours.",
            "Each attempt loads the model again, and steps since the last checkpoint are repeated.",
            f"# the causes, newest last\n{_DESCRIBE}\n# how the pods ended\n{_PODS}",
            "# a bad node: let no pod start there\nkubectl cordon NODE\n"
            "# steps are lost each time: give the next job a smaller checkpoint.everySteps\n"
            f"# it is known\n{acknowledge(name)}",
        ),
    )


def data_starved() -> Alert:
    """Build the alert of a run whose steps wait for data."""
    name = "KubeloraDataStarved"
    waiting = f"rate({of_job(metrics.DATA_WAIT)}[{Knob.WINDOW}])"
    return _alert(
        name,
        per_job(f"{waiting} > {_STARVED:g}"),
        "info",
        f"{JOB}: {{{{ $value | humanizePercentage }}}} of its time waits for data",
        f"The GPU is idle meanwhile. See {DESCRIBE}",
        Runbook(
            f"For `monitoring.rules.window`, more than {_STARVED:.0%} of the time was spent "
            "waiting for images to be read and decoded.",
            "Nothing is lost but GPU time.",
            f"# what it prints about data and caches\n{_LOGS}\n# CPU of the pod\n"
            f"kubectl top pod -n NAMESPACE -l {LABEL_JOB}=NAME",
            "# in the next job: cache latents (dataset.cache), give the pod more CPU\n"
            "# (podTemplate.resources), or use a faster volume\n"
            f"# it is known\n{acknowledge(name)}",
        ),
        hold=str(Knob.WINDOW),
    )


def tracker_failed() -> Alert:
    """Build the alert of an experiment tracker that is no longer used."""
    name = "KubeloraTrackerFailed"
    return _alert(
        name,
        f"{per_job(of_job(metrics.TRACKERS_FAILED))} > 0",
        "info",
        f"{JOB}: an experiment tracker failed",
        "Training continues without it; the run log in the output has every step. The log names "
        f"the tracker and its error: kubectl logs -n {{{{ $labels.job_namespace }}}} "
        f"-l {LABEL_JOB}={{{{ $labels.name }}}}",
        Runbook(
            "A tracker of `spec.tracking` raised an error and is not used for the rest of the "
            "attempt.",
            "Its page lacks the steps since then; `metrics.parquet` in the output has all of them.",
            f"# which tracker, and its error\nkubectl logs -n NAMESPACE -l {LABEL_JOB}=NAME "
            "| grep -i tracker",
            f"# correct its address or secret; a new attempt uses it again\n{_DELETE_POD}\n"
            f"# it is known\n{acknowledge(name)}",
        ),
    )


def lossy_precision() -> Alert:
    """Build the alert of a job whose spec accepts that gradients are lost."""
    name = "KubeloraLossyPrecision"
    info = " or ".join(
        of_job(metrics.JOB_INFO, **{label: '!="fp32"'})
        for label in ("accumulator", "master_weights")
    )
    ended = per_job(of_job(metrics.JOB_STATE, state='=~"Complete|Failed"'))
    return _alert(
        name,
        f"max by ({JOB_LABELS}, accumulator, master_weights) ({info})\n"
        f"unless on ({JOB_LABELS}) {ended}",
        "info",
        f"{JOB} trains in a lossy precision",
        "Accumulator {{ $labels.accumulator }}, master weights {{ $labels.master_weights }}: small "
        "gradients or updates are lost, which precision.allowLossyPrecision accepts. See "
        f"kubectl get {SHORT_NAME} {IN_JOB} -o jsonpath='{{.spec.precision}}'",
        Runbook(
            "`precision.accumulator` or `precision.masterWeights` is not fp32, which "
            "`allowLossyPrecision: true` accepts.",
            "Small gradients or updates are rounded away; the findings `UpdatesLost` and "
            "`GradientAbsorbed` show how many.",
            f"# what it uses\n{_GET} -o jsonpath='{{.spec.precision}}'",
            f"# leave both out in the next job: fp32 is the default\n{acknowledge(name)}",
        ),
    )


def _alert(
    name: str,
    expr: str,
    severity: AlertSeverity,
    summary: str,
    description: str,
    runbook: Runbook,
    hold: str = "",
) -> Alert:
    expr = unacknowledged(name, expr)
    return Alert(name, expr, severity, summary, description, runbook, hold)


def _in_state(state: str, reason: str = '=~".*"') -> str:
    """Select jobs in a state, with the reason as a label.

    Args:
        state: Matcher of the state.
        reason: Matcher of the reason.
    """
    selected = of_job(metrics.JOB_STATE, state=state, reason=reason)
    return f"max by ({JOB_LABELS}, reason) ({selected})"


def _longer_than(waiting: str, seconds: str) -> str:
    """Select jobs that have been in their state for longer; the value is for how long, in seconds.

    Args:
        waiting: Jobs in the state.
        seconds: The limit.
    """
    since = per_job(of_job(metrics.JOB_STATE_SINCE))
    return f"{waiting} * on ({JOB_LABELS}) group_left () (time() - {since}) > {seconds}"

"""The alert rules as data: one per finding, and a few for jobs and the operator.

Limits, windows and severities come from the table used by the in-pod watchdog, metric names from
the contract, so an alert cannot diverge from what the trainer checks and exports. Limits that apply
to every run are evaluated on the metrics; other findings follow the watchdog's gauge. Values of the
chart (`Knob`) stay placeholders that the chart replaces.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kubelora_api import metrics
from kubelora_api.names import LABEL_JOB, LABEL_NAME, OPERATOR_APP, SHORT_NAME
from kubelora_api.thresholds import FINDINGS, THRESHOLDS, Event, Threshold

JOB_LABELS = "namespace, name"
"""Labels that identify a job: the pod's namespace, and the job name set by the PodMonitor."""


class Knob(StrEnum):
    """Placeholders for values of the chart."""

    FOR = "$(for)"
    WINDOW = "$(window)"
    INTERVAL = "$(interval)"
    STALLED_SECONDS = "$(stalledAfterSeconds)"
    OPERATOR_ABSENT_FOR = "$(operatorAbsentFor)"
    UNSEEN_FOR = "$(unseenFor)"
    NAMESPACE = "$(namespace)"
    RUNBOOKS = "$(runbookUrlBase)"


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expr: str

    def document(self) -> dict[str, Any]:
        """Return the rule in Prometheus' format."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """An alerting rule. ``hold`` is its ``for``; empty fires at once."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def runbook(self) -> str:
        """The section of the documentation on this alert, relative to docs/."""
        if finding := self.labels.get("finding"):
            return f"findings.md#{finding.lower()}"
        return f"alerts.md#{self.name.lower()}"

    def document(self) -> dict[str, Any]:
        """Return the rule in Prometheus' format; the chart drops ``runbook_url`` without a base."""
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.hold} if self.hold else {}),
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{Knob.RUNBOOKS}/{self.runbook}",
            },
        }


def groups() -> list[dict[str, Any]]:
    """Build all rule groups, as under ``groups`` of a rule file."""
    judged = [rule.document() for t in judged_here() for rule in rules_of(t)]
    reported = [watchdog_alert(f).document() for f in FINDINGS if f not in judged_here()]
    jobs = [job_failed(), training_stalled(), telemetry_missing(), operator_absent()]
    return [
        # Evaluated as often as it is scraped, so that every sample counts once in a median.
        {"name": "kubelora-numerics", "interval": str(Knob.INTERVAL), "rules": judged + reported},
        {"name": "kubelora-jobs", "rules": [a.document() for a in jobs]},
    ]


def judged_here() -> tuple[Threshold, ...]:
    """Return the limits that are compared with metrics in Prometheus."""
    return tuple(t for t in THRESHOLDS if t.in_prometheus)


def watchdog_alert(found: Threshold | Event) -> Alert:
    """Build the alert of a watchdog finding, without ``for`` because it is a median already."""
    return Alert(
        name=f"Kubelora{found.finding}",
        expr=f"max by ({JOB_LABELS}) ({_found(found.finding)}) == 1",
        hold="",
        severity=found.severity,
        labels={"finding": found.finding},
        summary=f"{_JOB}: {found.sentence}",
        description=f"Found by the watchdog in the pod. {found.reason} {found.sentence} "
        f"See what was measured, in which layers and since which step: {_DESCRIBE}",
    )


def rules_of(threshold: Threshold) -> list[Record | Alert]:
    """Build the rules for one limit."""
    if threshold.metric.type == "counter":
        return [_alert(threshold, _rising(threshold), hold="")]
    record = Record(recorded_name(threshold), _judged(threshold))
    return [record, _alert(threshold, _median(threshold), hold=str(Knob.FOR))]


def recorded_name(threshold: Threshold) -> str:
    """Return the name of the recorded series of a metric's values at evaluated steps."""
    return f"kubelora:{threshold.metric.name.removeprefix('kubelora_')}:judged"


def _judged(threshold: Threshold) -> str:
    """Select the metric's value once per optimizer step, and only where it can be compared.

    Left out: the first steps (lora_A has no gradient while lora_B is 0), steps with a learning rate
    of 0 (nothing is meant to move), a value that repeats (validation, export, a long step), and
    NaN, which marks a step that is not evaluated.
    """
    step = metrics.STEP.name
    return (
        f"{threshold.metric.name} >= 0\n"
        f"and on (namespace, pod) {step} > {threshold.skip_steps}\n"
        f"and on (namespace, pod) {step} != {step} offset {Knob.INTERVAL}\n"
        f"and on (namespace, pod) {metrics.LEARNING_RATE.name} > 0"
    )


def _median(threshold: Threshold) -> str:
    """Select the worst group's median, once there are as many steps as the watchdog requires.

    Where steps are too slow for that, or too fast for the scrapes, the watchdog's own word counts.
    """
    worst = "min" if threshold.op == "<" else "max"
    series = f"{recorded_name(threshold)}[{Knob.WINDOW}]"
    return (
        f"{worst} by ({JOB_LABELS}) (\n"
        f"  quantile_over_time(0.5, {series}) {threshold.op} {threshold.limit:g}\n"
        f"  and count_over_time({series}) >= {threshold.window}\n"
        ")\n"
        f"or {worst} by ({JOB_LABELS}) (\n"
        f"  {threshold.metric.name}\n"
        f"  and on (namespace, pod) {_found(threshold.finding)} == 1\n"
        ")"
    )


def _found(finding: str) -> str:
    """Select the watchdog's gauge of a finding."""
    return f'{metrics.HEALTH_FINDING.name}{{finding="{finding}"}}'


def _rising(threshold: Threshold) -> str:
    """Select a counter above the limit that has risen within the window.

    ``increase`` would miss what the first scrape of a short-lived pod shows.
    """
    now = f"max_over_time({threshold.metric.name}[{Knob.WINDOW}])"
    before = f"max_over_time({threshold.metric.name}[{Knob.WINDOW}] offset {Knob.WINDOW})"
    return (
        f"max by ({JOB_LABELS}) (\n"
        f"  {now} {threshold.op} {threshold.limit:g}\n"
        f"  unless {now} <= {before}\n"
        ")"
    )


def _alert(threshold: Threshold, expr: str, hold: str) -> Alert:
    if threshold.metric.name.endswith("_ratio"):
        value, limit = "{{ $value | humanizePercentage }}", f"{threshold.limit * 100:g}%"
    else:
        value, limit = "{{ $value | humanize }}", f"{threshold.limit:g}"
    what = threshold.metric.help[0].lower() + threshold.metric.help[1:].rstrip(".")
    return Alert(
        name=f"Kubelora{threshold.finding}",
        expr=expr,
        hold=hold,
        severity=threshold.severity,
        labels={"finding": threshold.finding},
        summary=f"{_JOB}: {threshold.sentence}",
        description=f"In the worst group of layers, {what}: {value} "
        f"(alert {threshold.op} {limit}). {threshold.reason} {threshold.sentence} "
        f"See which layers and since which step: {_DESCRIBE}",
    )


_JOB = "{{ $labels.namespace }}/{{ $labels.name }}"
_DESCRIBE = f"kubectl describe {SHORT_NAME} {{{{ $labels.name }}}} -n {{{{ $labels.namespace }}}}"


def job_failed() -> Alert:
    """Build the alert of a failed job, which fires until the job is deleted."""
    return Alert(
        name="KubeloraJobFailed",
        expr=f"max by ({JOB_LABELS}, reason) ({metrics.JOB_FAILED.name}) > 0",
        hold="",
        severity="warning",
        summary=f"{_JOB} has failed: {{{{ $labels.reason }}}}",
        description="The job will not be tried again. Its condition Failed explains why and what "
        f"to change: {_DESCRIBE}. Correct the cause in a new job, then delete this one.",
    )


def training_stalled() -> Alert:
    """Build the alert of a job without progress, once the number of planned steps is known.

    Start-up (no steps planned yet) and the end of a run are not judged. Slow steps are given ten
    times as long: a step that takes as long as the silence is slow, not stalled.
    """
    silence = f"{Knob.STALLED_SECONDS}s"
    return Alert(
        name="KubeloraTrainingStalled",
        expr=f"max by ({JOB_LABELS}) (\n{_silent('')}\n)\n"
        f"or max by ({JOB_LABELS}) (\n{_silent('0')}\n)",
        hold="",
        severity="warning",
        summary=f"{_JOB} has made no optimizer step for {silence}",
        description="Training is at optimizer step {{ $value }}, though the last step, if "
        f"there was one, took less than a tenth of {silence} (a slow step: of ten times that). "
        "A volume or GPU that hangs is likely. See what it waits for: "
        "kubectl logs -n {{ $labels.namespace }} "
        f"-l {LABEL_JOB}={{{{ $labels.name }}}} --tail=50",
    )


def _silent(zero: str) -> str:
    """Select pods without a step for the allowed time, which the digit ``zero`` makes tenfold."""
    step, seconds = metrics.STEP.name, f"{Knob.STALLED_SECONDS}{zero}"
    return (
        f"  {step} == {step} offset {seconds}s\n"
        f"  and on (namespace, pod) {step} < {metrics.STEPS_PLANNED.name}\n"
        f"  and on (namespace, pod) {metrics.STEP_DURATION.name} * 10 < {seconds}"
    )


def telemetry_missing() -> Alert:
    """Build the alert of running jobs without metrics, which no other alert detects."""
    running = f'sum by (namespace) ({metrics.JOBS.name}{{state="Running"}})'
    seen = f"count by (namespace) (count by ({JOB_LABELS}) ({metrics.STEP.name}))"
    return Alert(
        name="KubeloraTelemetryMissing",
        expr=f"{running} > ({seen} or 0 * {running})",
        hold=str(Knob.UNSEEN_FOR),
        severity="warning",
        summary="Jobs in {{ $labels.namespace }} train without being scraped",
        description="{{ $value }} jobs run in {{ $labels.namespace }} and Prometheus has metrics "
        "of fewer: their gradients are not watched by the other alerts. Check the targets of the "
        "training pods' PodMonitor, and whether a NetworkPolicy blocks port metrics: "
        f"kubectl get {SHORT_NAME} -n {{{{ $labels.namespace }}}}",
    )


def operator_absent() -> Alert:
    """Build the alert of a missing leader: pods continue, but no job is started or restarted."""
    return Alert(
        name="KubeloraOperatorAbsent",
        expr=f'absent({metrics.OPERATOR_IS_LEADER.name}{{namespace="{Knob.NAMESPACE}"}} == 1)',
        hold=str(Knob.OPERATOR_ABSENT_FOR),
        severity="critical",
        labels={"namespace": str(Knob.NAMESPACE)},
        summary="No KubeLoRA operator leads",
        description="Running pods train on, but no job is started, restarted or reported. See why: "
        f"kubectl describe pods -n {Knob.NAMESPACE} -l {LABEL_NAME}={OPERATOR_APP}",
    )

"""The parts of a rule file: recording rules, alerts with their runbooks, and PromQL's common words.

A job is identified by ``job_namespace`` and ``name``, and by ``cluster`` where one Prometheus or
ruler holds several. Replicas of Prometheus and second scrape paths repeat series, so every rule
takes the largest value of a job, never a sum.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from kubelora_api.metrics import JOB_ACKNOWLEDGED, Metric
from kubelora_api.names import ANNOTATION_ACKNOWLEDGED, SHORT_NAME

JOB_LABELS: Final = "cluster, job_namespace, name"
"""Labels that identify a job, on the operator's series and on those of the training pods."""
POD_LABELS: Final = f"{JOB_LABELS}, pod"
OPERATOR_LABELS: Final = "cluster, namespace, release"
"""Labels that identify an installed operator."""

AlertSeverity = Literal["critical", "warning", "info"]
"""critical pages: work is being lost while you sleep. warning is for the next working day. info is
for a dashboard."""


class Knob(StrEnum):
    """Placeholders for values of the chart."""

    FOR = "$(for)"
    WINDOW = "$(window)"
    INTERVAL = "$(interval)"
    KEEP_FIRING_FOR = "$(keepFiringFor)"
    STALLED_SECONDS = "$(stalledAfterSeconds)"
    NOT_STARTING_SECONDS = "$(notStartingAfterSeconds)"
    QUEUED_SECONDS = "$(queuedAfterSeconds)"
    SILENT_SECONDS = "$(silentAfterSeconds)"
    OPERATOR_ABSENT_FOR = "$(operatorAbsentFor)"
    UNSEEN_FOR = "$(unseenFor)"
    NAMESPACE = "$(namespace)"
    RELEASE = "$(release)"
    RUNBOOKS = "$(runbookUrlBase)"
    GRAFANA = "$(grafanaUrl)"
    DATASOURCE = "$(datasourceUid)"


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the rule in Prometheus' format."""
        labels = {"labels": self.labels} if self.labels else {}
        return {"record": self.name, "expr": self.expr, **labels}


@dataclass(frozen=True)
class Runbook:
    """What an alert's section of the documentation contains.

    meaning: What is true while it fires.
    impact: What is lost meanwhile, and what still works.
    diagnosis: Commands, each with a comment of what to look for.
    mitigation: Commands, each with a comment of when it is right.
    """

    meaning: str
    impact: str
    diagnosis: str
    mitigation: str


@dataclass(frozen=True)
class Alert:
    """An alerting rule.

    severity: None where the series carries the label itself.
    summary: Complete in itself in a notification's subject, under 100 characters with usual names.
    hold: Its ``for``; empty fires at once.
    about: Whether it concerns a job, which its labels then name, or the operator.
    """

    name: str
    expr: str
    severity: AlertSeverity | None
    summary: str
    description: str
    runbook: Runbook
    hold: str = ""
    about: Literal["job", "operator"] = "job"
    finding: str = ""

    @property
    def section(self) -> str:
        """The section of the documentation on this alert, relative to docs/."""
        return f"{'findings' if self.finding else 'alerts'}.md#{_anchor(self)}"

    @property
    def dashboard(self) -> str:
        """The dashboard on what the alert is about, relative to Grafana's address."""
        if self.about == "operator":
            return "d/kubelora-operator"
        label = "{{ $labels.%s }}"
        return "d/kubelora-run?" + "&".join(
            f"var-{variable}={label % of}"
            for variable, of in (
                ("cluster", "cluster"),
                ("namespace", "job_namespace"),
                ("job", "name"),
            )
        )

    def document(self) -> dict[str, Any]:
        """Return the rule in Prometheus' format.

        An alert carries the job's namespace, or the operator's, as ``namespace`` too, by which
        Alertmanager configurations of a namespace select.
        """
        labels = {
            **({"severity": self.severity} if self.severity else {}),
            "namespace": "{{ $labels.job_namespace }}"
            if self.about == "job"
            else str(Knob.NAMESPACE),
        }
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.hold} if self.hold else {}),
            "keep_firing_for": str(Knob.KEEP_FIRING_FOR),
            "labels": labels,
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{Knob.RUNBOOKS}/{self.section}",
                "dashboard_url": f"{Knob.GRAFANA}/{self.dashboard}",
            },
        }


def _anchor(alert: Alert) -> str:
    return (alert.finding or alert.name).lower()


JOB: Final = "{{ $labels.job_namespace }}/{{ $labels.name }}"
"""The job, in an annotation."""
IN_JOB: Final = "{{ $labels.name }} -n {{ $labels.job_namespace }}"
"""The job, as kubectl's arguments in an annotation."""
DESCRIBE: Final = f"kubectl describe {SHORT_NAME} {IN_JOB}"


def of_job(metric: Metric, **labels: str) -> str:
    """Select a metric's series that name a job: a second scrape path may add others without.

    Args:
        metric: The metric.
        labels: Matchers such as ``state='="Running"'``.
    """
    matchers = ['name!=""', *(f"{label}{match}" for label, match in labels.items())]
    return f"{metric.name}{{{','.join(matchers)}}}"


def per_job(series: str) -> str:
    """Reduce series to one per job."""
    return f"max by ({JOB_LABELS}) ({series})"


def unacknowledged(name: str, expr: str) -> str:
    """Leave out jobs whose annotation acknowledges this alert.

    Args:
        name: Name of the alert.
        expr: Its expression.
    """
    known = of_job(JOB_ACKNOWLEDGED, alert=f'="{name}"')
    return f"({expr})\nunless on ({JOB_LABELS}) {known}"


def acknowledge(name: str, attempt: str = "ATTEMPT") -> str:
    """Return the command that acknowledges an alert.

    Args:
        name: Name of the alert.
        attempt: Number of the attempt it is about.
    """
    entry = f"{ANNOTATION_ACKNOWLEDGED}={name.removeprefix('Kubelora')}@{attempt}"
    return f"kubectl annotate {SHORT_NAME} NAME -n NAMESPACE --overwrite {entry}"

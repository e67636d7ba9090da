"""Generator of the runbooks: ``docs/alerts.md``, and what every alert's section contains."""

from charts.job_rules import job_alerts
from charts.operator_rules import operator_alerts
from charts.rule import Alert, Runbook, acknowledge

_HEAD = f"""\
<!-- Generated from charts/*_rules.py by `python -m charts.generate`. Do not edit. -->
# An alert fired

Alerts named after a finding (`KubeloraUpdatesLost`, `KubeloraGradientNonFinite`, …) have their
runbooks in [findings.md](findings.md). This page is about the others: what no pod can notice about
itself, or what outlives it. Labels name the job: `job_namespace` and `name`, and `cluster` where
one Prometheus holds several. The annotations `runbook_url` and `dashboard_url` link to the alert's
section and to its dashboard.

In the commands, replace the words in capitals: `NAME` and `NAMESPACE` are the alert's labels `name`
and `job_namespace`.

## What pages

- **critical**: work is being lost while you sleep, or no other alert is sure to fire. Critical
  findings under `health.policy: Warn` while the job runs, and those below that say so.
- **warning**: somebody must act on the next working day; no more is lost. Critical findings of a
  job that has stopped or that its policy stops, warnings, and failed, suspended and waiting jobs.
- **info**: for a dashboard. GPU time is wasted, or a setting accepts losses.

`monitoring.rules.severities` changes the severity of single alerts.

## How an alert ends

Alerts on jobs read the operator's series, which it derives from the job's status. They live as long
as the object, so a job that failed, was suspended by its policy, or is complete with a critical
finding keeps its alert until somebody acts: deletes it, resumes it, or **acknowledges** the alert
by an annotation of the job:

    {acknowledge("KubeloraUpdatesLost")}

`ATTEMPT` is the job's `status.attempt`: the same finding of a later attempt alerts again. Without
`@ATTEMPT` the alert is acknowledged for good. Several names are separated by commas. The status
keeps what a run found, also after it cleared or the run was resumed, so the alert of a finding ends
with the job or by an acknowledgement.

An alert ends `monitoring.rules.keepFiringFor` after its cause: a gap between scrapes, or an
operator that restarts, must not end it and raise it again.

## One cause, one page

[alertmanager-inhibition.yaml](alertmanager-inhibition.yaml) has inhibition rules to add to
Alertmanager's configuration, under `inhibit_rules`. Of several findings of one job, the one that
comes first in the order of precedence (`PRECEDENCE` in `kubelora_api.thresholds`) mutes the others;
a finding mutes the suspension or failure that it caused; a missing operator mutes what
follows from it. Group by job:
`group_by: [cluster, job_namespace, name]`.
"""


def alerts_page() -> str:
    """Render the page, with a section for each alert that is not on a finding."""
    return "\n".join([_HEAD, *(_section(a) for a in [*job_alerts(), *operator_alerts()])])


def runbook_lines(runbook: Runbook) -> list[str]:
    """Render a runbook's four parts."""
    return [
        *("**Meaning.** " + runbook.meaning, ""),
        *("**Impact.** " + runbook.impact, ""),
        *("**Diagnosis.**", "", *_commands(runbook.diagnosis), ""),
        *("**Mitigation.**", "", *_commands(runbook.mitigation), ""),
    ]


def _section(alert: Alert) -> str:
    held = f", after {alert.hold}" if alert.hold else ""
    lines = [f"## {alert.name}", "", f"Severity: {alert.severity}{_readable(held)}.", ""]
    return "\n".join([*lines, *runbook_lines(alert.runbook)])


def _commands(text: str) -> list[str]:
    return ["```sh", *text.splitlines(), "```"]


def _readable(held: str) -> str:
    return held.replace("$(", "`monitoring.rules.").replace(")", "`")

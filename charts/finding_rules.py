"""Rules on findings: what they are recorded as, and one alert for each row of the table.

A finding has up to three sources, of which any is enough. The operator's series come from the job's
status and outlive the pod, which the finding may end; the pod's own gauge is the quickest; limits
that apply to every run are also compared with the metrics themselves, in case the watchdog errs.
"""

import re
from typing import Final

from charts.rule import (
    DESCRIBE,
    JOB,
    JOB_LABELS,
    POD_LABELS,
    Alert,
    Knob,
    Record,
    Runbook,
    acknowledge,
    of_job,
    per_job,
    unacknowledged,
)
from kubelora_api import metrics
from kubelora_api.names import SHORT_NAME
from kubelora_api.thresholds import THRESHOLDS, Event, Threshold

FINDING: Final = "kubelora:finding"
"""One series per job and finding, whose ``severity`` is critical only while the job trains on."""
_KNOWN: Final = "kubelora:finding:known"
_JUDGED: Final = "kubelora:finding:judged"
_STOPPED: Final = "kubelora:job:stopped"
_FINDING_LABELS: Final = f"{JOB_LABELS}, finding, severity"


def judged_here() -> tuple[Threshold, ...]:
    """Return the limits that are compared with metrics in Prometheus."""
    return tuple(t for t in THRESHOLDS if t.in_prometheus)


def records() -> list[Record]:
    """Build the recording rules, in the order of their dependence."""
    gauges = [t for t in judged_here() if t.metric.type != "counter"]
    return [
        *(Record(recorded_name(t), _judged_steps(t)) for t in gauges),
        *(
            Record(_JUDGED, _judgement(t), {"finding": t.finding, "severity": t.severity})
            for t in judged_here()
        ),
        Record(_KNOWN, _known()),
        Record(_STOPPED, _stopped()),
        Record(FINDING, _by_cost()),
    ]


def finding_alert(found: Threshold | Event) -> Alert:
    """Build the alert of a finding, without ``for`` because it is a median already."""
    name = f"Kubelora{found.finding}"
    return Alert(
        name=name,
        expr=unacknowledged(name, f'{FINDING}{{finding="{found.finding}"}}'),
        severity=None,
        summary=f"{JOB}: {in_words(found.finding)}",
        description=f"{_measured(found.finding)}{found.sentence} See {DESCRIBE}",
        runbook=finding_runbook(found),
        finding=found.finding,
    )


def in_words(finding: str) -> str:
    """Return a finding's name as words: ``UpdatesLost`` as ``updates lost``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", finding).lower()


def recorded_name(threshold: Threshold) -> str:
    """Return the name of the recorded series of a metric's values at evaluated steps."""
    return f"kubelora:{threshold.metric.name.removeprefix('kubelora_')}:judged"


def _judged_steps(threshold: Threshold) -> str:
    """Select the metric's value once per optimizer step, and only where it can be compared.

    Left out: the first steps (lora_A has no gradient while lora_B is 0), steps with a learning rate
    of 0 (nothing is meant to move), a value that repeats (validation, export, a long step), and
    NaN, which marks a step that is not evaluated.
    """
    step = of_job(metrics.STEP)
    return (
        f"{of_job(threshold.metric)} >= 0\n"
        f"and on ({POD_LABELS}) {step} > {threshold.skip_steps}\n"
        f"and on ({POD_LABELS}) {step} != {step} offset {Knob.INTERVAL}\n"
        f"and on ({POD_LABELS}) {of_job(metrics.LEARNING_RATE)} > 0"
    )


def _judgement(threshold: Threshold) -> str:
    """Select what is beyond the limit now and was so before the hold time.

    Holding in the expression rather than by ``for`` survives a restart of Prometheus and a gap
    between scrapes. A counter must rise within the window: a Prometheus that has just started can't
    know when an old count was made. What the first scrape of a short-lived pod shows is in its
    findings.
    """
    if threshold.metric.type == "counter":
        window = f"{of_job(threshold.metric)}[{Knob.WINDOW}]"
        return per_job(f"max_over_time({window}) > min_over_time({window})")
    worst = "min" if threshold.op == "<" else "max"
    now, before = _beyond(threshold, ""), _beyond(threshold, f" offset {Knob.FOR}")
    return f"{worst} by ({JOB_LABELS}) (\n  {now}\n  and {before}\n)"


def _beyond(threshold: Threshold, offset: str) -> str:
    """Select groups whose median is beyond the limit, from as many steps as the watchdog needs."""
    series = f"{recorded_name(threshold)}[{Knob.WINDOW}]{offset}"
    return (
        f"quantile_over_time(0.5, {series}) {threshold.op} {threshold.limit:g}"
        f" and count_over_time({series}) >= {threshold.window}"
    )


def _known() -> str:
    """Unite the sources; where several know a finding, the first that is listed gives the value."""
    sources = (
        of_job(metrics.JOB_FINDING),
        _JUDGED,
        f"{of_job(metrics.HEALTH_FINDING)} == 1",
    )
    return "\nor ".join(f"max by ({_FINDING_LABELS}) ({source})" for source in sources)


def _stopped() -> str:
    """Select jobs that lose no more work: they have ended, or their policy ends them."""
    ended = of_job(metrics.JOB_STATE, state='=~"Suspended|Suspending|Failed|Complete"')
    ending = of_job(metrics.JOB_INFO, policy='!="Warn"')
    return per_job(f"{ended} or {ending}")


def _by_cost() -> str:
    """Make a critical finding a warning where the job is stopped: it can wait for the morning."""
    critical = f'{_KNOWN}{{severity="critical"}}'
    stopped = f"{critical} and on ({JOB_LABELS}) {_STOPPED}"
    return (
        f'{_KNOWN}{{severity="warning"}}\n'
        f"or ({critical} unless on ({JOB_LABELS}) {_STOPPED})\n"
        f'or label_replace({stopped}, "severity", "warning", "", "")'
    )


def _measured(finding: str) -> str:
    """Write the part of the description that Prometheus fills in: value, limit, group, pod."""

    def each(metric: str, condition: str, text: str) -> str:
        matchers = 'cluster=%q,job_namespace=%q,name=%q,finding="' + finding + '"'
        query = f"printf `{metric}{{{matchers}}}{condition}`"
        job = "$labels.cluster $labels.job_namespace $labels.name"
        return f"{{{{ with {query} {job} | query }}}}{text}{{{{ end }}}}"

    value = '{{ . | first | value | printf "%.3g" }}'
    label = '{{ . | first | label "%s" }}'
    group = '{{ with . | first | label "group" }} in {{ . }}{{ end }}'
    return (
        each(metrics.JOB_FINDING.name, " > -Inf", f"Measured {value}{group}. ")
        + each(metrics.JOB_FINDING_LIMIT.name, "", f"Limit {value}. ")
        + each(metrics.JOB_FINDING_SINCE.name, "", f"Since step {value}. ")
        + each(metrics.JOB_FINDING.name, "", f"Attempt {label % 'attempt'}. ")
        + each(metrics.HEALTH_FINDING.name, " == 1", f"Pod {label % 'pod'}. ")
    )


def finding_runbook(found: Threshold | Event) -> Runbook:
    """Build the runbook of a finding: the same commands for all, the cure from its row."""
    critical = found.severity == "critical"
    name = f"Kubelora{found.finding}"
    return Runbook(
        meaning=found.reason,
        impact="Under `health.policy: Warn` training continues, and what it learns is in doubt "
        "from the finding's step on: the alert is critical. Under any other policy, and once the "
        "job has ended, no more is lost: it is a warning. "
        "It fires until the job is deleted or it is acknowledged: "
        "the status keeps what was found."
        if critical
        else "Training continues and nothing is known to be lost.",
        diagnosis="# value, limit, group and first step\n"
        f"kubectl get {SHORT_NAME} NAME -n NAMESPACE -o jsonpath='{{.status.health}}'\n"
        "# conditions in words, and the last checkpoint\n"
        f"kubectl describe {SHORT_NAME} NAME -n NAMESPACE",
        mitigation=MITIGATION + acknowledge(name),
    )


MITIGATION: Final = (
    "# stop behind a checkpoint while you look\n"
    f"kubectl patch {SHORT_NAME} NAME -n NAMESPACE --type merge "
    '-p \'{"spec":{"suspend":true}}\'\n'
    "# continue from that checkpoint\n"
    f"kubectl patch {SHORT_NAME} NAME -n NAMESPACE --type merge "
    '-p \'{"spec":{"suspend":false}}\'\n'
    "# return to a checkpoint from before the finding when it happens, once\n"
    f"kubectl patch {SHORT_NAME} NAME -n NAMESPACE --type merge "
    '-p \'{"spec":{"health":{"policy":"Rollback"}}}\'\n'
    "# it is known, and the job stays: ATTEMPT is status.attempt\n"
)

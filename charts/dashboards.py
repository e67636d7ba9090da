"""Grafana dashboards, built by Grafana's foundation SDK from metrics and limits of the contract.

Three of them: a training run, the fleet of all jobs, and the operator. A panel takes its
description from its metric's help text and its threshold line from the table of limits.
"""

import json
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from charts.rule import JOB_LABELS
from kubelora_api import metrics
from kubelora_api.metrics import Metric
from kubelora_api.thresholds import THRESHOLDS

_JOB: Final = 'cluster=~"$cluster",job_namespace=~"$namespace",name=~"$job"'
_FLEET: Final = 'cluster=~"$cluster",job_namespace=~"$namespace"'
_OPERATOR: Final = 'cluster=~"$cluster"'
_HALF_WIDTH: Final = 12
"""Grafana's grid has 24 columns: two panels in a row."""
_GENERATED: Final = (
    "Generated from charts/dashboards.py by `python -m charts.generate`. Do not edit."
)
NOT_SHOWN: Final = {
    metrics.JOB_ACKNOWLEDGED: "silences alerts; a user reads the annotation itself",
    metrics.JOB_FINDING_LIMIT: "in the alert's description, and the line of the metric's own panel",
    metrics.JOB_FINDING_SINCE: "in the alert's description and in kubectl describe",
    metrics.JOB_INFO: "settings, which the job's spec has",
    metrics.NUMERICS_INFO: "settings, which the job's spec has",
}
"""Exported metrics that are on no dashboard, each with the reason."""


@dataclass(frozen=True)
class Panel:
    """A graph: its title, unit, and queries with their legends.

    about: The metric whose help text describes it, and whose limit is its threshold line.
    """

    title: str
    unit: str
    about: Metric
    queries: tuple[tuple[str, str], ...]


def _by_group(title: str, metric: Metric, unit: str = "short") -> Panel:
    query = f"max by ({JOB_LABELS}, group) ({metric.name}{{{_JOB}}})"
    return Panel(title, unit, metric, ((query, "{{name}} {{group}}"),))


def _of_job(title: str, metric: Metric, unit: str = "short", *more: Metric) -> Panel:
    shown = ((f"max by ({JOB_LABELS}) ({m.name}{{{_JOB}}})", m.name) for m in (metric, *more))
    return Panel(title, unit, metric, tuple((q, "{{name}} " + _short(name)) for q, name in shown))


def _rate(title: str, metric: Metric, unit: str, by: str = JOB_LABELS) -> Panel:
    legend = "{{name}}" if by == JOB_LABELS else "{{name}} {{group}}"
    query = f"max by ({by}) (rate({metric.name}{{{_JOB}}}[$__rate_interval]))"
    return Panel(title, unit, metric, ((query, legend),))


def _short(name: str) -> str:
    return name.removeprefix("kubelora_").replace("_", " ")


def run_panels() -> list[Panel]:
    """Return the panels of a training run, the likeliest cause first."""
    category = f"max by ({JOB_LABELS}, category) ({metrics.CATEGORY_LOSS.name}{{{_JOB}}})"
    found = f"max by ({JOB_LABELS}, finding) ({metrics.HEALTH_FINDING.name}{{{_JOB}}})"
    ratio = metrics.GRAD_UNDERFLOW_RATIO.name
    underflow = f"max by ({JOB_LABELS}, group, dtype) ({ratio}{{{_JOB}}})"
    age = f"time() - max by ({JOB_LABELS}) ({metrics.CHECKPOINT_TIME.name}{{{_JOB}}})"
    return [
        _of_job("Loss", metrics.LOSS),
        Panel("Loss by category", "short", metrics.CATEGORY_LOSS, ((category, "{{category}}"),)),
        Panel("Findings", "bool_yes_no", metrics.HEALTH_FINDING, ((found, "{{finding}}"),)),
        _of_job("Steps", metrics.STEP, "short", metrics.STEPS_PLANNED),
        _by_group("Gradient norm", metrics.GRAD_NORM),
        _of_job("Clipped gradient norm", metrics.CLIPPED_NORM),
        _by_group("Largest gradient element", metrics.GRAD_ABSMAX),
        _by_group("Gradient elements that are zero", metrics.GRAD_ZERO_RATIO, "percentunit"),
        Panel(
            "Gradient underflow",
            "percentunit",
            metrics.GRAD_UNDERFLOW_RATIO,
            ((underflow, "{{name}} {{group}} {{dtype}}"),),
        ),
        _rate(
            "Gradient elements that are not finite",
            metrics.GRAD_NONFINITE,
            "cps",
            f"{JOB_LABELS}, group",
        ),
        _by_group("Absorbed gradient mass", metrics.ABSORBED_RATIO, "percentunit"),
        _by_group("Accumulation error", metrics.ACCUMULATION_ERROR_RATIO, "percentunit"),
        _by_group("Lost updates", metrics.UPDATE_LOST_RATIO, "percentunit"),
        _by_group("Update scale", metrics.UPDATE_SCALE),
        _of_job("Size of the adapter", metrics.ADAPTER_SIZE),
        _by_group("Second moments that are stuck", metrics.OPTIMIZER_STUCK_RATIO, "percentunit"),
        _by_group("Damping by eps", metrics.ADAM_EPS_DAMPING_RATIO, "percentunit"),
        _by_group("Balance of lora_A and lora_B", metrics.LORA_BALANCE),
        _of_job("Learning rate", metrics.LEARNING_RATE, "sci"),
        _of_job("Modules without a gradient", metrics.DEAD_MODULE_COUNT),
        _of_job("Backward passes", metrics.BACKWARD_PASSES, "short", metrics.MICRO_STEPS),
        _of_job("Stale working copy", metrics.WORKING_COPY_STALE_RATIO, "percentunit"),
        _of_job("Divergence of ranks", metrics.RANK_DIVERGENCE),
        _of_job("Loss scale", metrics.LOSS_SCALE),
        _rate("Skipped steps", metrics.STEPS_SKIPPED, "cps"),
        _rate("Images a second", metrics.SAMPLES, "cps"),
        _of_job("Time of a step", metrics.STEP_DURATION, "s"),
        _rate("Share of the time that waits for data", metrics.DATA_WAIT, "percentunit"),
        _of_job("GPU memory, peak", metrics.DEVICE_MEMORY_PEAK, "bytes"),
        _of_job("Host memory, peak", metrics.HOST_MEMORY_PEAK, "bytes"),
        Panel("Age of the checkpoint", "s", metrics.CHECKPOINT_TIME, ((age, "{{name}}"),)),
        _of_job("Checkpoint", metrics.CHECKPOINT_STEP),
        _of_job("Failed trackers", metrics.TRACKERS_FAILED),
    ]


def fleet_panels() -> list[Panel]:
    """Return the panels of all jobs."""

    def of(metric: Metric) -> str:
        return f"{metric.name}{{{_FLEET}}}"

    def per_job(metric: Metric) -> str:
        return f"max by ({JOB_LABELS}) ({of(metric)})"

    on = f"on ({JOB_LABELS})"
    job, name = "{{job_namespace}}/{{name}}", "{{job_namespace}}"
    of_state = f"max by (cluster, job_namespace, state) ({of(metrics.JOBS)})"
    verdict = f"sum by (verdict) (max by ({JOB_LABELS}, verdict) ({of(metrics.JOB_VERDICT)}))"
    found = f"count by (finding) (max by ({JOB_LABELS}, finding) ({of(metrics.JOB_FINDING)}))"
    reason = f"max by ({JOB_LABELS}, state, reason) ({of(metrics.JOB_STATE)})"
    reasons = f"sum by (state, reason) ({reason})"
    hours = (
        f"sum by (job_namespace) ({per_job(metrics.JOB_ACTIVE_SECONDS)} * {on} "
        f"{per_job(metrics.JOB_GPUS)}) / 3600"
    )
    done = f"{per_job(metrics.JOB_STEP)} / {on} {per_job(metrics.JOB_STEPS_PLANNED)}"
    waiting = f"topk(10, time() - {per_job(metrics.JOB_STATE_SINCE)})"
    silent = f"topk(10, time() - {per_job(metrics.JOB_REPORT_TIME)})"
    unsaved = f"topk(10, {per_job(metrics.JOB_STEP)} - {on} {per_job(metrics.JOB_CHECKPOINT_STEP)})"
    return [
        Panel("Jobs by state", "short", metrics.JOBS, ((of_state, f"{name} {{{{state}}}}"),)),
        Panel("Jobs by verdict", "short", metrics.JOB_VERDICT, ((verdict, "{{verdict}}"),)),
        Panel("Jobs by finding", "short", metrics.JOB_FINDING, ((found, "{{finding}}"),)),
        Panel("Jobs by reason", "short", metrics.JOB_STATE, ((reasons, "{{state}} {{reason}}"),)),
        Panel("GPU hours of existing jobs", "h", metrics.JOB_ACTIVE_SECONDS, ((hours, name),)),
        Panel(
            "Goodput", "percentunit", metrics.JOB_GOODPUT, ((per_job(metrics.JOB_GOODPUT), job),)
        ),
        Panel("GPUs asked for", "short", metrics.JOB_GPUS, ((per_job(metrics.JOB_GPUS), job),)),
        Panel("Progress", "percentunit", metrics.JOB_STEPS_PLANNED, ((done, job),)),
        Panel("Last loss", "short", metrics.JOB_LOSS, ((per_job(metrics.JOB_LOSS), job),)),
        Panel(
            "Images a second",
            "cps",
            metrics.JOB_SAMPLES_PER_SECOND,
            ((per_job(metrics.JOB_SAMPLES_PER_SECOND), job),),
        ),
        Panel("Ten longest in their state", "s", metrics.JOB_STATE_SINCE, ((waiting, job),)),
        Panel("Ten longest without a report", "s", metrics.JOB_REPORT_TIME, ((silent, job),)),
        Panel(
            "Ten with most steps since a checkpoint",
            "short",
            metrics.JOB_CHECKPOINT_STEP,
            ((unsaved, job), (per_job(metrics.JOB_CHECKPOINT_INTERVAL), f"{job} interval")),
        ),
        Panel("Restarts", "short", metrics.JOB_RESTARTS, ((per_job(metrics.JOB_RESTARTS), job),)),
        Panel("Attempts", "short", metrics.JOB_ATTEMPT, ((per_job(metrics.JOB_ATTEMPT), job),)),
    ]


def operator_panels() -> list[Panel]:
    """Return the panels of the operator."""
    by = "cluster, namespace, release"
    legend = "{{namespace}}/{{release}}"

    def largest(metric: Metric) -> str:
        return f"max by ({by}) ({metric.name}{{{_OPERATOR}}})"

    def rate(metric: Metric, label: str, suffix: str = "") -> str:
        series = f"{metric.name}{suffix}{{{_OPERATOR}}}"
        return f"sum by ({by}, {label}) (rate({series}[$__rate_interval]))"

    results, errors = metrics.OPERATOR_RECONCILES, metrics.OPERATOR_API_ERRORS
    leads, depth = metrics.OPERATOR_IS_LEADER, metrics.OPERATOR_QUEUE_DEPTH
    lag, duration = metrics.OPERATOR_WATCH_LAG, metrics.OPERATOR_RECONCILE_DURATION
    slow = f"histogram_quantile(0.99, {rate(duration, 'le', '_bucket')})"
    return [
        Panel("Leader", "bool_yes_no", leads, ((largest(leads), legend),)),
        Panel("Looks by result", "cps", results, ((rate(results, "result"), "{{result}}"),)),
        Panel("99 % of looks take less", "s", duration, ((slow, legend),)),
        Panel("Queue", "short", depth, ((largest(depth), legend),)),
        Panel("Changes that the watch missed", "short", lag, ((largest(lag), legend),)),
        Panel("Failed requests", "cps", errors, ((rate(errors, "code"), "{{code}}"),)),
    ]


DASHBOARDS: Final = {
    "run": ("KubeLoRA: training run", run_panels),
    "fleet": ("KubeLoRA: fleet", fleet_panels),
    "operator": ("KubeLoRA: operator", operator_panels),
}
"""Title and panels by the last part of a dashboard's uid and file name."""


def dashboard_json(key: str) -> str:
    """Build a dashboard as the JSON that Grafana reads."""
    title, panels = DASHBOARDS[key]
    built = (
        dashboard.Dashboard(title)
        .uid(f"kubelora-{key}")
        .tags(["kubelora"])
        .readonly()
        .refresh("1m")
        .time("now-6h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for variable in _variables(key):
        built = built.with_variable(variable)
    if key == "run":
        built = built.annotation(_findings())
    for panel in panels():
        built = built.with_panel(_graph(panel))
    document = json.loads(JSONEncoder(sort_keys=True).encode(built.build()))
    return json.dumps({"description": _GENERATED, **document}, indent=2) + "\n"


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _variables(key: str) -> list[dashboard.QueryVariable]:
    state = metrics.JOB_STATE.name
    named = [("cluster", f"label_values({metrics.OPERATOR_IS_LEADER.name}, cluster)")]
    if key != "operator":
        named += [("namespace", f'label_values({state}{{cluster=~"$cluster"}}, job_namespace)')]
    if key == "run":
        named += [("job", f"label_values({state}{{{_FLEET}}}, name)")]
    return [
        dashboard.QueryVariable(name)
        .query(query)
        .datasource(_source())
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        for name, query in named
    ]


def _findings() -> dashboard.AnnotationQuery:
    found = f"count by ({JOB_LABELS}, finding) ({metrics.JOB_FINDING.name}{{{_JOB}}})"
    query = dashboard.AnnotationQuery().name("Findings").datasource(_source()).enable(True)
    return query.icon_color("red").expr(found)


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.about.help)
        .unit(panel.unit)
        .datasource(_source())
        .span(_HALF_WIDTH)
        .height(8)
        .legend(common.VizLegendOptions().placement(common_models.LegendPlacement.BOTTOM))
    )
    limit = limit_of(panel.about)
    if limit is not None:
        steps = [
            models.Threshold(value=None, color="green"),
            models.Threshold(value=limit, color="red"),
        ]
        graph = graph.thresholds(
            dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
        ).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.LINE)
        )
    for place, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend)
        graph = graph.with_target(target.ref_id("ABCDEF"[place]))
    return graph


def limit_of(metric: Metric) -> float | None:
    """Return the lowest limit on the metric's own value, which is not one of a derived quantity."""
    return min((t.limit for t in THRESHOLDS if t.metric is metric and not t.quantity), default=None)

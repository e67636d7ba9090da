"""Status fields for people, taken from a pod's report.

Pure. Best effort by design: no decision depends on a report.
"""

import re
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.report import FinalReport, RunReport
from kubelora_api.spec import JobSpec
from kubelora_api.status import HealthStatus, JobStatus, Progress
from kubelora_operator.decision.active_time import active_seconds
from kubelora_operator.decision.conditions import HEALTHY, Conditions, format_time
from kubelora_operator.decision.snapshot import TrainerPod

_REASON: Final = re.compile("[A-Z][A-Za-z0-9]{0,63}")


def format_duration(seconds: float) -> str:
    """Format a duration as ``45s``, ``12m``, ``1h20m`` or ``3d4h``: its two largest units."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m" if minutes else f"{whole}s"


def format_percent(step: int, total: int) -> str | None:
    """Format the completed share in per cent, rounded down so that 100% means done."""
    return f"{min(max(step, 0) * 100 // total, 100)}%" if total > 0 else None


def is_duration(seconds: float | None) -> bool:
    """Return whether a reported number of seconds can be one: below ten years."""
    return seconds is not None and 0 <= seconds < 10 * 365 * 86400


def _usefulness(seconds: float | None, active: int) -> dict[str, object]:
    """Return the fields of the progress about the share of the running time that was useful."""
    if seconds is None or not is_duration(seconds):
        return {}
    return {"useful_seconds": int(seconds), "goodput": format_percent(int(seconds), active)}


def apply_report(status: JobStatus, report: RunReport, now: datetime) -> JobStatus:
    """Update the status from a running pod's report.

    Args:
        status: The status so far.
        report: What the pod answered.
        now: Time of the report.
    """
    left = report.seconds_left
    usable = is_duration(left)
    return status.model_copy(
        update={
            "progress": Progress(
                step=report.step,
                total_steps=report.total_steps or None,
                percent=format_percent(report.step, report.total_steps),
                samples_per_second=report.samples_per_second,
                eta=format_duration(left) if left is not None and usable else None,
                estimated_completion_time=format_time(now + timedelta(seconds=left))
                if left is not None and usable
                else None,
                loss=report.loss,
                last_report_time=format_time(now),
            ).model_copy(update=_usefulness(report.useful_seconds, active_seconds(status, now))),
            "health": report.health,
            "checkpoint": report.checkpoint or status.checkpoint,
        }
    )


def apply_final_report(status: JobStatus, final: FinalReport | None, done: bool) -> JobStatus:
    """Update the status from a pod's final report.

    Args:
        status: The status so far.
        final: The final report; None if the pod left none.
        done: Whether the job is complete.
    """
    old = status.progress or Progress()
    step = final.step if final and final.step else old.step
    total = final.total_steps if final and final.total_steps else old.total_steps
    if done:
        step = total = total or step
    progress = old.model_copy(
        update={
            "step": step,
            "total_steps": total,
            "percent": "100%" if done else format_percent(step or 0, total or 0),
            "eta": None,
            "estimated_completion_time": None,
            "loss": final.loss if final and final.loss is not None else old.loss,
        }
        | _usefulness(
            final.useful_seconds if final and final.useful_seconds else old.useful_seconds,
            status.active_seconds or 0,
        )
    )
    changed: dict[str, object] = {"progress": progress if done or step is not None else None}
    if final:
        changed["checkpoint"] = final.checkpoint or status.checkpoint
        changed["artifacts"] = final.artifacts if done else status.artifacts
        if final.health.verdict != "Unknown":
            changed["health"] = final.health
    return status.model_copy(update=changed)


def newest_final_report(pods: tuple[TrainerPod, ...]) -> FinalReport | None:
    """Return the final report of the newest pod of the lowest index that left one, or None."""
    newest_first = pods[::-1]
    by_index = sorted(newest_first, key=lambda p: p.index)
    return next((p.final for p in by_index if p.final), None)


def set_health_condition(conditions: Conditions, health: HealthStatus | None) -> Conditions:
    """Set NumericallyHealthy from the verdict of the run's watchdog."""
    if health is None or health.verdict == "Unknown":
        if conditions.get(HEALTHY) and conditions.reason(HEALTHY) != "StatusUnreachable":
            return conditions
        return conditions.set(HEALTHY, "Unknown", "NoReport", "no pod has reported yet")
    summary = " ".join(f.message for f in health.findings[:3])
    match health.verdict:
        case "Healthy":
            return conditions.set(
                HEALTHY, "True", "Healthy", "gradients and updates are within their limits"
            )
        case "Warning":
            return conditions.set(
                HEALTHY, "True", "Warning", summary or "the watchdog reports a warning"
            )
        case _:
            critical = (f.name for f in health.findings if f.severity == "critical")
            worst = next((n for n in critical if _REASON.fullmatch(n)), "Critical")
            return conditions.set(
                HEALTHY, "False", worst, summary or "the watchdog reports critical findings"
            )


def lossy_precision_message(spec: JobSpec) -> str | None:
    """Return a message if the chosen precision is known to lose gradients, else None."""
    lossy = [
        f"precision.{name} is bf16"
        for name, value in (
            ("accumulator", spec.precision.accumulator),
            ("masterWeights", spec.precision.master_weights),
        )
        if value != "fp32"
    ]
    if not lossy:
        return None
    return (
        f"{' and '.join(lossy)}: small gradients or updates are lost, which allowLossyPrecision "
        "accepts; set fp32 to keep them"
    )

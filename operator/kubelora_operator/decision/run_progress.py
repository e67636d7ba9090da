"""From a pod's report to the lines of the status that a person reads.

Pure. Best effort by design: no decision hangs on a report.
"""

import re
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.report import FinalReport, RunReport
from kubelora_api.spec import JobSpec
from kubelora_api.status import HealthStatus, JobStatus, Progress
from kubelora_operator.decision.conditions import HEALTHY, Conditions, time_text

_REASON: Final = re.compile("[A-Z][A-Za-z0-9]{0,63}")


def duration_text(seconds: float) -> str:
    """``45s``, ``12m``, ``1h20m`` or ``3d4h``: the two largest units that matter."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m" if minutes else f"{whole}s"


def percent_text(step: int, total: int) -> str | None:
    """Share done in whole per cent, rounded down: 100% means done."""
    return f"{min(max(step, 0) * 100 // total, 100)}%" if total > 0 else None


def with_report(status: JobStatus, report: RunReport, now: datetime) -> JobStatus:
    """The status with what a running pod told."""
    left = report.seconds_left
    usable = left is not None and 0 <= left < 10 * 365 * 86400
    return status.model_copy(
        update={
            "progress": Progress(
                step=report.step,
                total_steps=report.total_steps or None,
                percent=percent_text(report.step, report.total_steps),
                samples_per_second=report.samples_per_second,
                eta=duration_text(left) if left is not None and usable else None,
                estimated_completion_time=time_text(now + timedelta(seconds=left))
                if left is not None and usable
                else None,
                loss=report.loss,
                last_report_time=time_text(now),
            ),
            "health": report.health,
            "checkpoint": report.checkpoint or status.checkpoint,
        }
    )


def with_final_report(status: JobStatus, final: FinalReport | None, done: bool) -> JobStatus:
    """The status with a pod's last word. ``done``: the job is complete."""
    old = status.progress or Progress()
    step = final.step if final and final.step else old.step
    total = final.total_steps if final and final.total_steps else old.total_steps
    if done:
        step = total = total or step
    progress = old.model_copy(
        update={
            "step": step,
            "total_steps": total,
            "percent": "100%" if done else percent_text(step or 0, total or 0),
            "eta": None,
            "estimated_completion_time": None,
            "loss": final.loss if final and final.loss is not None else old.loss,
        }
    )
    changed: dict[str, object] = {"progress": progress if done or step is not None else None}
    if final:
        changed["checkpoint"] = final.checkpoint or status.checkpoint
        changed["artifacts"] = final.artifacts if done else status.artifacts
        if final.health.verdict != "Unknown":
            changed["health"] = final.health
    return status.model_copy(update=changed)


def judge_health(conditions: Conditions, health: HealthStatus | None) -> Conditions:
    """NumericallyHealthy, from the verdict of the run's own watchdog."""
    if health is None or health.verdict == "Unknown":
        if conditions.get(HEALTHY):
            return conditions
        return conditions.set(HEALTHY, "Unknown", "NoReport", "no pod has reported yet")
    said = " ".join(f.message for f in health.findings[:3])
    match health.verdict:
        case "Healthy":
            return conditions.set(
                HEALTHY, "True", "Healthy", "gradients and updates are within their bounds"
            )
        case "Warning":
            return conditions.set(HEALTHY, "True", "Warning", said or "the watchdog warns")
        case _:
            critical = (f.name for f in health.findings if f.severity == "critical")
            worst = next((n for n in critical if _REASON.fullmatch(n)), "Critical")
            return conditions.set(
                HEALTHY, "False", worst, said or "the watchdog reports critical findings"
            )


def lossy_settings(spec: JobSpec) -> str | None:
    """A sentence where the precision asked for is known to lose gradients."""
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
        f"{' and '.join(lossy)}: small gradients or updates are lost, as allowLossyPrecision "
        "accepts; fp32 loses none"
    )

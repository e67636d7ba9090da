"""Suspension of a job by its user: its pods save a checkpoint, and it waits. Pure."""

from dataclasses import replace

from kubelora_operator.decision.conditions import FAILED, QUEUED, RESTARTING, SUSPENDED
from kubelora_operator.decision.plan_builder import REQUEUE_SOON, PlanBuilder, set_not_running
from kubelora_operator.decision.run_progress import apply_final_report, newest_final_report


def suspend_job(builder: PlanBuilder) -> PlanBuilder:
    """Stop the pods, or record that the job is suspended if none is left."""
    builder = builder.clear_condition(QUEUED, "Suspended", "spec.suspend is true")
    builder = builder.clear_condition(FAILED, "Suspended", "spec.suspend is true")
    builder = builder.update_status(pending_since=None)
    final = newest_final_report(builder.pods)
    if final or builder.status.progress:
        builder = replace(builder, status=apply_final_report(builder.status, final, done=False))
    if builder.live:
        builder = builder.set_condition(
            SUSPENDED, False, "Suspending", "the pods are saving a checkpoint before they exit"
        )
        return replace(builder.delete_live_jobs(), requeue_after=REQUEUE_SOON)
    # Clear Restarting only now that Suspended is about to become True: until then it is what
    # records that the finished attempt was accounted for.
    builder = builder.clear_condition(RESTARTING, "Suspended", "spec.suspend is true")
    at = builder.status.checkpoint
    where = f" from the checkpoint of step {at.step}" if at else " from the last checkpoint"
    builder = set_not_running(builder, "Suspended", "spec.suspend is true")
    return builder.set_condition(
        SUSPENDED,
        True,
        "SuspendedByUser",
        "spec.suspend is true; set it to false to "
        + (f"resume{where}" if builder.status.attempt else "start training"),
    )

"""Rules for an attempt that has ended: the job is complete, fails, or is to be restarted. Pure."""

from dataclasses import replace

from kubelora_operator.decision.attempt_start import remaining_backoff
from kubelora_operator.decision.conditions import (
    COMPLETE,
    FAILED,
    QUEUED,
    RESTARTING,
    SUSPENDED,
    format_time,
)
from kubelora_operator.decision.failure import Failure, RestartCost, avoid
from kubelora_operator.decision.free_restarts import (
    budget_exceeded,
    count_free_restart,
    suspend_by_budget,
)
from kubelora_operator.decision.plan_builder import (
    REQUEUE_SOON,
    PlanBuilder,
    finish_time,
    set_not_running,
)
from kubelora_operator.decision.policy_suspension import policy_is_suspend, suspend_by_policy
from kubelora_operator.decision.run_progress import (
    apply_final_report,
    newest_final_report,
    set_health_condition,
)
from kubelora_operator.decision.snapshot import Child, Explanation
from kubelora_operator.decision.suspension import suspend_job
from kubelora_operator.decision.trainer_end import peers_given_up


def complete_job(builder: PlanBuilder, child: Child) -> PlanBuilder:
    """Record the result of a complete attempt, once nothing else could write."""
    if _others_live(builder):
        return replace(builder, requeue_after=REQUEUE_SOON)
    final = newest_final_report(builder.pods)
    status = apply_final_report(builder.status, final, done=True)
    ended = finish_time(child, builder.now)
    message = final.message if final else "training has finished; the pod left no final report"
    builder = set_not_running(
        replace(builder, status=status), "Finished", "the trainer has finished"
    )
    builder = builder.clear_condition(QUEUED, "Complete", "the job is complete")
    builder = builder.clear_condition(RESTARTING, "Complete", "the job is complete")
    builder = builder.clear_condition(SUSPENDED, "Complete", "the job is complete")
    if final or builder.status.health:
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, builder.status.health)
        )
    return builder.update_status(
        completion_time=format_time(ended), child_uid=child.uid
    ).set_condition(COMPLETE, True, "TrainingDone", message)


def account_for_failure(builder: PlanBuilder, failure: Failure) -> PlanBuilder:
    """Account once for an attempt that ended without completing the job."""
    status = apply_final_report(builder.status, newest_final_report(builder.pods), done=False)
    builder = replace(builder, status=status)
    restarts = builder.status.restarts + (1 if failure.cost is RestartCost.COUNTED else 0)
    if failure.cost is RestartCost.FINAL:
        return fail_job(builder, failure.explanation)
    if restarts > builder.snapshot.max_restarts and failure.cost is RestartCost.COUNTED:
        limit = builder.snapshot.max_restarts
        return fail_job(
            builder,
            Explanation(
                "MaxRestartsExceeded",
                f"{failure.explanation.message}. "
                f"restartPolicy.maxRestarts ({limit}) has been reached",
            ),
        )
    builder = set_not_running(builder, failure.explanation.reason, failure.explanation.message)
    builder = builder.clear_condition(
        QUEUED, "AttemptEnded", f"attempt {builder.status.attempt} has ended"
    )
    builder = builder.update_status(restarts=restarts)
    if failure.memory_step is not None:
        builder = builder.update_status(out_of_memory_step=failure.memory_step)
    if failure.failed_node is not None:
        builder = builder.update_status(
            avoided_nodes=avoid(builder.status.avoided_nodes, failure.failed_node)
        )
    builder = count_free_restart(builder, failure)
    if builder.snapshot.suspend and not builder.live:
        return suspend_job(builder)
    if failure.cost is RestartCost.SUSPENDED and policy_is_suspend(builder):
        return suspend_by_policy(builder, failure.explanation)
    if failure.cost is RestartCost.FREE and budget_exceeded(builder):
        return suspend_by_budget(builder, failure)
    counted = failure.cost is RestartCost.COUNTED
    cost = (
        f"restart {restarts} of {builder.snapshot.max_restarts}"
        if counted
        else "not counted against maxRestarts"
    )
    builder = builder.set_condition(
        RESTARTING,
        True,
        failure.explanation.reason,
        f"attempt {builder.status.attempt} ended: {failure.explanation.message}. The next attempt "
        f"resumes from the last checkpoint ({cost})",
    )
    return replace(builder, requeue_after=remaining_backoff(builder))


def fail_job(builder: PlanBuilder, explanation: Explanation) -> PlanBuilder:
    """Record that the job has failed, once nothing else could write."""
    if _others_live(builder):
        return replace(builder, requeue_after=REQUEUE_SOON)
    ended = finish_time(builder.child, builder.now)
    builder = set_not_running(builder, explanation.reason, explanation.message)
    builder = builder.clear_condition(QUEUED, "Failed", "the job has failed")
    builder = builder.clear_condition(RESTARTING, "Failed", "the job has failed")
    builder = builder.clear_condition(SUSPENDED, "Failed", "the job has failed")
    if builder.status.health and builder.status.health.verdict != "Unknown":
        builder = replace(
            builder, conditions=set_health_condition(builder.conditions, builder.status.health)
        )
    return builder.update_status(completion_time=format_time(ended)).set_condition(
        FAILED, True, explanation.reason, explanation.message
    )


def _others_live(builder: PlanBuilder) -> bool:
    """Return whether anything but the current child could still write to the output.

    The job's result is recorded only after that has ended.
    """
    attempt = builder.status.attempt
    given_up = peers_given_up(builder.snapshot, attempt, builder.now)
    return any(c.live and c.attempt != attempt for c in builder.snapshot.children) or any(
        p.writing and not (given_up and p.attempt == attempt) for p in builder.snapshot.pods
    )

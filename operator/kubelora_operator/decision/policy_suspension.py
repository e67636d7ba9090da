"""Suspension of a job by its own health policy until the user has looked at it. Pure.

The user resumes the job by changing the spec, which raises the generation: no annotation
or command is needed.
"""

from dataclasses import replace
from typing import Final

from kubelora_operator.decision.conditions import RESTARTING, SUSPENDED
from kubelora_operator.decision.failure import HEALTH_POLICY_REASON
from kubelora_operator.decision.free_restarts import BUDGET_REASON
from kubelora_operator.decision.plan_builder import PlanBuilder
from kubelora_operator.decision.run_progress import set_health_condition
from kubelora_operator.decision.snapshot import Explanation

USER_WAIT_REASONS: Final = (HEALTH_POLICY_REASON, BUDGET_REASON)
"""Reasons of a suspension that ends when the user changes the spec."""


def suspend_by_policy(builder: PlanBuilder, explanation: Explanation) -> PlanBuilder:
    """Set Suspended, with a message on how to resume."""
    builder = builder.clear_condition(
        RESTARTING, HEALTH_POLICY_REASON, "the job waits for the user"
    )
    builder = replace(
        builder, conditions=set_health_condition(builder.conditions, builder.status.health)
    )
    return builder.set_condition(
        SUSPENDED,
        True,
        HEALTH_POLICY_REASON,
        f"{explanation.message.rstrip('.')}. To accept the finding and resume from the checkpoint, "
        "set spec.suspend to true and then to false; to continue regardless of findings, set "
        "spec.health.policy to Warn",
    )


def waits_for_user(builder: PlanBuilder) -> bool:
    """Return whether the job is suspended and the user has not changed the spec since.

    Any change of the generation counts, because two quick changes of suspend may be seen as one.
    """
    suspended = builder.conditions.get(SUSPENDED)
    return (
        suspended is not None
        and suspended.status == "True"
        and suspended.observed_generation == builder.snapshot.generation
        and (
            suspended.reason == BUDGET_REASON
            or (suspended.reason == HEALTH_POLICY_REASON and policy_is_suspend(builder))
        )
    )


def policy_is_suspend(builder: PlanBuilder) -> bool:
    """Return whether the policy is still Suspend: it may change while the pod terminates."""
    return builder.snapshot.spec is None or builder.snapshot.spec.health.policy == "Suspend"

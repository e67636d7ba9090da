"""A job that its own health policy suspended: it waits until its user has looked. Pure.

The user goes on by changing the spec, which raises the generation; no annotation, no command.
"""

from dataclasses import replace

from kubelora_operator.decision.conditions import RESTARTING, SUSPENDED
from kubelora_operator.decision.failure import HELD_REASON
from kubelora_operator.decision.plan_builder import Draft
from kubelora_operator.decision.run_progress import judge_health
from kubelora_operator.decision.snapshot import Why


def hold(draft: Draft, why: Why) -> Draft:
    """Suspended, with a sentence on how to go on."""
    draft = draft.untell(RESTARTING, HELD_REASON, "the job waits for its user")
    draft = replace(draft, conditions=judge_health(draft.conditions, draft.status.health))
    return draft.tell(
        SUSPENDED,
        True,
        HELD_REASON,
        f"{why.message.rstrip('.')}. To go on from the checkpoint and accept what was found, set "
        "spec.suspend to true and then to false; to train on whatever is found, set "
        "spec.health.policy to Warn",
    )


def held(draft: Draft) -> bool:
    """Whether the job waits for its user, who has not changed the spec since it was told so.

    Any change counts, by the generation: two quick changes of suspend may be seen as one.
    """
    told = draft.conditions.get(SUSPENDED)
    return (
        told is not None
        and (told.status, told.reason) == ("True", HELD_REASON)
        and told.observed_generation == draft.seen.generation
        and policy_suspends(draft)
    )


def policy_suspends(draft: Draft) -> bool:
    """Whether the policy still is Suspend; it may have been changed while the pod ended."""
    return draft.seen.spec is None or draft.seen.spec.health.policy == "Suspend"

"""The rules: from what is known about a job to what is to be done. Pure; time is passed in.

Read `decide` from the top: each rule that applies ends the story. The rules keep these promises,
which the property tests hold them to: never two live attempts; a finished job is never recreated;
an ended attempt is accounted for once, before its successor is numbered; a plan that was carried
out asks for nothing more.

An ended attempt is accounted for by the condition Restarting (or Suspended) turning True in the
same write that raises ``restarts``: the cause can then vanish with the pod and is not judged twice.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from kubelora_api.report import FinalReport
from kubelora_operator.decision.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    QUEUED,
    RESTARTING,
    RUNNING,
    SUSPENDED,
    Conditions,
    time_of,
    time_text,
)
from kubelora_operator.decision.display_state import state_of
from kubelora_operator.decision.events import notices_between
from kubelora_operator.decision.failure import (
    HELD_REASON,
    Cause,
    Cost,
    cause_of,
    deleted_from_outside,
    end_of,
    ran_for,
    restart_delay,
)
from kubelora_operator.decision.plan import Plan
from kubelora_operator.decision.plan_builder import SOON, Draft, stopped
from kubelora_operator.decision.policy_suspension import held, hold, policy_suspends
from kubelora_operator.decision.run_progress import (
    judge_health,
    lossy_settings,
    with_final_report,
)
from kubelora_operator.decision.running import track
from kubelora_operator.decision.snapshot import Child, Observation, TrainerPod, Why

KEPT_ATTEMPTS: Final = 3
"""Jobs of ended attempts that stay for `kubectl describe` and `kubectl logs`."""
_FREE_REASONS: Final = frozenset(
    {"Disrupted", "PodDeleted", "JobDeleted", "Interrupted", HELD_REASON}
)
_REJECTIONS: Final = frozenset({"Rejected", "NameTaken"})


def decide(seen: Observation, now: datetime, poll: timedelta = timedelta(seconds=10)) -> Plan:
    """What is to be done about the job. ``poll``: between two looks at a running pod."""
    if seen.deleting:
        return Plan(status=seen.status)
    draft = Draft(
        seen, now, seen.status, Conditions.start(seen.status.conditions, seen.generation, now)
    )
    if _terminal(draft.conditions):
        strays = tuple(c for c in seen.children if c.live and not c.deleting)
        return Plan(seen.status, delete=strays, again_after=SOON if draft.live else None)
    return _finished(_decide(_accepted(_recovered(draft)), poll))


def _terminal(conditions: Conditions) -> bool:
    return conditions.is_true(COMPLETE) or conditions.is_true(FAILED)


def _recovered(draft: Draft) -> Draft:
    """Take the attempt's number from what exists when the status was wiped."""
    known = {c.attempt for c in draft.seen.children} | draft.seen.anchors
    if draft.status.attempt > 0 or not known:
        newest = max(known, default=0)
        if newest > draft.status.attempt and draft.seen.child_of(newest):
            return draft.update(attempt=newest)
        return draft
    return draft.update(attempt=max(known))


def _accepted(draft: Draft) -> Draft:
    spec = draft.seen.spec
    if spec is None:
        what = "; ".join(draft.seen.problems) or "the resource can't be read"
        return draft.tell(ACCEPTED, False, "InvalidSpec", f"{what}. Mend it and apply it again")
    lossy = lossy_settings(spec)
    if lossy:
        return draft.tell(ACCEPTED, True, "LossyPrecision", lossy)
    return draft.tell(ACCEPTED, True, "Valid", "the job is valid")


def _decide(draft: Draft, poll: timedelta) -> Draft:
    child = draft.child
    draft = _without_strays(draft)
    if child and child.state == "complete":
        return _complete(draft, child)
    if child and child.state == "failed" and not draft.accounted:
        return _ended(draft, cause_of(draft.seen, child))
    if child is None and draft.status.attempt > 0 and not draft.accounted:
        if draft.conditions.reason(SUSPENDED) != "Suspending":
            if _lost(draft):
                return _state_lost(draft)
            if draft.status.child_uid:
                name = f"{draft.seen.name}-{draft.seen.uid[:5]}-{draft.status.attempt}"
                return _ended(draft, deleted_from_outside(name))
        elif not draft.seen.suspend:
            return _next_attempt(draft)
    if draft.seen.suspend:
        return _suspend(draft)
    if held(draft):
        return draft
    if draft.accounted:
        return _next_attempt(draft)
    if child is None:
        return _start(draft)
    return track(draft, child, poll)


def _without_strays(draft: Draft) -> Draft:
    """Delete live Jobs of other attempts, and ended ones beyond those that are kept."""
    attempt = draft.status.attempt
    strays = tuple(
        c
        for c in draft.seen.children
        if not c.deleting
        and ((c.live and c.attempt != attempt) or c.attempt <= attempt - KEPT_ATTEMPTS)
    )
    return replace(draft, delete=strays)


def _lost(draft: Draft) -> bool:
    """The status was wiped and the Job is gone; only the ConfigMap says that there was one.

    Anchors are looked up only where the status knows of no attempt.
    """
    return draft.status.attempt in draft.seen.anchors


def _state_lost(draft: Draft) -> Draft:
    return _fail(
        draft,
        Why(
            "StateLost",
            f"attempt {draft.status.attempt} was started, but its Job and the status are gone, so "
            "its outcome is unknown. Look at the output; create a new job to train again",
        ),
    )


def _complete(draft: Draft, child: Child) -> Draft:
    if _others_live(draft):
        return replace(draft, again_after=SOON)
    final = _last_word(draft.pods)
    status = with_final_report(draft.status, final, done=True)
    ended = end_of(child, draft.now)
    message = final.message if final else "training is done; its pod left no final report"
    draft = stopped(replace(draft, status=status), "Finished", "the trainer is done", ended)
    draft = draft.untell(RESTARTING, "Complete", "the job is complete")
    draft = draft.untell(SUSPENDED, "Complete", "the job is complete")
    if final or draft.status.health:
        draft = replace(draft, conditions=judge_health(draft.conditions, draft.status.health))
    return draft.update(completion_time=time_text(ended), child_uid=child.uid).tell(
        COMPLETE, True, "TrainingDone", message
    )


def _ended(draft: Draft, cause: Cause) -> Draft:
    """An attempt is over and not done: account for it, once."""
    status = with_final_report(draft.status, _last_word(draft.pods), done=False)
    draft = replace(draft, status=status)
    restarts = draft.status.restarts + (1 if cause.cost is Cost.COUNTED else 0)
    if cause.cost is Cost.FINAL:
        return _fail(draft, cause.why)
    if restarts > draft.seen.max_restarts and cause.cost is Cost.COUNTED:
        limit = draft.seen.max_restarts
        return _fail(
            draft,
            Why(
                "MaxRestartsExceeded",
                f"{cause.why.message}. restartPolicy.maxRestarts ({limit}) is used up",
            ),
        )
    ended = end_of(draft.child, draft.now)
    draft = stopped(draft, cause.why.reason, cause.why.message, ended)
    draft = draft.update(restarts=restarts)
    if draft.seen.suspend and not draft.live:
        return _suspend(draft)
    if cause.cost is Cost.HELD and policy_suspends(draft):
        return hold(draft, cause.why)
    counted = cause.cost is Cost.COUNTED
    price = f"restart {restarts} of {draft.seen.max_restarts}" if counted else "free of charge"
    draft = draft.tell(
        RESTARTING,
        True,
        cause.why.reason,
        f"attempt {draft.status.attempt} ended: {cause.why.message}. The next attempt goes on "
        f"from the last checkpoint ({price})",
    )
    return replace(draft, again_after=_remaining(draft))


def _fail(draft: Draft, why: Why) -> Draft:
    if _others_live(draft):
        return replace(draft, again_after=SOON)
    ended = end_of(draft.child, draft.now)
    draft = stopped(draft, why.reason, why.message, ended)
    draft = draft.untell(RESTARTING, "Failed", "the job has failed")
    draft = draft.untell(SUSPENDED, "Failed", "the job has failed")
    if draft.status.health and draft.status.health.verdict != "Unknown":
        draft = replace(draft, conditions=judge_health(draft.conditions, draft.status.health))
    return draft.update(completion_time=time_text(ended)).tell(
        FAILED, True, why.reason, why.message
    )


def _others_live(draft: Draft) -> bool:
    """Whether anything but the current child could still write: a result waits for its end."""
    attempt = draft.status.attempt
    return any(c.live and c.attempt != attempt for c in draft.seen.children) or any(
        p.live for p in draft.seen.pods
    )


def _suspend(draft: Draft) -> Draft:
    live = tuple(c for c in draft.seen.children if c.live and not c.deleting)
    others = tuple(c for c in draft.delete if c not in live)
    draft = draft.untell(QUEUED, "Suspended", "spec.suspend is true")
    if draft.live:
        draft = draft.tell(SUSPENDED, False, "Suspending", "the pods save a checkpoint and end")
        return replace(draft, delete=others + live, again_after=SOON)
    # Restarting stays until Suspended takes over, so that the ended attempt stays accounted for.
    draft = draft.untell(RESTARTING, "Suspended", "spec.suspend is true")
    at = draft.status.checkpoint
    where = f" from the checkpoint of step {at.step}" if at else " from the last checkpoint"
    draft = stopped(draft, "Suspended", "spec.suspend is true", draft.now)
    return draft.tell(
        SUSPENDED,
        True,
        "SuspendedByUser",
        "spec.suspend is true: set it to false to go on" + (where if draft.status.attempt else ""),
    )


def _next_attempt(draft: Draft) -> Draft:
    """Number the next attempt, when the old one is gone, its delay is over and the spec is good."""
    if draft.live:
        return replace(draft, again_after=SOON)
    wait = _remaining(draft)
    if wait > timedelta():
        return replace(draft, again_after=wait)
    if draft.seen.spec is None:
        return draft
    number = draft.status.attempt + 1
    draft = draft.update(attempt=number, child_uid=None)
    draft = draft.untell(SUSPENDED, "Resumed", f"attempt {number} goes on")
    draft = draft.untell(RESTARTING, "Restarted", f"attempt {number} was started")
    return _create(draft)


def _start(draft: Draft) -> Draft:
    """Create the attempt's objects: the first time, or again after a crash in between."""
    if draft.seen.spec is None:
        return _idle(draft, "InvalidSpec", "the job is not valid; see the condition Accepted")
    if draft.live:
        return replace(draft, again_after=SOON)
    return _create(draft.update(attempt=max(draft.status.attempt, 1)))


def _create(draft: Draft) -> Draft:
    rejection = draft.seen.rejection
    if rejection:
        draft = _idle(draft, rejection.reason, rejection.message)
    elif draft.conditions.reason(RUNNING) not in _REJECTIONS:
        draft = _idle(draft, "Starting", "the pod is being created")
    if draft.status.start_time is None:
        draft = draft.update(start_time=time_text(draft.now))
    return replace(draft, create=draft.status.attempt)


def _idle(draft: Draft, reason: str, message: str) -> Draft:
    return draft.tell(RUNNING, False, reason, message)


def _remaining(draft: Draft) -> timedelta:
    """How long the next attempt still has to wait."""
    restarting = draft.conditions.get(RESTARTING)
    if restarting is None or restarting.status != "True":
        return timedelta()
    free = restarting.reason in _FREE_REASONS
    restarts = draft.status.restarts
    count = draft.status.attempt - restarts if free else restarts
    delay = restart_delay(Cost.FREE if free else Cost.COUNTED, count, ran_for(draft.child))
    due = time_of(restarting.last_transition_time) + delay
    return max(due - draft.now, timedelta())


def _last_word(pods: tuple[TrainerPod, ...]) -> FinalReport | None:
    newest_first = pods[::-1]
    by_index = sorted(newest_first, key=lambda p: p.index)
    return next((p.final for p in by_index if p.final), None)


def _finished(draft: Draft) -> Plan:
    """The plan of a draft: conditions and state put into the status, notices of what changed."""
    status = draft.status.model_copy(
        update={
            "observed_generation": draft.seen.generation,
            "conditions": list(draft.conditions.items),
            "state": state_of(draft.conditions, draft.status.attempt),
        }
    )
    return Plan(
        status=status,
        delete=draft.delete,
        create=draft.create,
        notices=notices_between(draft.seen.status, status),
        again_after=draft.again_after,
    )

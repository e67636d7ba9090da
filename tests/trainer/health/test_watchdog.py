"""The watchdog: what it calls ill, and above all what it must not call ill."""

import json
import math
from dataclasses import replace

import pytest

from kubelora_api.status import Finding
from kubelora_api.thresholds import FINDINGS, GRADIENT_NONFINITE, Event, Threshold
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement
from kubelora_trainer.health.detectors.quantities import FactorFacts, RunFacts
from kubelora_trainer.health.detectors.repeated_draws import RepeatedDraws
from kubelora_trainer.health.detectors.step_limits import StepLimits
from kubelora_trainer.health.watch_state import WatchState, from_json, to_json
from kubelora_trainer.telemetry.step_metrics import GroupNumbers, StepNumbers
from tests.trainer.fixtures.watching import after, micro_batch, watchdog

WELL = GroupNumbers(
    grad_norm=1.0,
    grad_absmax=0.1,
    grad_zero_ratio=0.0,
    grad_nonfinite=0,
    grad_underflow_ratio=0.0,
    absorbed_ratio=0.0,
    update_lost_ratio=0.01,
)


FACTS = RunFacts("bf16", 1.0, 1e-4, 1000, 0.0, (FactorFacts("down.lora_A", 100, False),))


def observe(state: WatchState, step: StepNumbers) -> WatchState:
    return after([step], FACTS, state)


def accept(state: WatchState) -> WatchState:
    accepting = watchdog(StepLimits(FACTS), saved=state)
    accepting.accept()
    return accepting.snapshot()


def numbers(step: int, **groups: GroupNumbers) -> StepNumbers:
    named = {name.replace("_lora", ".lora"): group for name, group in groups.items()}
    return StepNumbers(step, 1e-4, 1.0, 8, 1.0, named or {"down.lora_A": WELL}, [1.0], [0.1])


def watch(*steps: GroupNumbers) -> WatchState:
    state = WatchState()
    for index, group in enumerate(steps):
        state = observe(state, numbers(index + 1, down_lora_A=group))
    return state


def test_a_healthy_run_is_healthy_once_every_limit_was_compared() -> None:
    assert watch(*[WELL] * 7).verdict == "Unknown"
    assert watch(*[WELL] * 8).verdict == "Healthy"


def test_lora_a_without_a_gradient_at_the_start_is_no_finding() -> None:
    # lora_B is 0 at first, so lora_A has no gradient for one step, two with a warm-up from 0.
    asleep = replace(WELL, grad_norm=0.0, grad_zero_ratio=1.0)
    assert watch(asleep, asleep, *[WELL] * 8).found == {}


def test_a_rate_of_zero_is_no_finding() -> None:
    # The telemetry gives NaN where a step was not meant to move anything.
    still = replace(WELL, update_lost_ratio=math.nan)
    assert watch(*[still] * 20).found == {}


def test_lost_updates_are_found_with_group_value_and_first_step() -> None:
    state = WatchState()
    lossy = replace(WELL, update_lost_ratio=0.97)
    for step in range(1, 12):
        state = observe(state, numbers(step, down_lora_A=lossy, down_lora_B=WELL))
    finding = state.found["UpdatesLost"]
    assert (finding.group, finding.severity, finding.value) == ("down.lora_A", "critical", 0.97)
    # Steps 1 to 3 are skipped, 4 to 8 fill the window of 5.
    assert finding.since_step == 8
    assert "masterWeights" in finding.message
    assert state.verdict == "Critical"
    assert state.active == {"UpdatesLost"}


def test_one_wild_step_raises_no_alarm() -> None:
    wild = replace(WELL, absorbed_ratio=1.0, update_lost_ratio=1.0)
    assert watch(*[WELL] * 6, wild, *[WELL] * 6, wild, wild, *[WELL] * 6).found == {}


def test_three_of_five_steps_are_enough_for_the_median() -> None:
    absorbed = replace(WELL, absorbed_ratio=0.2)
    assert "GradientAbsorbed" in watch(*[WELL] * 6, absorbed, absorbed, absorbed).found


def test_a_single_non_finite_gradient_is_found_at_once() -> None:
    broken = replace(WELL, grad_nonfinite=1)
    state = watch(broken)
    assert state.found["GradientNonFinite"].since_step == 1


def test_a_vanished_gradient_is_found() -> None:
    gone = replace(WELL, grad_norm=0.0, grad_zero_ratio=1.0)
    assert "GradientVanished" in watch(*[gone] * 8).found


def test_a_finding_that_clears_is_no_longer_active_but_stays_in_the_verdict() -> None:
    lossy = replace(WELL, update_lost_ratio=0.9)
    state = watch(*[lossy] * 8, *[WELL] * 5)
    assert state.active == frozenset()
    assert state.due is None
    assert state.verdict == "Critical"


def test_the_state_survives_a_checkpoint() -> None:
    lossy = replace(WELL, update_lost_ratio=0.9)
    state = watch(*[WELL] * 4, *[lossy] * 5)
    restored = from_json(json.loads(json.dumps(to_json(state))))
    assert restored == state
    following = numbers(10, down_lora_A=lossy)
    assert observe(restored, following) == observe(state, following)


def test_the_same_state_is_saved_as_the_same_bytes_whatever_the_order_of_its_hashes() -> None:
    names = [f"Finding{n}" for n in range(40)]
    state = WatchState(judged=frozenset(names), active=frozenset(names[:9]))
    saved = to_json(state)
    assert (saved["judged"], saved["active"]) == (sorted(names), names[:9])


def test_what_is_no_saved_state_is_refused() -> None:
    with pytest.raises(ValueError, match="found"):
        from_json({"found": {"UpdatesLost": "yes"}})


def test_the_status_carries_the_findings() -> None:
    status = watch(*[replace(WELL, update_lost_ratio=0.9)] * 8).status()
    assert status.verdict == "Critical"
    assert [f.name for f in status.findings] == ["UpdatesLost"]
    assert status.findings[0].threshold == pytest.approx(0.5)


def test_what_the_user_went_on_from_is_due_again_only_after_it_cleared() -> None:
    lossy = replace(WELL, update_lost_ratio=0.9)
    state = watch(*[lossy] * 8)
    assert state.due is not None
    state = accept(state)
    for step in range(9, 12):
        state = observe(state, numbers(step, down_lora_A=lossy))
        assert state.due is None
    for step in range(12, 20):
        state = observe(state, numbers(step, down_lora_A=WELL))
    for step in range(20, 25):
        state = observe(state, numbers(step, down_lora_A=lossy))
    assert state.due is not None


class Lasting(Detector):
    """A detector that raises one row in its first step and never clears it, as events are."""

    def __init__(self, row: Threshold | Event) -> None:
        self.rows = (row,)

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        row = self.rows[0]
        if row.finding in known.found:
            return NOTHING
        return Judgement((Finding(name=row.finding, severity=row.severity, message="x"),))


@pytest.mark.parametrize(
    "row", [r for r in FINDINGS if r.severity == "critical"], ids=lambda r: str(r.finding)
)
def test_whatever_lasts_suspends_once_and_not_again_when_the_run_is_resumed(
    row: Threshold | Event,
) -> None:
    first = watchdog(Lasting(row))
    first.on_step(numbers(1))
    assert first.state.due is not None
    first.accept()
    resumed = watchdog(Lasting(row), saved=from_json(to_json(first.snapshot())), reason="resumed")
    for step in (2, 3):
        resumed.on_step(numbers(step))
        again = resumed.state.due is not None
        assert again == (row is GRADIENT_NONFINITE), "accepted, and raised again"
    assert resumed.state.verdict == "Critical"


def test_draws_that_stay_the_same_suspend_once() -> None:
    first = watchdog(RepeatedDraws())
    for micro_step in range(16):
        first.on_micro_batch(micro_batch(micro_step))
    first.on_step(numbers(1))
    assert first.state.due is not None
    first.accept()
    resumed = watchdog(RepeatedDraws(), saved=first.snapshot(), reason="resumed")
    for micro_step in range(16, 48):
        resumed.on_micro_batch(micro_batch(micro_step))
    resumed.on_step(numbers(2))
    assert resumed.state.due is None


def test_a_gradient_that_is_not_finite_is_an_event_that_nobody_accepts_for_the_next_time() -> None:
    state = accept(watch(replace(WELL, grad_nonfinite=1)))
    assert observe(state, numbers(2, down_lora_A=replace(WELL, grad_nonfinite=1))).due is not None


def test_a_finding_that_comes_back_is_told_since_it_came_back() -> None:
    lossy = replace(WELL, update_lost_ratio=0.9)
    state = watch(*[lossy] * 8, *[WELL] * 5, *[replace(WELL, update_lost_ratio=0.6)] * 3)
    finding = state.found["UpdatesLost"]
    assert (finding.since_step, finding.value) == (16, 0.6)

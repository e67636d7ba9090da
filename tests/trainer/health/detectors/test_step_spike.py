"""A single step far above the ones before it is found, and steps that vary as they do are not."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kubelora_trainer.health.detectors.step_spike import StepSpike
from kubelora_trainer.health.watch_state import WatchState, from_json, to_json
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from tests.trainer.fixtures.engine import Engine, Loss
from tests.trainer.fixtures.watching import watchdog


def step(number: int, norm: float = 1.0, loss: float = 0.5, scale: float = math.nan) -> StepNumbers:
    return StepNumbers(number, 1e-4, loss, 1, norm, {}, (), (), loss_scale=scale)


def watch(norms: Sequence[float], first: int = 1) -> Watchdog:
    spikes = watchdog(StepSpike())
    for number, norm in enumerate(norms, first):
        spikes.on_step(step(number, norm))
    return spikes


QUIET = [1.0] * 18
"""3 steps that are left out, and the 15 without which nothing is compared."""


def test_a_norm_is_compared_in_deviations_of_its_logarithm() -> None:
    # Ten at 1 and ten at e^2, less than 25 of them: median e, absolute deviations all 1.
    norms = [1.0] * 3 + [1.0, math.e**2] * 10
    limit = 1 + 8 * 1.4826  # of the logarithm
    assert watch([*norms, math.exp(limit - 0.01)]).state.found == {}
    spike = watch([*norms, math.exp(limit + 0.01)]).state.found["StepSpiked"]
    assert (spike.severity, spike.since_step, spike.group) == ("warning", 24, None)
    assert spike.value == pytest.approx(8 + 0.01 / 1.4826)
    assert spike.threshold == 8.0
    assert spike.message.startswith("The gradient norm of step 24 is 1.43e+05 times the median of")


def test_steps_that_are_all_alike_have_a_least_deviation() -> None:
    # 8 deviations of 0.3: a factor of e^2.4 = 11.02.
    assert watch([*QUIET, 11.0]).state.found == {}
    assert watch([*QUIET, 11.1]).state.found.keys() == {"StepSpiked"}


def test_a_loss_spikes_by_itself_and_the_larger_of_both_is_told() -> None:
    spikes = watch(QUIET)
    spikes.on_step(step(19, norm=20.0, loss=500.0))
    assert spikes.state.found["StepSpiked"].message.startswith(
        "The loss of step 19 is 1e+03 times the median of the 15 steps before it."
    )


def test_a_spike_is_shown_for_25_steps_and_hides_no_other() -> None:
    spikes = watch([*QUIET, 1e6])
    for number in range(20, 44):
        spikes.on_step(step(number))
        assert spikes.state.active == {"StepSpiked"}
    spikes.on_step(step(44))
    assert (spikes.state.active, spikes.state.verdict) == (frozenset(), "Warning")
    for number in (45, 50):
        spikes.on_step(step(number, norm=1e6))
        assert spikes.state.found["StepSpiked"].since_step == number


def test_a_norm_that_falls_or_is_zero_is_no_spike() -> None:
    assert watch([*QUIET, 1e-9, 0.0, 1.0, math.nan, math.inf]).state.found == {}


def test_a_norm_that_grows_tenfold_in_fifty_steps_is_no_spike() -> None:
    assert watch([1e-6 * 10 ** (n / 50) for n in range(200)]).state.found == {}


def test_the_first_steps_are_left_out() -> None:
    # lora_A's gradient is 0 in step 1 and tiny in step 2.
    assert watch([1e-9, 1e-9, 1e-4, *[1.0] * 30]).state.found == {}
    assert watch([*QUIET[:-1], 1e6]).state.found == {}  # 14 steps to compare with


def test_a_step_that_the_loss_scaler_skipped_is_neither_compared_nor_remembered() -> None:
    spikes = watch(QUIET)
    before = spikes.snapshot().detectors
    spikes.on_step(step(19, norm=math.inf, scale=65536.0))
    assert (spikes.state.found, spikes.snapshot().detectors) == ({}, before)


def test_a_loss_of_one_random_timestep_a_step_is_no_spike() -> None:
    """The best loss at batch 1 goes from 1 to 0.004 with the timestep, in the data's own order."""
    for seed in range(20):
        spikes, draw = watchdog(StepSpike()), random.Random(seed)
        for number in range(1, 501):
            loss = 0.004 ** draw.random() * draw.lognormvariate(0.0, 0.2)
            spikes.on_step(step(number, norm=loss, loss=loss))
        assert spikes.state.found == {}


def test_what_is_compared_with_survives_a_checkpoint() -> None:
    spikes = watch(QUIET)
    saved = from_json(json.loads(json.dumps(to_json(spikes.snapshot()))))
    again = watchdog(StepSpike(), saved=saved, reason="resumed")
    again.on_step(step(19, norm=12.0))
    assert again.state.found.keys() == {"StepSpiked"}
    fresh = watchdog(StepSpike(), saved=WatchState(), reason="resumed")
    fresh.on_step(step(19, norm=12.0))
    assert fresh.state.found == {}


def test_a_run_that_is_resumed_right_before_a_spike_finds_it(tmp_path: Path) -> None:
    first = Engine(tmp_path, steps=20)
    first.train(micro_steps=57)  # of 3 a step
    engine = Engine(tmp_path, steps=20)
    real = engine.parts.objective

    def spiking(micro_step: int) -> Loss:
        output = real(micro_step)
        return Loss(output.loss_sum * 1e6, output.samples)

    object.__setattr__(engine.parts, "objective", spiking)
    engine.train()
    assert engine.reporter.watch.found["StepSpiked"].since_step == 20
